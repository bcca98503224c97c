"""`penstock doctor`: look for faults, with advice for each; exit status 1 with problems.

Checks of this machine also work before a deployment exists; where one answers, its controller checks the workers and
every pair of them that pages travel between. Exit status: 0 no problems (there may be warnings), 1 problems, 2 the
command itself failed.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from types import ModuleType

from cluster.cli.admin import admin_call, admin_stub
from cluster.cli.options import add_admin_options
from cluster.cli.progress import Progress
from cluster.cli.table import STATE_STYLES, styles_for
from cluster.diagnose.findings import Finding, Severity
from penstock.charts.table import NO_STYLES, Styles, columns_of, paint, printable, wrap
from penstock.config import ServeConfig
from penstock.errors import PenstockError, Unavailable
from penstock.v1 import admin_pb2

_PROBLEMS = 1
_STATUS_TIMEOUT_S = 5.0
_DOCTOR_TIMEOUT_S = 600.0
_MARKS = {Severity.OK: "ok", Severity.WARNING: "WARN", Severity.PROBLEM: "FAIL", Severity.SKIPPED: "--"}


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="DIR", help="a checkpoint folder that is to be served")
    add("--config", metavar="FILE", help="the configuration that is to be served")
    add("--no-transfers", action="store_true", help="move no pages between the workers")
    add("--json", action="store_true", help="print one JSON document")
    add_admin_options(parser)


def run(arguments: Namespace) -> int:
    """Prints each finding as it is made, or all of them as one JSON document."""
    findings, styles = [], styles_for(sys.stdout, STATE_STYLES)
    for finding in _examine(arguments):
        findings.append(finding)
        if not arguments.json:
            print(format_finding(finding, styles, columns_of(sys.stdout)), flush=True)
    counts = Counter(finding.severity for finding in findings)
    num_problems, num_warnings = counts[Severity.PROBLEM], counts[Severity.WARNING]
    if arguments.json:
        summary = {"problems": num_problems, "warnings": num_warnings}
        print(json.dumps({**summary, "findings": [_as_json(finding) for finding in findings]}, indent=2))
    else:
        print(f"\n{num_problems} problems, {num_warnings} warnings, {counts[Severity.OK]} checks passed")
    return _PROBLEMS if num_problems else 0


def _as_json(finding: Finding) -> dict[str, str]:
    fields = asdict(finding)
    return {"verdict" if name == "severity" else name: value for name, value in fields.items()}


def format_finding(finding: Finding, styles: Styles = NO_STYLES, columns: int | None = None) -> str:
    """Formats a finding as a line, and a second one for its advice; lines longer than `columns` are folded."""
    mark = _MARKS[finding.severity]
    line = f"{mark:<5} {printable(f'{finding.check:<11} {finding.subject}: {finding.text}')}"
    text = f"{line}\n{'':<5} -> {printable(finding.advice)}" if finding.advice else line
    return paint(f"{mark:<5}", styles.get(mark, "")) + wrap(text, columns, indent=9)[5:]


def _examine(arguments: Namespace) -> Iterator[Finding]:
    local_checks: ModuleType | None = None
    config = None
    try:
        local_checks = import_module("cluster.diagnose.local_checks")  # and Ray, which takes seconds
    except ModuleNotFoundError as error:
        advice = "to serve here too: pip install 'penstock[serve]'"
        yield Finding("install", "this machine", Severity.SKIPPED, f"the client alone, without {error.name}", advice)
    else:
        yield from local_checks.check_machine()
        config, finding = local_checks.check_configuration(arguments.config, arguments.model)
        if finding is not None:
            yield finding
        if config is not None and config.kv_store is not None:
            yield import_module("cluster.diagnose.store_check").check_store(config.kv_store)
    try:
        status = admin_call(arguments, "Status", admin_pb2.StatusRequest(), _STATUS_TIMEOUT_S)
    except PenstockError as error:
        yield from _check_without_deployment(arguments.admin, error, config)
        return
    yield _check_status(status)
    if not any(worker.member.role == "router" for worker in status.workers):
        yield check_routers_elsewhere(status)
    if local_checks is not None:
        yield from (local_checks.check_endpoint(endpoint) for endpoint in status.endpoints)
    request = admin_pb2.DoctorRequest(transfers=not arguments.no_transfers)
    with admin_stub(arguments) as (stub, metadata), Progress("checking the workers") as progress:
        for found in stub.Doctor(request, timeout=_DOCTOR_TIMEOUT_S, metadata=metadata):
            progress.show(f"checking the workers; latest: {found.check} {found.subject}")
            yield Finding(found.check, found.subject, Severity(found.verdict), found.text, found.advice)


def _check_without_deployment(admin: str, error: PenstockError, config: ServeConfig | None) -> Iterator[Finding]:
    if not isinstance(error, Unavailable):
        yield Finding("deployment", admin, Severity.PROBLEM, "its server does not answer the call", error.message)
        return
    problem, _, advice = error.message.partition("; ")
    cause = problem.removeprefix(f"no deployment answers at {admin}: ")
    yield Finding("deployment", admin, Severity.SKIPPED, f"none answers: {cause}", advice)
    if config is not None:
        from cluster.diagnose import local_checks

        yield local_checks.check_ports(config)


def check_routers_elsewhere(status: admin_pb2.StatusResponse) -> Finding:
    """Checks that routers follow a deployment that has none of its own."""
    followers = status.routers_elsewhere
    if not followers:
        advice = "start one with `python -m router`, whose `admin` is this Admin service; its log says what it lacks"
        return Finding(
            "routers", status.model, Severity.PROBLEM, "none follows the deployment, so no client can reach it", advice
        )
    return Finding("routers", status.model, Severity.OK, f"{len(followers)} follow: {', '.join(followers)}")


def _check_status(status: admin_pb2.StatusResponse) -> Finding:
    away = [f"{worker.member.worker_id} is {worker.state}" for worker in status.workers if worker.state != "ready"]
    if not status.ready:
        advice = "`penstock events` says why; `penstock status` shows which workers are missing"
        return Finding("deployment", status.model, Severity.PROBLEM, "; ".join(away) or "not ready", advice)
    if away:
        return Finding("deployment", status.model, Severity.WARNING, "; ".join(away), "`penstock events` says why")
    return Finding("deployment", status.model, Severity.OK, f"{len(status.workers)} processes are ready")
