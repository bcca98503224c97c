"""Makes the charts of a traffic report: hit rates by cache size, lengths, and arrivals over time."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.bench.traces.record import Trace
from penstock.charts.html import HtmlReport, ReportSection, ReportTable
from penstock.charts.scale import Axis
from penstock.charts.svg import Chart, Series, cumulative_points
from simulator.traffic.arrivals import count_by_window
from simulator.traffic.describe import TrafficReport

_MOST_WINDOWS = 400


def draw_reuse(report: TrafficReport, token_bytes: int | None = None) -> Chart | None:
    """Returns the hit rate by cache size, in bytes if a token's are known; None without prefix data."""
    if report.reuse is None or not report.reuse.runs:
        return None
    scale = token_bytes or 1
    points = [(size * scale, rate) for size, rate in report.reuse.curve()]
    return Chart(
        f"{report.name}: token hit rate of one prefix cache",
        Axis(f"cache, {'bytes' if token_bytes else 'tokens'}", log=True),
        Axis("share of prompt tokens", percent=True, low=0.0),
        [
            Series("least recently used leaf evicted first", points),
            Series("unlimited", [(size, report.reuse.ceiling) for size, _ in points], dashed=True),
        ],
    )


def draw_lengths(trace: Trace) -> Chart:
    """Returns the distributions of prompts and answers, as the share of requests up to a length."""
    return Chart(
        f"{trace.name}: lengths",
        Axis("tokens", log=True),
        Axis("share of requests", percent=True, low=0.0, high=1.0),
        [
            Series("prompt", cumulative_points(record.num_input_tokens for record in trace.records)),
            Series("answer", cumulative_points(record.num_output_tokens for record in trace.records)),
        ],
    )


def draw_arrivals(trace: Trace) -> Chart:
    """Returns requests per second over time, in windows of at least 10 s."""
    times_s = [record.arrival_s for record in trace.records]
    window_s = max(10.0, trace.duration_s / _MOST_WINDOWS)
    counts = count_by_window(times_s, window_s)
    points = [(index * window_s, count / window_s) for index, count in enumerate(counts)]
    return Chart(
        f"{trace.name}: arrivals in windows of {window_s:.0f} s",
        Axis("seconds since the first request"),
        Axis("requests per second", low=0.0),
        [Series("", points, form="step")],
    )


def traffic_report(
    trace: Trace, report: TrafficReport, rows: Sequence[Sequence[str]], token_bytes: int | None
) -> HtmlReport:
    """Returns the HTML report with the rows of the printed table and all charts."""
    charts = [draw_arrivals(trace), draw_lengths(trace)]
    reuse = draw_reuse(report, token_bytes)
    return HtmlReport(
        f"Traffic of {report.name}",
        (
            ReportSection("Figures", tables=(ReportTable(("", ""), rows),)),
            ReportSection("Charts", charts=[*charts, *([reuse] if reuse else [])]),
        ),
    )
