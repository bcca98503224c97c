"""`penstock scale`: change how many workers a pool has."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from cluster.cli.admin import admin_call, admin_stub, pool_has_size, to_json, wait_until
from cluster.cli.options import add_admin_options, require_positive
from penstock.errors import InvalidInput
from penstock.v1 import admin_pb2


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("pool", help="prefill or decode")
    add("replicas", type=int, metavar="N", help="the number of workers it should have")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="deadline of each drain; default: %(default)s")
    add(
        "--hold",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="time for which the autoscaler leaves the pool alone; 0: its default",
    )
    add("--force", action="store_true", help="scale even beyond what the machines can hold; the rest stays unplaced")
    add("--wait", type=float, metavar="SECONDS", help="wait until the pool has that size")
    add("--json", action="store_true", help="print the response as JSON")
    add_admin_options(parser)


def run(arguments: Namespace) -> int:
    if arguments.replicas < 0:
        raise InvalidInput("replicas", f"is {arguments.replicas}; give 0 or more")
    require_positive("timeout", arguments.timeout)
    if arguments.hold < 0:
        raise InvalidInput("hold", f"is {arguments.hold:g}; give 0 or more seconds")
    request = admin_pb2.ScaleRequest(
        pool=arguments.pool,
        replicas=arguments.replicas,
        timeout_s=arguments.timeout,
        hold_s=arguments.hold,
        force=arguments.force,
    )
    response = admin_call(arguments, "Scale", request)
    if arguments.wait is not None:
        with admin_stub(arguments) as (stub, metadata):
            text = f"waiting until the {arguments.pool} pool has {arguments.replicas} workers that are ready"
            wait_until(stub, metadata, pool_has_size(arguments.pool, arguments.replicas), arguments.wait, text)
    if arguments.json:
        print(to_json(response))
        return 0
    workers = "worker" if response.replicas == 1 else "workers"
    print(f"{arguments.pool}: {response.replicas_before} -> {response.replicas} {workers}")
    if arguments.wait is not None:
        print("the pool has that size now")
    elif response.draining:
        print(f"draining, then stopping: {', '.join(response.draining)}; their streams continue elsewhere")
    elif response.replicas > response.replicas_before:
        print("new workers start a few at a time; `penstock events -f` shows when they are ready")
    return 0
