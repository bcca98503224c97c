"""Renders a result as one HTML page with inline tables and charts, which loads no other file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from penstock.bench.reports.text import Table, describe_own_error, group_table, latency_table, sweep_table
from penstock.bench.results.figures import LATENCIES
from penstock.bench.results.result_file import BenchResult, PointResult
from penstock.charts.html import HtmlReport, ReportSection, ReportTable, render_html
from penstock.charts.scale import Axis
from penstock.charts.svg import Chart, Series, cumulative_points

_MIN_MS = 1e-3  # logarithmic axes have no 0


def html_report(result: BenchResult) -> str:
    """Returns the report of a result as HTML."""
    sections = []
    if len(result.points) > 1:
        sections.append(ReportSection("Sweep", tables=[ReportTable(*sweep_table(result))], charts=sweep_charts(result)))
    sections.append(ReportSection("Latencies", charts=[latency_cdf(name, result.points) for name in LATENCIES]))
    sections += [_point_section(point) for point in result.points]
    settings = [(name, str(value)) for name, value in (*result.settings.items(), *result.machine.items())]
    sections.append(ReportSection("Settings", tables=[ReportTable(("setting", "value"), settings)]))
    origin = f"{result.workload}, at {result.target}, {result.started_at}"
    return render_html(HtmlReport(result.label or "penstock bench", sections, paragraphs=[origin, *result.notes]))


def sweep_charts(result: BenchResult) -> list[Chart]:
    """Returns charts of goodput, attainment and tail latencies over the offered load."""
    name = next(iter(result.points[0].offered), "load")
    label = {"rate": "offered requests/s", "speed": "speed of the trace", "concurrency": "concurrent requests"}.get(
        name, name
    )
    offered = [point.offered.get(name, float(index)) for index, point in enumerate(result.points)]
    figures = [point.figures for point in result.points]

    def over(label: str, values: Iterable[float]) -> Series:
        return Series(label, list(zip(offered, values, strict=True)), marked=True)

    x, charts = Axis(label), []
    if result.slos:
        names = [slo.text for slo in result.slos]
        goodput = [over(text, (each.slos[index].goodput for each in figures)) for index, text in enumerate(names)]
        met = [over(text, (each.slos[index].attainment for each in figures)) for index, text in enumerate(names)]
        charts.append(Chart("Goodput", x, Axis("requests/s that met the SLO", low=0.0), goodput))
        share = Axis("share of requests", percent=True, low=0.0, high=1.0)
        charts.append(Chart("SLO attainment", x, share, met))
    for latency in ("TTFT", "ITL"):
        found = [each.latencies[latency] for each in figures]
        lines = [
            over("p50", (0.0 if each is None else each.p50_s * 1e3 for each in found)),
            over("p99", (0.0 if each is None else each.p99_s * 1e3 for each in found)),
        ]
        charts.append(Chart(latency, x, Axis("ms", low=0.0), lines))
    throughput = [over("", (each.output_tokens_per_s for each in figures))]
    return [*charts, Chart("Throughput", x, Axis("output tokens/s", low=0.0), throughput)]


def latency_cdf(name: str, points: Sequence[PointResult]) -> Chart:
    """Returns a chart of a latency's cumulative distribution, with a line for each point."""
    lines = []
    for point in points:
        values = (value for request in point.run.requests for value in LATENCIES[name](request))
        lines.append(Series(point.name, cumulative_points(max(value * 1e3, _MIN_MS) for value in values)))
    share = Axis("share of values", percent=True, low=0.0, high=1.0)
    return Chart(f"{name}, cumulative", Axis("ms", log=True), share, lines)


def timeline(point: PointResult) -> list[Chart]:
    """Returns charts over the time of a run: each request's TTFT, and the number of requests in flight."""
    sent = [(each.sent_s, each.ttft_s * 1e3) for each in point.run.requests if each.ttft_s is not None]
    failed = [(each.sent_s, 0.0) for each in point.run.requests if each.ending.is_failure]
    dots = [Series("TTFT", sent, form="dots"), *([Series("failed", failed, form="dots")] if failed else [])]
    changes = sorted(
        change for each in point.run.requests for change in ((each.sent_s, 1), (each.sent_s + each.e2e_s, -1))
    )
    levels = accumulate(step for _, step in changes)
    in_flight = [(time_s, float(level)) for (time_s, _), level in zip(changes, levels, strict=True)]
    x = Axis("s")
    return [
        Chart("TTFT by time", x, Axis("ms", low=0.0), dots),
        Chart("Requests in flight", x, Axis("requests", low=0.0), [Series("", in_flight, form="step")]),
    ]


def _point_section(point: PointResult) -> ReportSection:
    figures = point.figures
    endings = ", ".join(f"{count} {ending}" for ending, count in figures.endings.items())
    hit_rate = "" if figures.hit_rate is None else f", {figures.hit_rate:.1%} of the prompt tokens cached"
    own_error = list(describe_own_error(figures))
    paragraphs = [
        f"{figures.num_requests} requests in {figures.elapsed_s:.1f} s: {endings}; "
        f"{figures.output_tokens_per_s:.1f} output tokens/s{hit_rate}.",
        *(f"{kind}: for example {example}" for kind, example in figures.errors.items()),
        *(line for line in own_error if not line.startswith("WARNING")),
    ]
    tables: list[Table] = [latency_table(figures.latencies)]
    if figures.slos:
        rows = [
            (slo.slo, f"{slo.num_met} of {slo.num_judged}", f"{slo.attainment:.1%}", f"{slo.goodput:.3f}")
            for slo in figures.slos
        ]
        tables.append((("SLO", "met by", "attainment", "goodput, requests/s"), rows))
    if figures.by_length:
        tables.append(group_table("prompt tokens", figures.by_length))
    if len(figures.by_lane) > 1:
        tables.append(group_table("lane", figures.by_lane))
    return ReportSection(
        point.name,
        paragraphs,
        warnings=[line for line in own_error if line.startswith("WARNING")],
        tables=[ReportTable(*table) for table in tables],
        charts=timeline(point),
    )
