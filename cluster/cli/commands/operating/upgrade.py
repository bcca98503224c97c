"""`penstock upgrade`: replace every worker, by another revision or by new code."""

from __future__ import annotations

import contextlib
import socket
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from pathlib import Path

from cluster.cli.admin import admin_call, admin_stub, to_json
from cluster.cli.options import add_admin_options, local_folder
from cluster.cli.progress import Progress
from penstock.errors import InvalidInput
from penstock.v1 import admin_pb2

_FAILED = 1


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="", metavar="DIR", help="folder or Hub id that new workers load; default: the served one")
    add(
        "--share",
        type=float,
        default=0.1,
        metavar="PART",
        help="share of the requests that new workers get at first; default: %(default)s",
    )
    add(
        "--window", type=float, default=60.0, metavar="SECONDS", help="how long both are compared; default: %(default)s"
    )
    add(
        "--min-requests",
        type=int,
        default=20,
        metavar="N",
        help="requests that new workers must serve in the window; default: %(default)s",
    )
    add(
        "--max-error-rate",
        type=float,
        default=0.01,
        metavar="RATE",
        help="highest error rate of new workers; default: %(default)s",
    )
    add(
        "--max-slowdown",
        type=float,
        default=1.5,
        metavar="RATIO",
        help="highest ratio of new to old mean times; default: %(default)s",
    )
    add("--ttft", type=float, default=0.0, metavar="SECONDS", help="highest mean TTFT, instead of the ratio")
    add("--itl", type=float, default=0.0, metavar="SECONDS", help="highest mean ITL, instead of the ratio")
    add("--without-evidence", action="store_true", help="replace old workers although new ones served no request")
    add("--force", action="store_true", help="upgrade even if the machines cannot hold new workers beside the old ones")
    add("--abort", action="store_true", help="roll back the upgrade in flight")
    add("--json", action="store_true", help="print each step as a line of JSON")
    add_admin_options(parser)


def run(arguments: Namespace) -> int:
    """Prints the progress. Ctrl-C ends the command; the upgrade continues."""
    if arguments.min_requests < 0:
        raise InvalidInput("min_requests", f"is {arguments.min_requests}; give 0 or more")
    request = admin_pb2.UpgradeRequest(
        model=_folder(arguments) if arguments.model else "",
        share=arguments.share,
        window_s=arguments.window,
        min_requests=arguments.min_requests,
        max_error_rate=arguments.max_error_rate,
        max_slowdown=arguments.max_slowdown,
        ttft_s=arguments.ttft,
        itl_s=arguments.itl,
        abort=arguments.abort,
        force=arguments.force,
        without_evidence=arguments.without_evidence,
    )
    stage = ""
    with admin_stub(arguments) as (stub, metadata), Progress("asking for the upgrade") as shown:
        for progress in stub.Upgrade(request, metadata=metadata):  # no deadline: it ends with the upgrade or Ctrl-C
            print(to_json(progress) if arguments.json else format_upgrade(progress), flush=True)
            stage = progress.stage
            num_workers = progress.num_old + progress.num_new
            shown.show(f"{stage}: {progress.num_new} of {num_workers} are new", progress.num_new / max(1, num_workers))
    rolled_back = stage == "rolled back"
    return 0 if rolled_back is arguments.abort else _FAILED


def _folder(arguments: Namespace) -> str:
    """Returns the folder of the new model, downloaded where it is an id of the Hub.

    Raises InvalidInput for an id if workers run on other machines, which would not have that folder.
    """
    from engine.weights.hub import HubModel

    if (model := HubModel.parse(arguments.model)) is not None:
        status = admin_call(arguments, "Status", admin_pb2.StatusRequest())
        if elsewhere := hosts_elsewhere(worker.member.address for worker in status.workers):
            raise InvalidInput(
                "--model",
                f"is {model}, which this command downloads on this machine alone, but workers run at "
                f"{', '.join(elsewhere)}; download it into the same folder on every machine (`hf download {model.repo}"
                f"{f' --revision {model.revision}' if model.revision else ''} --local-dir DIR`) and give that folder",
            )
    return str(Path(local_folder(arguments.model)).resolve())


def hosts_elsewhere(addresses: Iterable[str]) -> list[str]:
    """Returns the hosts of these `host:port` addresses that are not this machine."""
    hosts = {address.rpartition(":")[0].strip("[]") for address in addresses}
    return sorted(host for host in hosts if host and not _is_here(host))


def _is_here(host: str) -> bool:
    """Returns whether a socket can be bound to the host, which only the machine's own addresses allow."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, (name, *_) in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as own:
                own.bind((name, 0))
                return True
    return False


def format_upgrade(progress: admin_pb2.UpgradeProgress) -> str:
    """Formats one progress message as a line."""
    detail = f" ({progress.detail})" if progress.detail else ""
    workers = f"{progress.num_old} old and {progress.num_new} new workers serve"
    return f"{progress.elapsed_s:6.1f} s  {progress.stage}: {workers}{detail}"
