"""`penstock doctor`: what is wrong here and in the deployment, and what to do about it.

Here: Ray, the model's folder, ports, room in memory and on disk, GPUs; that works before a deployment exists too. Where
one answers, its controller looks at the workers and at every way between two of them. Exit status: 0 nothing is wrong
(there may be warnings), 1 there are problems, 2 the command itself failed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import resource
import shutil
import socket
import subprocess
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from cluster.commands import admin_call, admin_stub
from cluster.findings import Finding, Verdict
from cluster.launch import resolve_ports
from cluster.ray_checks import examine_ray
from engine.model_config import ModelConfig
from penstock.config import ServeConfig, load
from penstock.errors import ConfigError, PenstockError, Unavailable
from penstock.v1 import admin_pb2

PROBLEMS = 1
_HERE = "this machine"
_STATUS_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 5.0
_DOCTOR_TIMEOUT_S = 600.0
_MIN_SHM_BYTES = 256 << 20
_MIN_DISK_SHARE = 0.06  # Ray stops at 5 % of the disk that it logs to
_MIN_FILES = 4096  # a router holds a socket for each client
_MIB = 1 << 20
_MARKS = {Verdict.OK: "ok", Verdict.WARNING: "WARN", Verdict.PROBLEM: "FAIL", Verdict.SKIPPED: "--"}
_GPU_FIELDS = "name,memory.used,memory.total,temperature.gpu,ecc.errors.uncorrected.volatile.total"
_NVIDIA_SMI = ("nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits")


def doctor(arguments: Namespace) -> int:
    """Prints each finding as it comes; the whole as one JSON document with --json."""
    findings = []
    for finding in _examine(arguments):
        findings.append(finding)
        if not arguments.json:
            print(format_finding(finding), flush=True)
    counts = Counter(finding.verdict for finding in findings)
    num_problems, num_warnings = counts[Verdict.PROBLEM], counts[Verdict.WARNING]
    if arguments.json:
        summary = {"problems": num_problems, "warnings": num_warnings}
        print(json.dumps({**summary, "findings": [asdict(one) for one in findings]}, indent=2))
    else:
        print(f"\n{num_problems} problems, {num_warnings} warnings, {counts[Verdict.OK]} checks passed")
    return PROBLEMS if num_problems else 0


def format_finding(finding: Finding) -> str:
    """One line, and one more for what to do."""
    line = f"{_MARKS[finding.verdict]:<5} {finding.check:<11} {finding.subject}: {finding.text}"
    return f"{line}\n{'':<5} -> {finding.advice}" if finding.advice else line


def _examine(arguments: Namespace) -> Iterator[Finding]:
    yield from examine_ray(_HERE)
    yield from _room_here()
    yield from _gpus_here()
    yield _nixl_here()
    config, finding = _configuration(arguments)
    yield from (finding,) if finding else ()
    try:
        status = admin_call(arguments, "Status", admin_pb2.StatusRequest(), _STATUS_TIMEOUT_S)
    except PenstockError as error:
        yield from _without_deployment(arguments, error, config)
        return
    yield from _deployment(status)
    request = admin_pb2.DoctorRequest(transfers=not arguments.no_transfers)
    with admin_stub(arguments) as (stub, metadata):
        for one in stub.Doctor(request, timeout=_DOCTOR_TIMEOUT_S, metadata=metadata):
            yield Finding(one.check, one.subject, Verdict(one.verdict), one.text, one.advice)


# Here.


def _room_here() -> Iterator[Finding]:
    shm = Path("/dev/shm")
    if shm.is_dir():
        free = shutil.disk_usage(shm).free
        few = free < _MIN_SHM_BYTES
        advice = "enlarge it (container: --shm-size=1g); Ray and NCCL work in it" if few else ""
        yield Finding("/dev/shm", _HERE, Verdict.WARNING if few else Verdict.OK, f"{free / _MIB:.0f} MiB free", advice)
    folder = tempfile.gettempdir()
    disk = shutil.disk_usage(folder)
    few = disk.free < _MIN_DISK_SHARE * disk.total
    advice = f"make room in {folder}, or move it with RAY_TMPDIR: Ray stops at 95 %" if few else ""
    text = f"{disk.free / _MIB:.0f} MiB free in {folder}, {disk.free / disk.total:.0%}"
    yield Finding("disk", _HERE, Verdict.WARNING if few else Verdict.OK, text, advice)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= soft < _MIN_FILES
    advice = f"ulimit -n {_MIN_FILES} or more, where routers run: each client is a socket" if few else ""
    yield Finding("open files", _HERE, Verdict.WARNING if few else Verdict.OK, f"{soft} at most", advice)


def _gpus_here() -> Iterator[Finding]:
    """One a GPU; none where the driver's tool is not installed."""
    if shutil.which(_NVIDIA_SMI[0]) is None:
        yield Finding("gpu", _HERE, Verdict.SKIPPED, "no nvidia-smi here: workers compute on the CPU")
        return
    try:
        answer = subprocess.run(_NVIDIA_SMI, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        advice = "look at the driver: dmesg | grep NVRM"
        yield Finding("gpu", _HERE, Verdict.PROBLEM, f"nvidia-smi failed: {error}", advice)
        return
    for index, line in enumerate(answer.stdout.strip().splitlines()):
        yield judge_gpu(index, [cell.strip() for cell in line.split(",")])


def judge_gpu(index: int, cells: list[str]) -> Finding:
    """`cells` are those that `nvidia-smi` was asked for; it says [N/A] to what a GPU cannot tell."""
    name, used, total, degrees, ecc = (*cells, *[""] * 5)[:5]
    text = f"{name}, {used} of {total} MiB used, {degrees} degrees"
    if ecc.isdecimal() and int(ecc):
        advice = f"take GPU {index} out and reset it: nvidia-smi -r -i {index}"
        return Finding("gpu", f"GPU {index}", Verdict.PROBLEM, f"{text}, {ecc} memory errors not corrected", advice)
    return Finding("gpu", f"GPU {index}", Verdict.OK, text)


def _nixl_here() -> Finding:
    if importlib.util.find_spec("nixl") or importlib.util.find_spec("nixl_cu12"):
        return Finding("nixl", _HERE, Verdict.OK, "installed")
    text = "not installed: between hosts KV takes torch.distributed"
    return Finding("nixl", _HERE, Verdict.SKIPPED, text, "for RDMA: pip install 'penstock[nixl]' on every node")


def _configuration(arguments: Namespace) -> tuple[ServeConfig | None, Finding | None]:
    """What was asked to be served; None where neither --config nor --model is given."""
    subject = arguments.config or arguments.model
    if subject is None:
        return None, None
    try:
        config = load(ServeConfig, arguments.config) if arguments.config else ServeConfig(model=arguments.model)
        found = ModelConfig.from_folder(config.model)
    except PenstockError as error:
        return None, Finding("model", subject, Verdict.PROBLEM, error.message, "give a Hugging Face checkpoint folder")
    text = f"{config.model}: {found.num_layers} layers, {found.dtype}, revision {found.revision[:12]}"
    return config, Finding("model", subject, Verdict.OK, text)


# The deployment, as it looks from here.


def _without_deployment(arguments: Namespace, error: PenstockError, config: ServeConfig | None) -> Iterator[Finding]:
    if not isinstance(error, Unavailable):
        yield Finding("deployment", arguments.admin, Verdict.PROBLEM, "its Admin service refuses us", error.message)
        return
    advice = "start one with `penstock serve`, or name its --admin address"
    yield Finding("deployment", arguments.admin, Verdict.SKIPPED, "none answers there", advice)
    if config is not None:
        try:
            resolve_ports(config)
        except ConfigError as conflict:
            yield Finding("ports", _HERE, Verdict.PROBLEM, conflict.message, "or end what listens there")
        else:
            ports = f"{config.http_port}, {config.grpc_port} and {config.admin_port}"
            yield Finding("ports", _HERE, Verdict.OK, f"{ports} are free")


def _deployment(status: admin_pb2.StatusResponse) -> Iterator[Finding]:
    away = [f"{one.member.worker_id} is {one.state}" for one in status.workers if one.state != "ready"]
    if not status.ready:
        advice = "`penstock events` tells why; `penstock status` shows who is missing"
        yield Finding("deployment", status.model, Verdict.PROBLEM, "; ".join(away) or "not ready", advice)
    elif away:
        yield Finding("deployment", status.model, Verdict.WARNING, "; ".join(away), "`penstock events` tells why")
    else:
        yield Finding("deployment", status.model, Verdict.OK, f"{len(status.workers)} processes are ready")
    for endpoint in status.endpoints:
        yield _port(endpoint)


def _port(endpoint: str) -> Finding:
    host, _, port = endpoint.partition("://")[2].rpartition(":")
    try:
        with contextlib.closing(socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S)):
            return Finding("ports", endpoint, Verdict.OK, "somebody listens")
    except OSError as error:
        advice = "see whether a firewall stands between, and `penstock status` for the router"
        return Finding("ports", endpoint, Verdict.PROBLEM, f"cannot be reached from here: {error}", advice)
