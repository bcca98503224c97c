"""The commands that operators type besides `status` and `drain`: their flags, their calls, and what they print."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from datetime import datetime
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from cluster.commands import admin_call, admin_stub
from cluster.settling import pool_settled, wait_until
from penstock.errors import InvalidInput
from penstock.v1 import admin_pb2

_CALL_TIMEOUT_S = 10.0

Command = Callable[[Namespace], int]


def add_parsers(subparsers: Any) -> list[tuple[ArgumentParser, Command]]:
    """Each command's parser without the flags that all of them share, and what runs it."""
    scale_parser = subparsers.add_parser("scale", help="change how many workers a pool has")
    scale_parser.add_argument("pool", help="prefill or decode")
    scale_parser.add_argument("replicas", type=int, metavar="N", help="workers that it should have")
    scale_parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="of each drain; default: %(default)s"
    )
    scale_parser.add_argument(
        "--hold", type=float, default=0.0, metavar="SECONDS", help="that an autoscaler leaves it so; 0: its default"
    )
    scale_parser.add_argument("--wait", type=float, metavar="SECONDS", help="until the pool has that size")
    events_parser = subparsers.add_parser("events", help="what happened to the workers, and why")
    events_parser.add_argument("-f", "--follow", action="store_true", help="go on with what happens next")
    events_parser.add_argument("--after", type=int, default=0, metavar="NUMBER", help="of the last event that you have")
    for one in (scale_parser, events_parser):
        one.add_argument("--json", action="store_true", help="print JSON, a line each")
    return [
        (scale_parser, scale),
        (_add_explain(subparsers), explain),
        (events_parser, events),
        (_add_doctor(subparsers), doctor),
        (_add_top(subparsers), top),
    ]


def _add_explain(subparsers: Any) -> ArgumentParser:
    parser: ArgumentParser = subparsers.add_parser("explain", help="why the autoscaler did what it did, or nothing")
    add = parser.add_argument
    add("pool", nargs="?", default="", help="prefill or decode; default: both")
    add("-n", "--count", type=int, default=1, metavar="N", help="newest records of each pool; default: %(default)s")
    add("--changes", action="store_true", help="only those that changed something, or would have in a dry run")
    add("--json", action="store_true", help="print the whole answer as JSON")
    return parser


def _add_top(subparsers: Any) -> ArgumentParser:
    parser: ArgumentParser = subparsers.add_parser("top", help="watch pools, workers, pages, tokens/s and latencies")
    add = parser.add_argument
    add("--interval", type=float, default=2.0, metavar="SECONDS", help="between two views; default: %(default)s")
    add("-n", "--count", type=int, metavar="N", help="views, then end; default: until Ctrl-C")
    add("--metrics-token-file", metavar="FILE", help="what the routers' /metrics wants; without it no TTFT and ITL")
    add("--json", action="store_true", help="print a line of JSON for each view")
    return parser


def _add_doctor(subparsers: Any) -> ArgumentParser:
    parser: ArgumentParser = subparsers.add_parser(
        "doctor", help="look for what is wrong, and say what to do; exit status 1 with problems"
    )
    parser.add_argument("--model", metavar="DIR", help="a checkpoint folder that is to be served")
    parser.add_argument("--config", metavar="FILE", help="the configuration that is to be served")
    parser.add_argument("--no-transfers", action="store_true", help="move no pages between the workers")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def doctor(arguments: Namespace) -> int:
    from cluster.doctor import doctor as run  # imports Ray, which takes seconds

    return run(arguments)


def scale(arguments: Namespace) -> int:
    if arguments.replicas < 0:
        raise InvalidInput("replicas", f"is {arguments.replicas}; give 0 or more")
    if arguments.timeout <= 0:
        raise InvalidInput("timeout", f"is {arguments.timeout:g}; give a number of seconds above 0")
    if arguments.hold < 0:
        raise InvalidInput("hold", f"is {arguments.hold:g}; give 0 or more seconds")
    request = admin_pb2.ScaleRequest(
        pool=arguments.pool, replicas=arguments.replicas, timeout_s=arguments.timeout, hold_s=arguments.hold
    )
    answer = admin_call(arguments, "Scale", request, _CALL_TIMEOUT_S)
    if arguments.wait is not None:
        with admin_stub(arguments) as (stub, metadata):
            settled = pool_settled(arguments.pool, arguments.replicas)
            wait_until(stub, metadata, settled, arguments.wait)
    if arguments.json:
        print(to_json(answer))
        return 0
    workers = "worker" if answer.replicas == 1 else "workers"
    print(f"{arguments.pool}: {answer.replicas_before} -> {answer.replicas} {workers}")
    if arguments.wait is not None:
        print("it has that size now")
    elif answer.draining:
        print(f"drained, then ended: {', '.join(answer.draining)}; their streams go on elsewhere")
    elif answer.replicas > answer.replicas_before:
        print("new ones are starting; `penstock events -f` tells when they are ready")
    return 0


def explain(arguments: Namespace) -> int:
    if arguments.count < 1:
        raise InvalidInput("count", f"is {arguments.count}; give 1 or more")
    request = admin_pb2.ExplainRequest(pool=arguments.pool, limit=arguments.count, changes=arguments.changes)
    answer = admin_call(arguments, "Explain", request, _CALL_TIMEOUT_S)
    if arguments.json:
        print(to_json(answer))
        return 0
    print(f"the autoscaler is {answer.mode}")
    for record in answer.records:
        print(format_record(record))
    return 0


def format_record(record: admin_pb2.ScaleRecord) -> str:
    """What was decided and why, then the figures that it rests on."""
    when = datetime.fromtimestamp(record.unix_time_s).strftime("%Y-%m-%d %H:%M:%S")
    change = f"{record.current} -> {record.decided}" if record.decided != record.current else f"{record.current}"
    lines = [f"{when}  {record.pool} {record.verdict}, {change} workers, {record.wanted} wanted: {record.reason}"]
    if record.figures:
        lines.append("  " + ", ".join(f"{name} {value:.4g}" for name, value in sorted(record.figures.items())))
    if record.failed:
        lines.append(f"  it could not be done: {record.failed}")
    return "\n".join(lines)


def top(arguments: Namespace) -> int:
    from cluster.top import top as run  # imports what the other commands need not

    return run(arguments)


def events(arguments: Namespace) -> int:
    """Without --follow what is kept; with it until Ctrl-C, or the end of the deployment."""
    request = admin_pb2.EventsRequest(after=max(0, arguments.after), follow=arguments.follow)
    with admin_stub(arguments) as (stub, metadata):
        timeout_s = None if arguments.follow else _CALL_TIMEOUT_S
        for event in stub.Events(request, timeout=timeout_s, metadata=metadata):
            print(to_json(event) if arguments.json else format_event(event), flush=True)
    return 0


def format_event(event: admin_pb2.ClusterEvent) -> str:
    """One line: local time, who, what, why."""
    when = datetime.fromtimestamp(event.unix_time_s).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    why = f": {event.reason}" if event.reason else ""
    return f"{when}  {event.subject} {event.what}{why}"


def to_json(message: Message) -> str:
    return json.dumps(
        MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    )
