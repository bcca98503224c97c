"""`penstock flip`: change a worker's role; its weights and cached pages stay."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from cluster.cli.admin import admin_stub, to_json
from cluster.cli.commands.operating.drain import format_drain
from cluster.cli.options import add_admin_options, require_positive
from cluster.cli.progress import Progress
from penstock.v1 import admin_pb2

_GRACE_S = 90.0  # of the call, beyond the drain's own timeout
_FAILED = 1


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("worker", help="worker to flip, as `penstock status` names it, such as decode-1")
    add("role", help="its new role: prefill or decode")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="deadline of the drain; default: %(default)s")
    add("--force", action="store_true", help="flip even if there is no room for a successor of the worker")
    add("--json", action="store_true", help="print each step as a line of JSON")
    add_admin_options(parser)


def run(arguments: Namespace) -> int:
    """Prints the progress. Ctrl-C ends the command; the flip continues."""
    require_positive("timeout", arguments.timeout)
    request = admin_pb2.FlipRequest(
        worker_id=arguments.worker, role=arguments.role, timeout_s=arguments.timeout, force=arguments.force
    )
    stage = ""
    with admin_stub(arguments) as (stub, metadata), Progress("asking for the flip") as shown:
        for progress in stub.Flip(request, timeout=arguments.timeout + _GRACE_S, metadata=metadata):
            print(to_json(progress) if arguments.json else format_flip(arguments.worker, progress), flush=True)
            stage = progress.stage
            shown.show(f"{arguments.worker}: {stage}")
    if stage != "failed":
        return 0
    print("a new worker is starting in its place; `penstock events -f` shows when it is ready", file=sys.stderr)
    return _FAILED


def format_flip(worker_id: str, progress: admin_pb2.FlipProgress) -> str:
    """Formats one progress message as a line."""
    match progress.stage:
        case "draining":
            return format_drain(progress.drain)
        case "flipping":
            return f"{worker_id} is empty, {progress.drain.num_migrated} migrated; changing its role"
        case "ready":
            return f"{worker_id} serves as {progress.worker_id}, {progress.flip_s:.2f} s after it was empty"
    return f"{worker_id} did not become {progress.worker_id}: {progress.detail}"
