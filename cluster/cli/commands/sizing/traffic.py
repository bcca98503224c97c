"""`penstock traffic`: describe a trace: lengths, bursts, reuse, and what caches of any size would hit."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from cluster.cli.progress import Progress
from penstock.bench.traces.read import read_trace
from penstock.charts.html import render_html
from penstock.charts.svg import render_svg
from penstock.charts.table import columns_of, format_table, name_rows
from penstock.errors import InvalidInput
from simulator.traffic.describe import SHARES_OF_CEILING, TrafficReport, as_json, describe_trace
from simulator.traffic.html_report import draw_reuse, traffic_report
from simulator.traffic.statistics import Distribution

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def add_arguments(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("trace", metavar="TRACE", help="a .jsonl or .csv file, .gz or not; also in the folder PENSTOCK_TRACES")
    add("--limit", type=int, metavar="N", help="read the first N requests only")
    add("--seed", type=int, default=0, help="spreads requests that a recorder rounded to ticks; default: %(default)s")
    add("--kv-bytes", type=int, metavar="N", help="bytes of KV a token, as plan-memory prints; shows caches in bytes")
    add("--json", action="store_true", help="print JSON")
    add("--html", metavar="FILE", help="write a page with the figures and charts")
    add("--svg", metavar="FILE", help="write the chart of hit rates by cache size")


def run(arguments: Namespace) -> int:
    """Prints the report. Raises InvalidInput for a file that is not a trace."""
    for name in ("limit", "kv_bytes"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise InvalidInput(f"--{name.replace('_', '-')}", f"is {value}; give at least 1")
    with Progress(f"reading {arguments.trace}") as progress:
        trace = read_trace(arguments.trace, arguments.seed, arguments.limit)
        progress.show(f"{trace.name}: following the blocks of {len(trace.records):,} requests")
        report = describe_trace(trace)
    rows = describe_rows(report, arguments.kv_bytes)
    if arguments.html:
        Path(arguments.html).write_text(render_html(traffic_report(trace, report, rows, arguments.kv_bytes)))
    if arguments.svg:
        chart = draw_reuse(report, arguments.kv_bytes)
        if chart is None:
            raise InvalidInput("--svg", f"needs reused blocks, and {report.name} has none; leave it out")
        Path(arguments.svg).write_text(render_svg(chart) + "\n")
    if arguments.json:
        print(json.dumps(as_json(report, arguments.kv_bytes), indent=2))
    else:
        print(format_rows(report, rows, columns_of(sys.stdout)))
    return 0


def format_rows(report: TrafficReport, rows: list[tuple[str, str]], columns: int | None = None) -> str:
    """Returns the report as text: the rows, and tables of lengths and of bursts, none wider than `columns`."""
    lengths = format_table(
        ("tokens", "mean", "p50", "p90", "p95", "p99", "largest"),
        [
            (name, *_cells(distribution))
            for name, distribution in (
                ("prompt", report.inputs),
                ("answer", report.outputs),
                ("both", report.contexts),
            )
        ],
        columns,
    )
    bursts = format_table(
        ("window", "peak requests/s", "peak over mean", "variance over mean"),
        [
            (f"{each.window_s:g} s", f"{each.peak_per_s:.2f}", f"{each.peak_to_mean:.2f}", f"{each.dispersion:.1f}")
            for each in report.arrivals.windows
        ],
        columns,
    )
    return "\n".join([name_rows(rows, columns), "", lengths, "", bursts])


def describe_rows(report: TrafficReport, token_bytes: int | None = None) -> list[tuple[str, str]]:
    """Returns the figures that are not part of a table, by name."""
    arrivals = report.arrivals
    rows = [
        ("trace", f"{report.name}, {report.num_requests:,} requests in {arrivals.duration_s:,.0f} s"),
        (
            "rate",
            f"{arrivals.requests_per_s:.2f} requests/s, {report.input_tokens_per_s:,.0f} prompt and "
            f"{report.output_tokens_per_s:,.0f} output tokens/s",
        ),
        ("bursts", f"CV of the times between arrivals {arrivals.gap_cv:.2f} (Poisson: 1)"),
    ]
    if report.tick_s:
        rows.append(
            ("clock", f"ticks of {report.tick_s:g} s, over which requests were spread by seed; bursts are lost")
        )
    return rows + _reuse_rows(report, token_bytes) + _session_rows(report)


def _reuse_rows(report: TrafficReport, token_bytes: int | None) -> list[tuple[str, str]]:
    reuse = report.reuse
    if reuse is None:
        return [("reuse", "unknown: the trace does not say which prompts share a prefix")]
    sizes = {share: _size(reuse.cache_tokens_for(share), token_bytes) for share in SHARES_OF_CEILING}
    p50_s, p90_s = report.hit_age_s
    return [
        (
            "reuse",
            f"one unlimited cache hits {reuse.ceiling:.1%} of the prompt tokens, in {report.request_hit_share:.0%} of "
            "the requests",
        ),
        ("hit tokens' age", f"p50 {p50_s:,.0f} s, p90 {p90_s:,.0f} s since they were last used"),
        ("cache", f"{_size(reuse.num_distinct_tokens, token_bytes)} hold every prompt"),
        *((f"cache for {share:.0%}", f"of the hits: {size}") for share, size in sizes.items()),
    ]


def _session_rows(report: TrafficReport) -> list[tuple[str, str]]:
    sessions = report.sessions
    if sessions is None:
        return [("sessions", "unknown: the trace names neither sessions nor blocks")]
    source = "inferred from shared blocks" if sessions.inferred else "named by the trace"
    size, gap, growth = sessions.requests_per_session, sessions.gap_s, sessions.growth_tokens
    return [
        (
            "sessions",
            f"{sessions.num_sessions:,}, {source}; requests of one: mean {size.mean:.1f}, p50 {size.p50:g}, p99 "
            f"{size.p99:g}",
        ),
        ("session gaps", f"p50 {gap.p50:.1f} s, p90 {gap.p90:.1f} s, p99 {gap.p99:.1f} s from arrival to arrival"),
        ("session growth", f"p50 {growth.p50:,.0f} tokens, p90 {growth.p90:,.0f} tokens a request"),
        ("hits in session", f"{sessions.own_hit_share:.0%} of the hit tokens were last used by the same session"),
    ]


def _cells(distribution: Distribution) -> list[str]:
    names = ("mean", "p50", "p90", "p95", "p99", "largest")
    return [f"{getattr(distribution, name):,.0f}" for name in names]


def _size(tokens: int, token_bytes: int | None) -> str:
    if token_bytes is None:
        return f"{tokens:,} tokens"
    size, unit = float(tokens * token_bytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{tokens:,} tokens, {size:.1f} {_UNITS[unit]}"
