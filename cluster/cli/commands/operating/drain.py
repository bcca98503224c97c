"""`penstock drain`: empty a worker, or all of a node, and end it; streams continue elsewhere."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable

from cluster.cli.admin import admin_stub, to_json
from cluster.cli.options import add_admin_options, require_positive
from cluster.cli.progress import Progress
from penstock.errors import InvalidInput
from penstock.v1 import admin_pb2

_GRACE_S = 90.0  # of the call, beyond the drain's own timeout


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("worker", nargs="?", help="worker to drain, as `penstock status` names it, such as decode-1")
    add("--node", help="drain all workers of a node: its Ray id, its address or its host name")
    add("--within", type=float, metavar="SECONDS", help="time until the node goes away; default: unlimited")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="deadline of the drain; default: %(default)s")
    add("--replace", action="store_true", help="start a new worker in its place")
    add("--json", action="store_true", help="print each step as a line of JSON")
    add_admin_options(parser)


def run(arguments: Namespace) -> int:
    """Prints the progress. Ctrl-C ends the command; the drain continues."""
    if (arguments.worker is None) is (arguments.node is None):
        raise InvalidInput("worker", "and --node: give one of the two")
    if arguments.within is not None and (arguments.node is None or arguments.within <= 0):
        raise InvalidInput("within", f"is {arguments.within:g}; give seconds above 0, together with --node")
    require_positive("timeout", arguments.timeout)
    with admin_stub(arguments) as (stub, metadata):
        if arguments.node is not None:
            node = admin_pb2.DrainNodeRequest(node=arguments.node, within_s=arguments.within or 0.0)
            progresses = stub.DrainNode(node, metadata=metadata)
        else:
            worker = admin_pb2.DrainRequest(
                worker_id=arguments.worker, timeout_s=arguments.timeout, replace=arguments.replace
            )
            progresses = stub.Drain(worker, timeout=arguments.timeout + _GRACE_S, metadata=metadata)
        show_drain(progresses, arguments.json)
    return 0


def show_drain(steps: Iterable[admin_pb2.DrainProgress], as_json: bool) -> None:
    """Prints each step of a drain, and shows on a terminal how many sequences are left."""
    most = 0  # sequences left at once
    with Progress("asking for the drain") as progress:
        for step in steps:
            print(to_json(step) if as_json else format_drain(step), flush=True)
            most = max(most, step.num_left)
            progress.show(f"{step.worker_id}: {step.stage}, {step.num_left} left", 1 - step.num_left / max(1, most))


def format_drain(progress: admin_pb2.DrainProgress) -> str:
    """Formats one progress message as a line."""
    name, migrated = progress.worker_id, f"{progress.num_migrated} migrated"
    if progress.num_pages_handed:
        migrated += f" and {progress.num_pages_handed} cached pages handed over"
    detail = f" ({progress.detail})" if progress.detail else ""
    match progress.stage:
        case "moving":
            return f"{name} moves to another node with the routers beside it; `penstock status` works there from now on"
        case "waiting":
            return f"{name} serves until another one can: {progress.detail}"
        case "draining":
            return f"{name} takes no new requests; {progress.num_left} left, {migrated}{detail}"
        case "stopping" if progress.num_cut_short:
            return f"{name} was not empty in time, {migrated}; stopping it now{detail}"
        case "stopping":
            return f"{name} is empty, {migrated}; stopping it now"
    return f"{name} has ended after {progress.elapsed_s:.1f} s"
