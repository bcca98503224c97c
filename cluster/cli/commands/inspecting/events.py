"""`penstock events`: show what happened to the workers, and why."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from datetime import datetime

from cluster.cli.admin import CALL_TIMEOUT_S, admin_stub, to_json
from cluster.cli.options import add_admin_options
from penstock.charts.table import columns_of, wrap
from penstock.v1 import admin_pb2


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("-f", "--follow", action="store_true", help="wait for further events and print them")
    add("--after", type=int, default=0, metavar="NUMBER", help="only events after this number")
    add("--json", action="store_true", help="print a line of JSON for each event")
    add_admin_options(parser)


def run(arguments: Namespace) -> int:
    """Prints the kept events; with --follow, further ones until Ctrl-C or the end of the deployment."""
    request = admin_pb2.EventsRequest(after=max(0, arguments.after), follow=arguments.follow)
    with admin_stub(arguments) as (stub, metadata):
        timeout_s = None if arguments.follow else CALL_TIMEOUT_S
        for event in stub.Events(request, timeout=timeout_s, metadata=metadata):
            text = to_json(event) if arguments.json else wrap(format_event(event), columns_of(sys.stdout))
            print(text, flush=True)
    return 0


def format_event(event: admin_pb2.ClusterEvent) -> str:
    """Formats an event as a line: local time, subject, transition, reason."""
    when = datetime.fromtimestamp(event.unix_time_s).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    reason = f": {event.reason}" if event.reason else ""
    return f"{when}  {event.subject} {event.what}{reason}"
