"""Writes the studies' results: tables of docs/modes.md, charts as SVG files next to it, and one HTML page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common.docs_tables import markdown_table, replace_between
from benchmarks.common.process_group import ROOT
from benchmarks.common.report import Row, hardware
from benchmarks.modes.deployments import AUTO, COLOCATED, SPLIT, VLLM
from benchmarks.modes.study import MIDDLE_SLO, SLO_SCALES, WorkloadStudy
from penstock.bench.reports.text import Table
from penstock.bench.results.compare import FigureRatio
from penstock.bench.results.quantiles import Quantiles
from penstock.bench.results.result_file import PointResult
from penstock.charts.html import HtmlReport, ReportSection, ReportTable, render_html
from penstock.charts.scale import Axis
from penstock.charts.svg import Chart, Series, render_svg

DOCS = ROOT / "docs"
BEGIN, END = "<!-- tables of benchmarks.modes -->", "<!-- end of the tables -->"
MODES = (COLOCATED, SPLIT, AUTO, VLLM)
_COMPARED = ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99")


def measured_modes(studies: Sequence[WorkloadStudy]) -> list[str]:
    return [mode for mode in MODES if any(mode in study.results for study in studies)]


def goodput_table(studies: Sequence[WorkloadStudy]) -> Table:
    """Returns the best goodput of each mode over all loads, by workload and SLO."""
    modes = measured_modes(studies)
    rows = []
    for study in studies:
        for index, scale in enumerate(SLO_SCALES):
            peaks = {mode: study.peak_goodput(mode, index) for mode in modes}
            fixed = [peak for mode in (COLOCATED, SPLIT) if (peak := peaks.get(mode))]
            automatic = peaks.get(AUTO)
            ratio = f"{automatic / max(fixed):.2f}" if automatic is not None and fixed else "-"
            cells = ["-" if peaks[mode] is None else f"{peaks[mode]:.2f}" for mode in modes]
            rows.append((f"{study.name}, {scale:g} x idle: {_slo_text(study, index)}", *cells, ratio))
    return ("goodput, requests/s", *modes, f"{AUTO} / better of both"), rows


def _slo_text(study: WorkloadStudy, index: int) -> str:
    assert study.calibration is not None
    limits = study.calibration.slos()[index].limits[""]
    return f"TTFT {1e3 * (limits.ttft or 0):.0f} ms, TPOT {1e3 * (limits.tpot or 0):.0f} ms"


def latency_table(study: WorkloadStudy) -> Table:
    """Returns a row for each load and mode: latencies in ms, and how they compare with two colocated workers."""
    modes = measured_modes([study])
    beside = {mode: study.comparison(COLOCATED, mode) for mode in modes if mode != COLOCATED}
    rows = []
    for name in [point.name for point in study.results[modes[0]].points]:
        for mode in modes:
            point = _point(study, mode, name)
            if point is None:
                continue
            latencies = point.figures.latencies
            cells = [_ms(latencies[latency], share) for latency, share in map(str.split, _COMPARED)]
            met = [f"{slo.attainment:.0%}" for slo in point.figures.slos]
            compared = beside.get(mode, {}).get(name)
            ratios = {each.figure: each for each in compared.ratios} if compared else {}
            versus = [_versus(ratios.get(figure)) for figure in ("TTFT p50", "ITL p99")]
            rows.append((f"{name}, {mode}", *cells, " / ".join(met), *versus))
    shares = " / ".join(f"{scale:g}x" for scale in SLO_SCALES)
    header = ("load, mode", *(f"{figure}, ms" for figure in _COMPARED), f"SLO met at {shares}")
    return (*header, f"TTFT p50 / {COLOCATED}", f"ITL p99 / {COLOCATED}"), rows


def _point(study: WorkloadStudy, mode: str, name: str) -> PointResult | None:
    result = study.results.get(mode)
    return next((point for point in result.points if point.name == name), None) if result else None


def _ms(found: Quantiles | None, share: str) -> str:
    return "-" if found is None else f"{1e3 * {'p50': found.p50_s, 'p99': found.p99_s}[share]:.0f}"


def _versus(ratio: FigureRatio | None) -> str:
    if ratio is None or ratio.ratio is None or ratio.low is None or ratio.high is None:
        return "-"
    return f"{ratio.ratio:.2f} ({ratio.low:.2f}-{ratio.high:.2f})"


def charts(study: WorkloadStudy) -> Iterator[Chart]:
    """Yields goodput and tails over the offered load, a line for each mode."""

    def lines(value: str) -> list[Series]:
        found = []
        for mode in measured_modes([study]):
            points = [(point.offered["rate"], _value(point, value)) for point in study.results[mode].points]
            found.append(Series(mode, points, marked=True))
        return found

    title = f"{study.name} prompts" if study.name in ("short", "long", "mixed") else study.name
    slo = f"requests/s within {SLO_SCALES[MIDDLE_SLO]:g} x idle"
    x = Axis("offered requests/s")
    yield Chart(f"Goodput, {title}", x, Axis(slo, low=0.0), lines("goodput"))
    for figure in ("TTFT p50", "TTFT p99", "ITL p99"):
        yield Chart(f"{figure}, {title}", x, Axis("ms", low=0.0), lines(figure))


def _value(point: PointResult, name: str) -> float:
    if name == "goodput":
        return point.figures.slos[MIDDLE_SLO].goodput
    latency, share = name.split()
    found = point.figures.latencies[latency]
    return 0.0 if found is None else 1e3 * (found.p50_s if share == "p50" else found.p99_s)


def rows_of(studies: Sequence[WorkloadStudy]) -> list[Row]:
    """Returns the rows of results/modes.json: every mode, with two colocated workers as baseline."""
    rows = []
    for study in studies:
        for mode in measured_modes([study]):
            for point in study.results[mode].points:
                base = _point(study, COLOCATED, point.name)
                for name in ("goodput", *_COMPARED):
                    unit = "requests/s" if name == "goodput" else "ms"
                    other = None if base is None else _value(base, name)
                    metric = f"{name}, {study.name}, {point.name}, {mode}"
                    rows.append(Row(metric, _value(point, name), unit, COLOCATED, other))
    return rows


def write_page(studies: Sequence[WorkloadStudy], file: Path) -> None:
    """Writes the self-contained HTML page."""
    sections = [ReportSection("Goodput", tables=[ReportTable(*goodput_table(studies))])]
    for study in studies:
        table = ReportTable(*latency_table(study))
        sections.append(ReportSection(study.name, tables=[table], charts=list(charts(study))))
    machine = ", ".join(f"{name}: {value}" for name, value in hardware().items())
    file.write_text(render_html(HtmlReport("Disaggregated against colocated", sections, paragraphs=[machine])))


def write_docs(studies: Sequence[WorkloadStudy], docs: Path = DOCS) -> None:
    """Replaces the tables of docs/modes.md, and the charts in docs/modes/."""
    folder = docs / "modes"
    folder.mkdir(exist_ok=True)
    machine = hardware()
    processor = f"{machine.get('cpu', 'an unknown processor')} ({machine['instruction_set']})"
    parts = [
        f"Measured on {machine['cores']} cores of {processor}.",
        markdown_table(*goodput_table(studies)),
    ]
    for study in studies:
        some = next(iter(study.results.values()))
        parts += [f"### {study.name}", f"{some.workload}.", *some.notes]
        names = []
        for index, chart in enumerate(charts(study)):
            names.append(f"{study.name}-{index}.svg")
            (folder / names[-1]).write_text(render_svg(chart) + "\n")
        parts.append("\n".join(f"![{study.name}](modes/{name})" for name in names))
        parts.append(markdown_table(*latency_table(study)))
    replace_between(docs / "modes.md", BEGIN, END, "\n\n".join(parts))
