"""A result as one HTML page: tables and plots inline, nothing loaded from anywhere, readable in light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import accumulate

from penstock.bench.pages.svg import Plot, PlotSeries, draw_plot
from penstock.bench.pages.text import Table, describe_own_error, group_table, latency_table, sweep_table
from penstock.bench.results.figures import LATENCIES
from penstock.bench.results.result_file import BenchResult, PointResult

_CDF_POINTS = 400
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --paper: #ffffff; --line: #d8dde4; --soft: #f3f5f8; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --paper: #14181e; --line: #363e49; --soft: #1d232b; --bad: #ff8a80; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); }
body { max-width: 1000px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; } h2 { font-size: 1.2em; margin-top: 2em; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; margin: 1em 0; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: 3px 10px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { background: var(--soft); }
.scroll { overflow-x: auto; } .plots { display: flex; flex-wrap: wrap; gap: 12px; } .warning { color: var(--bad); }
svg { max-width: 100%; height: auto; } svg text { font-size: 11px; fill: var(--ink); }
svg .title { font-size: 13px; font-weight: 600; }
svg .grid { stroke: var(--line); stroke-width: 0.6; } svg .frame { fill: none; stroke: var(--line); }
"""


def result_page(result: BenchResult) -> str:
    """Returns the page of a result."""
    parts = [
        f"<p>{escape(result.workload)}, at {escape(result.target)}, {escape(result.started_at)}</p>",
        *(f"<p>{escape(note)}</p>" for note in result.notes),
    ]
    if len(result.points) > 1:
        parts += ["<h2>Sweep</h2>", table_html(*sweep_table(result)), plots_html(sweep_plots(result))]
    parts += ["<h2>Latencies</h2>", plots_html(latency_cdf(name, result.points) for name in LATENCIES)]
    for point in result.points:
        parts += _point_section(point)
    settings = [(name, str(value)) for name, value in (*result.settings.items(), *result.machine.items())]
    parts += ["<h2>Settings</h2>", table_html(("setting", "value"), settings)]
    return page(result.label or "penstock bench", parts)


def page(title: str, parts: Iterable[str]) -> str:
    """Returns a whole HTML document."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    body = "\n".join([f"<h1>{escape(title)}</h1>", *parts])
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>{body}\n</body></html>\n'
    )


def table_html(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def plots_html(plots: Iterable[Plot]) -> str:
    return f'<div class="plots">{"".join(map(draw_plot, plots))}</div>'


def sweep_plots(result: BenchResult) -> list[Plot]:
    """Returns goodput, attainment and tails over what was offered."""
    name = next(iter(result.points[0].offered), "load")
    label = {"rate": "offered requests/s", "speed": "speed of the trace", "concurrency": "concurrent requests"}.get(
        name, name
    )
    offered = [point.offered.get(name, float(index)) for index, point in enumerate(result.points)]
    figures = [point.figures for point in result.points]

    def over(values: Iterable[float]) -> list[tuple[float, float]]:
        return list(zip(offered, values, strict=True))

    plots = []
    if result.slos:
        names = [slo.text for slo in result.slos]
        goodput = [
            PlotSeries(text, over(each.slos[index].goodput for each in figures)) for index, text in enumerate(names)
        ]
        met = [
            PlotSeries(text, over(100 * each.slos[index].attainment for each in figures))
            for index, text in enumerate(names)
        ]
        plots.append(Plot("Goodput", label, "requests/s that met the SLO", goodput, has_markers=True))
        plots.append(Plot("SLO attainment", label, "% of requests", met, y_max=100.0, has_markers=True))
    for latency in ("TTFT", "ITL"):
        found = [each.latencies[latency] for each in figures]
        lines = [
            PlotSeries("p50", over(0.0 if each is None else each.p50_s * 1e3 for each in found)),
            PlotSeries("p99", over(0.0 if each is None else each.p99_s * 1e3 for each in found)),
        ]
        plots.append(Plot(latency, label, "ms", lines, has_markers=True))
    throughput = [PlotSeries("output tokens/s", over(each.output_tokens_per_s for each in figures))]
    return [*plots, Plot("Throughput", label, "output tokens/s", throughput, has_markers=True)]


def latency_cdf(name: str, points: Sequence[PointResult]) -> Plot:
    """Returns the cumulative distribution of a latency, a line for each point."""
    lines = []
    for point in points:
        values = sorted(value * 1e3 for request in point.run.requests for value in LATENCIES[name](request))
        if values:
            ranks = sorted({round(share * (len(values) - 1) / _CDF_POINTS) for share in range(_CDF_POINTS + 1)})
            lines.append(
                PlotSeries(point.name, [(max(values[rank], 1e-3), 100 * (rank + 1) / len(values)) for rank in ranks])
            )
    return Plot(f"{name}, cumulative", "ms", "% of values", lines, has_log_x=True, y_max=100.0)


def timeline(point: PointResult) -> list[Plot]:
    """Returns when requests were sent and what they met: TTFT by time, and how many were in flight."""
    sent = [(each.sent_s, each.ttft_s * 1e3) for each in point.run.requests if each.ttft_s is not None]
    failed = [(each.sent_s, 0.0) for each in point.run.requests if each.ending.is_failure]
    dots = [PlotSeries("TTFT", sent, is_dots=True), *([PlotSeries("failed", failed, is_dots=True)] if failed else [])]
    changes = sorted(
        change for each in point.run.requests for change in ((each.sent_s, 1), (each.sent_s + each.e2e_s, -1))
    )
    levels = [0, *accumulate(step for _, step in changes)]
    steps = [
        (time_s, float(level))
        for (time_s, _), before, after in zip(changes, levels, levels[1:], strict=False)
        for level in (before, after)
    ]
    in_flight = [PlotSeries("in flight", steps)]
    return [Plot("TTFT by time", "s", "ms", dots), Plot("Requests in flight", "s", "requests", in_flight)]


def _point_section(point: PointResult) -> list[str]:
    figures = point.figures
    endings = ", ".join(f"{count} {ending}" for ending, count in figures.endings.items())
    hit_rate = "" if figures.hit_rate is None else f", {figures.hit_rate:.1%} of the prompt tokens cached"
    parts = [
        f"<h2>{escape(point.name)}</h2>",
        f"<p>{figures.num_requests} requests in {figures.elapsed_s:.1f} s: {escape(endings)}; "
        f"{figures.output_tokens_per_s:.1f} output tokens/s{hit_rate}.</p>",
        *(f"<p>{escape(kind)}: for example {escape(example)}</p>" for kind, example in figures.errors.items()),
        table_html(*latency_table(figures.latencies)),
    ]
    if figures.slos:
        rows = [
            (slo.slo, f"{slo.num_met} of {slo.num_judged}", f"{slo.attainment:.1%}", f"{slo.goodput:.3f}")
            for slo in figures.slos
        ]
        parts.append(table_html(("SLO", "met by", "attainment", "goodput, requests/s"), rows))
    tables: list[Table] = [group_table("prompt tokens", figures.by_length)] if figures.by_length else []
    if len(figures.by_lane) > 1:
        tables.append(group_table("lane", figures.by_lane))
    parts += [table_html(*table) for table in tables]
    for line in describe_own_error(figures):
        parts.append(f'<p class="{"warning" if line.startswith("WARNING") else "generator"}">{escape(line)}</p>')
    return [*parts, plots_html(timeline(point))]
