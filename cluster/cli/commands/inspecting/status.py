"""`penstock status`: show the workers and their load."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace

from cluster.cli.admin import admin_call, admin_stub, all_ready, to_json, wait_until
from cluster.cli.options import add_admin_options
from cluster.cli.progress import Progress
from cluster.cli.table import STATE_STYLES, styles_for
from penstock.charts.table import NO_STYLES, Styles, columns_of, format_table
from penstock.errors import Unavailable
from penstock.v1 import admin_pb2

_RETRY_S = 0.5  # between attempts to reach a deployment that does not listen yet
_HEADER = ("worker", "state", "pid", "restarts", "run", "wait", "free pages", "address", "")


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", action="store_true", help="print the whole response as JSON")
    add("--wait", type=float, metavar="SECONDS", help="wait until it answers and every worker is ready")
    add_admin_options(parser)


def run(arguments: Namespace) -> int:
    if arguments.wait is not None:
        status = _wait_until_ready(arguments)
    else:
        status = admin_call(arguments, "Status", admin_pb2.StatusRequest())
    if arguments.json:
        print(to_json(status, indent=2))
    else:
        print(format_status(status, columns_of(sys.stdout), styles_for(sys.stdout, STATE_STYLES)))
    return 0


def _wait_until_ready(arguments: Namespace) -> admin_pb2.StatusResponse:
    """Returns the status once every worker is ready, also of a deployment that does not listen yet.

    Raises DeadlineExceeded that names the workers that are not ready, or Unavailable if no deployment has answered.
    """
    deadline_s = time.monotonic() + arguments.wait
    while True:
        left_s = max(0.0, deadline_s - time.monotonic())
        try:
            with admin_stub(arguments) as (stub, metadata):
                return wait_until(stub, metadata, all_ready, left_s, "waiting until every worker is ready")
        except Unavailable:
            if time.monotonic() + _RETRY_S >= deadline_s:
                raise
        with Progress(f"waiting for a deployment at {arguments.admin}"):
            time.sleep(_RETRY_S)


def format_status(status: admin_pb2.StatusResponse, columns: int | None = None, styles: Styles = NO_STYLES) -> str:
    """Formats the deployment's state, a table of workers, routers and spares, and the latest rebalance."""
    state = "ready" if status.ready else "not ready"
    public = [endpoint for endpoint in status.endpoints if not endpoint.endswith("/metrics")]
    has_own = any(worker.member.role == "router" for worker in status.workers)
    where = ", ".join(public) or ("no address yet" if has_own else "the addresses of routers elsewhere")
    head = f"{status.model}: {state}, up {status.uptime_s:.0f} s, at {where}"
    workers = [_worker_row(worker) for worker in status.workers]
    spares = [[spare.name, spare.state, str(spare.pid or "-"), *["-"] * 5, spare.detail] for spare in status.spares]
    elsewhere = [["router", "elsewhere", *["-"] * 5, address, ""] for address in status.routers_elsewhere]
    text = f"{head}\n\n{format_table(_HEADER, workers + elsewhere + spares, columns, styles)}"
    if not has_own and not elsewhere:
        text += "\n\nno router follows it: start one with `python -m router`, whose `admin` is this Admin service"
    balance = status.balance
    if balance.rounds:
        text += (
            f"\n\nrebalanced: {balance.migrated} sequences in {balance.rounds} rounds; latest: {balance.last_reason}"
        )
    return text


def _worker_row(worker: admin_pb2.WorkerStatus) -> list[str]:
    load = worker.load if worker.HasField("load") else None
    return [
        worker.member.worker_id,
        worker.state,
        str(worker.pid or "-"),
        str(worker.num_restarts),
        str(load.num_running) if load else "-",
        str(load.num_waiting) if load else "-",
        f"{load.free_pages}/{load.total_pages}" if load else "-",
        worker.member.address or "-",
        worker.detail or (f"{worker.num_ranks} ranks" if worker.num_ranks > 1 else ""),
    ]
