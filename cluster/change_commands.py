"""The commands that change a deployment while it serves: flip and upgrade. Calls, and what they print."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from cluster.commands import admin_stub
from cluster.operations import Command, to_json
from cluster.terminal import format_drain
from penstock.errors import InvalidInput
from penstock.v1 import admin_pb2

_GRACE_S = 90.0  # of a call beyond what it waits for
FAILED = 1


def add_parsers(subparsers: Any) -> list[tuple[ArgumentParser, Command]]:
    """Each command's parser without the flags that all of them share, and what runs it."""
    flip_parser = subparsers.add_parser("flip", help="let a worker serve in the other role, weights and cache in place")
    flip_parser.add_argument("worker", help="as `penstock status` names it, such as decode-1")
    flip_parser.add_argument("role", help="prefill or decode")
    flip_parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="default: %(default)s")
    flip_parser.add_argument("--json", action="store_true", help="print each step as a line of JSON")
    upgrade_parser = subparsers.add_parser("upgrade", help="replace every worker, by another revision or by new code")
    add = upgrade_parser.add_argument
    add("--model", default="", metavar="DIR", help="that new workers load; default: the one that is served")
    add("--share", type=float, default=0.1, metavar="PART", help="of requests, for new workers at first; %(default)s")
    add("--window", type=float, default=60.0, metavar="SECONDS", help="of comparing both; default: %(default)s")
    add("--min-requests", type=int, default=20, metavar="N", help="at new workers meanwhile; default: %(default)s")
    add("--max-error-rate", type=float, default=0.01, metavar="RATE", help="at new workers; default: %(default)s")
    add("--max-slowdown", type=float, default=1.5, metavar="RATIO", help="of mean times; default: %(default)s")
    add("--ttft", type=float, default=0.0, metavar="SECONDS", help="mean that must hold, instead of the ratio")
    add("--itl", type=float, default=0.0, metavar="SECONDS", help="mean that must hold, instead of the ratio")
    add("--abort", action="store_true", help="roll the upgrade back that is under way")
    add("--json", action="store_true", help="print each step as a line of JSON")
    return [(flip_parser, flip), (upgrade_parser, upgrade)]


def flip(arguments: Namespace) -> int:
    """Prints how far it is; Ctrl-C leaves, and the flip goes on."""
    if arguments.timeout <= 0:
        raise InvalidInput("timeout", f"is {arguments.timeout:g}; give a number of seconds above 0")
    request = admin_pb2.FlipRequest(worker_id=arguments.worker, role=arguments.role, timeout_s=arguments.timeout)
    stage = ""
    with admin_stub(arguments) as (stub, metadata):
        for progress in stub.Flip(request, timeout=arguments.timeout + _GRACE_S, metadata=metadata):
            print(to_json(progress) if arguments.json else format_flip(arguments.worker, progress), flush=True)
            stage = progress.stage
    if stage == "failed":
        print("a new worker is started in its place; `penstock events -f` tells when it is ready", file=sys.stderr)
    return FAILED if stage == "failed" else 0


def upgrade(arguments: Namespace) -> int:
    """Prints how far it is; Ctrl-C leaves, and the upgrade goes on."""
    if arguments.min_requests < 0:
        raise InvalidInput("min_requests", f"is {arguments.min_requests}; give 0 or more")
    request = admin_pb2.UpgradeRequest(
        model=str(Path(arguments.model).resolve()) if arguments.model else "",
        share=arguments.share,
        window_s=arguments.window,
        min_requests=arguments.min_requests,
        max_error_rate=arguments.max_error_rate,
        max_slowdown=arguments.max_slowdown,
        ttft_s=arguments.ttft,
        itl_s=arguments.itl,
        abort=arguments.abort,
    )
    stage = ""
    with admin_stub(arguments) as (stub, metadata):
        for progress in stub.Upgrade(request, metadata=metadata):  # ends with the upgrade, or with Ctrl-C
            print(to_json(progress) if arguments.json else format_upgrade(progress), flush=True)
            stage = progress.stage
    rolled_back = stage == "rolled back"
    return FAILED if rolled_back is not arguments.abort else 0


def format_upgrade(progress: admin_pb2.UpgradeProgress) -> str:
    """One line of `penstock upgrade`."""
    detail = f" ({progress.detail})" if progress.detail else ""
    workers = f"{progress.num_old} old and {progress.num_new} new workers serve"
    return f"{progress.elapsed_s:6.1f} s  {progress.stage}: {workers}{detail}"


def format_flip(worker_id: str, progress: admin_pb2.FlipProgress) -> str:
    """One line of `penstock flip`."""
    match progress.stage:
        case "draining":
            return format_drain(progress.drain)
        case "flipping":
            return f"{worker_id} is empty, {progress.drain.num_moved} moved; it changes its role"
        case "ready":
            return f"{worker_id} serves as {progress.worker_id}, {progress.flip_s:.2f} s after it was empty"
    return f"{worker_id} did not become {progress.worker_id}: {progress.detail}"
