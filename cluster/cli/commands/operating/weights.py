"""`penstock weights`: replace the weights of all workers while they serve, or look at them.

`penstock weights update DIR` and `penstock weights status`.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from cluster.cli.admin import admin_call, admin_stub, to_json
from cluster.cli.options import add_admin_options
from cluster.cli.progress import Progress
from penstock.errors import InvalidInput
from penstock.types import PauseMode
from penstock.v1 import admin_pb2

_FAILED = 1


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("action", choices=["update", "status"], help="what to do")
    add("path", nargs="?", default="", metavar="DIR", help="folder of the new weights, with `update`")
    add(
        "--mode",
        choices=[mode.value for mode in PauseMode],
        default=PauseMode.WAIT.value,
        help="running requests end first (wait), fail (abort) or continue with the new weights (keep); "
        "default: %(default)s",
    )
    add("--version", type=int, default=0, metavar="N", help="number of the update; default: the next one")
    add(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long `wait` waits; requests that are left then fail; default: %(default)s",
    )
    add("--json", action="store_true", help="print JSON")
    add_admin_options(parser)


def run(arguments: Namespace) -> int:
    """Prints the progress. Ctrl-C ends the command; the update continues."""
    return _update(arguments) if arguments.action == "update" else _show(arguments)


def _update(arguments: Namespace) -> int:
    if not arguments.path:
        raise InvalidInput("DIR", "is missing; give the folder of the new weights")
    if arguments.version < 0:
        raise InvalidInput("--version", f"is {arguments.version}; give 1 or more")
    if arguments.timeout <= 0:
        raise InvalidInput("--timeout", f"is {arguments.timeout:g}; give more than 0")
    request = admin_pb2.UpdateWeightsRequest(
        path=str(Path(arguments.path).resolve()),
        mode=arguments.mode,
        version=arguments.version,
        timeout_s=arguments.timeout,
    )
    stage = ""
    with admin_stub(arguments) as (stub, metadata), Progress("asking for the update") as shown:
        for progress in stub.UpdateWeights(request, metadata=metadata):  # no deadline: it ends with the update
            print(to_json(progress) if arguments.json else format_progress(progress), flush=True)
            stage = progress.stage
            num_done = progress.num_prepared + progress.num_updated
            shown.show(stage, num_done / max(1, 2 * progress.num_workers))
    return 0 if stage == "done" else _FAILED


def _show(arguments: Namespace) -> int:
    status = admin_call(arguments, "WeightsStatus", admin_pb2.WeightsStatusRequest())
    print(to_json(status) if arguments.json else format_status(status))
    return 0


def format_progress(progress: admin_pb2.WeightsProgress) -> str:
    """Formats one progress message as a line."""
    detail = f" ({progress.detail})" if progress.detail else ""
    received = f"{progress.num_received} received, " if progress.num_received or progress.stage == "receiving" else ""
    counts = f"{progress.num_prepared} prepared, {progress.num_updated} updated of {progress.num_workers} workers"
    return f"{progress.elapsed_s:6.1f} s  version {progress.version} {progress.stage}: {received}{counts}{detail}"


def format_status(status: admin_pb2.WeightsStatusResponse) -> str:
    """Formats the weights in force, those of each worker, and the last update."""
    held = f"version {status.version} from {status.path}" if status.version else "the checkpoint's own weights"
    lines = [held, *(f"{each.worker_id:12} {each.state:10} version {each.version}" for each in status.workers)]
    if status.HasField("last"):
        lines.append(f"last update: {format_progress(status.last).strip()}")
    return "\n".join(lines)
