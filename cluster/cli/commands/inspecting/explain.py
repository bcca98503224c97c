"""`penstock explain`: show why the autoscaler changed a pool, or did not."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from datetime import datetime

from cluster.cli.admin import admin_call, to_json
from cluster.cli.options import add_admin_options
from penstock.charts.table import columns_of, wrap
from penstock.errors import InvalidInput
from penstock.v1 import admin_pb2


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("pool", nargs="?", default="", help="prefill or decode; default: both")
    add("-n", "--count", type=int, default=1, metavar="N", help="newest records of each pool; default: %(default)s")
    add("--changes", action="store_true", help="only records that changed something, or would have in a dry run")
    add("--json", action="store_true", help="print the whole response as JSON")
    add_admin_options(parser)


def run(arguments: Namespace) -> int:
    if arguments.count < 1:
        raise InvalidInput("count", f"is {arguments.count}; give 1 or more")
    request = admin_pb2.ExplainRequest(pool=arguments.pool, limit=arguments.count, changes=arguments.changes)
    response = admin_call(arguments, "Explain", request)
    if arguments.json:
        print(to_json(response))
        return 0
    print(f"the autoscaler is {response.mode}")
    for record in response.records:
        print(wrap(format_record(record), columns_of(sys.stdout)))
    return 0


def format_record(record: admin_pb2.ScaleRecord) -> str:
    """Formats a decision and its reason, then the figures that it rests on."""
    when = datetime.fromtimestamp(record.unix_time_s).strftime("%Y-%m-%d %H:%M:%S")
    change = f"{record.current} -> {record.decided}" if record.decided != record.current else f"{record.current}"
    lines = [f"{when}  {record.pool} {record.verdict}, {change} workers, {record.wanted} wanted: {record.reason}"]
    if record.figures:
        lines.append("  " + ", ".join(f"{name} {value:.4g}" for name, value in sorted(record.figures.items())))
    if record.failed:
        lines.append(f"  the change failed: {record.failed}")
    return "\n".join(lines)
