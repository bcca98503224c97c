"""Renders results as text tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from penstock.bench.results.compare import PointComparison
from penstock.bench.results.figures import GroupFigures, RunFigures
from penstock.bench.results.quantiles import Quantiles
from penstock.bench.results.result_file import BenchResult
from penstock.charts.table import format_table, wrap

_QUANTILES = ("p50", "p90", "p99", "p99.9", "max")
_GROUP_COLUMNS = (("TTFT", "p50"), ("TTFT", "p99"), ("ITL", "p50"), ("ITL", "p99"), ("TPOT", "p50"), ("E2E", "p50"))

Table = tuple[Sequence[str], Sequence[Sequence[str]]]  # header and rows


def describe_result(result: BenchResult, columns: int | None = None) -> str:
    """Returns the whole report, no wider than `columns`."""
    lines = [f"{result.workload}, at {result.target}", *result.notes]
    for point in result.points:
        lines += ["", f"== {point.name} ==", *describe_figures(point.figures, columns)]
        if point.run.is_interrupted:
            lines.append("INTERRUPTED: the figures are those of the requests that had ended")
    if len(result.points) > 1:
        lines += ["", "== sweep ==", format_table(*sweep_table(result), columns)]
    return wrap("\n".join(lines), columns)


def describe_figures(figures: RunFigures, columns: int | None = None) -> Iterator[str]:
    """Yields the lines of one point."""
    endings = ", ".join(f"{count} {ending}" for ending, count in figures.endings.items())
    sent = f"{figures.num_requests} requests in {figures.elapsed_s:.1f} s, {figures.offered_per_s:.2f}/s offered"
    yield f"{sent}: {endings}"
    for kind, example in figures.errors.items():
        yield f"  {kind}: for example {example}"
    hit_rate = "" if figures.hit_rate is None else f", {figures.hit_rate:.1%} of the prompt tokens were cached"
    prompts = f"prompts {figures.prompt_tokens_per_s:.1f} tokens/s{hit_rate}"
    yield f"output {figures.output_tokens_per_s:.1f} tokens/s, {prompts}"
    if figures.length_ratio is not None and abs(figures.length_ratio - 1) > 0.05:
        yield f"the server counted {figures.length_ratio:.2f} times the planned prompt tokens"
    yield format_table(*latency_table(figures.latencies), columns)
    for slo in figures.slos:
        met = f"{slo.num_met} of {slo.num_judged} met it ({slo.attainment:.1%})"
        yield f"SLO {slo.slo}: {met}, goodput {slo.goodput:.3f} requests/s"
    for title, groups in (("prompt tokens", figures.by_length), ("lane", figures.by_lane)):
        if len(groups) > 1:
            yield ""
            yield format_table(*group_table(title, groups), columns)
    yield from describe_own_error(figures)


def describe_own_error(figures: RunFigures) -> Iterator[str]:
    """Yields a line about the generator's own error."""
    late, lag = figures.generator.late, figures.generator.lag
    if late is not None and lag is not None:
        yield (
            f"generator: sends late by {_ms(late.p50_s)} / {_ms(late.p99_s)} / {_ms(late.max_s)} ms, "
            f"event loop late by {_ms(lag.p50_s)} / {_ms(lag.p99_s)} / {_ms(lag.max_s)} ms (p50 / p99 / max)"
        )
    for warning in figures.generator.warnings:
        yield f"WARNING: {warning}"


def latency_table(latencies: Mapping[str, Quantiles | None]) -> Table:
    """Returns a table of latencies in milliseconds, one row each."""
    rows = []
    for name, found in latencies.items():
        if found is not None:
            values = (found.p50_s, found.p90_s, found.p99_s, found.p999_s, found.max_s)
            rows.append((name, *map(_ms, values), _ms(found.mean_s), str(found.count)))
    return ("ms", *_QUANTILES, "mean", "values"), rows


def group_table(title: str, groups: Sequence[GroupFigures]) -> Table:
    """Returns a table of each group's latencies in milliseconds and its attainment of each SLO."""
    num_slos = max(len(group.attainments) for group in groups)
    slos = ["SLO met"] if num_slos == 1 else [f"SLO {index + 1} met" for index in range(num_slos)]
    header = (title, "requests", "failed", *(f"{name} {share}" for name, share in _GROUP_COLUMNS), *slos)
    rows = []
    for group in groups:
        cells = [_cell(group.latencies.get(name), share) for name, share in _GROUP_COLUMNS]
        met = [f"{attainment:.1%}" for attainment in group.attainments]
        rows.append((group.name, str(group.num_requests), str(group.num_failed), *cells, *met))
    return header, rows


def sweep_table(result: BenchResult) -> Table:
    """Returns a table with a row for each point."""
    slos = [f"goodput at {slo.text}" for slo in result.slos]
    columns = [column for column in _GROUP_COLUMNS if column[0] != "TPOT"]
    header = ("point", "tokens/s", *(f"{name} {share} ms" for name, share in columns), "failed", *slos)
    rows = []
    for point in result.points:
        figures = point.figures
        cells = [_cell(figures.latencies[name], share) for name, share in columns]
        num_failed = sum(request.ending.is_failure for request in point.run.requests)
        goodput = [f"{slo.goodput:.3f} ({slo.attainment:.0%})" for slo in figures.slos]
        rows.append((point.name, f"{figures.output_tokens_per_s:.1f}", *cells, str(num_failed), *goodput))
    return header, rows


def comparison_table(comparison: PointComparison) -> Table:
    """Returns a table with a row for each figure: both values, their ratio with its interval, and the verdict."""
    rows = []
    for each in comparison.ratios:
        if each.a is None and each.b is None:
            continue
        scale, unit = (1e3, " ms") if not each.is_higher_better else (1.0, "")
        interval = "-" if each.low is None or each.high is None else f"{each.low:.3f} to {each.high:.3f}"
        ratio = "-" if each.ratio is None else f"{each.ratio:.3f}"
        rows.append(
            (f"{each.figure}{unit}", _value(each.a, scale), _value(each.b, scale), ratio, interval, each.verdict)
        )
    return ("figure", "A", "B", "B/A", "95 % interval", "B is"), rows


def _cell(found: Quantiles | None, share: str) -> str:
    return "-" if found is None else _ms({"p50": found.p50_s, "p99": found.p99_s}[share])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 100 else f"{seconds * 1e3:.0f}"


def _value(value: float | None, scale: float) -> str:
    return "-" if value is None else f"{value * scale:.4g}"
