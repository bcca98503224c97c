"""Writes the study's results: the tables of docs/overload.md, and its charts as SVG files next to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.common.docs_tables import markdown_table, replace_between
from benchmarks.common.process_group import ROOT
from benchmarks.overload.study import POLICIES, PRODUCT, RunResult
from penstock.charts.scale import Axis
from penstock.charts.svg import Chart, Series, render_svg

DOCS = ROOT / "docs"
BEGIN, END = "<!-- tables of benchmarks.overload -->", "<!-- end of the tables -->"
_HASH, _LEAST_LOADED = "consistent-hash", "least-loaded"
# Column, field of the summary, its unit's factor, digits.
_FIGURES = (
    ("TTFT p50, s", "ttft_p50_s", 1.0, 2),
    ("p90", "ttft_p90_s", 1.0, 2),
    ("p99", "ttft_p99_s", 1.0, 2),
    ("TPOT p99, ms", "tpot_p99_s", 1e3, 1),
    ("decode max/mean", "decode_imbalance", 1.0, 2),
)
_CHARTS = (
    ("hits", "share of one cache's hits", "kept", 1.0),
    ("TTFT p50", "seconds", "ttft_p50_s", 1.0),
    ("TTFT p99", "seconds", "ttft_p99_s", 1.0),
    ("TPOT p99", "ms", "tpot_p99_s", 1e3),
)


class Study:
    """All results, averaged over seeds."""

    def __init__(self, results: Sequence[RunResult]) -> None:
        self._results = results
        self.traffic = list(dict.fromkeys(each.traffic for each in results))
        self.loads = sorted({each.load for each in results})
        self.policies = [policy for policy in POLICIES if any(each.policy == policy for each in results)]

    def value(self, traffic: str, load: float, policy: str, figure: str) -> float | None:
        """Returns a field of the summary, or the hits as a share of one cache's ("kept"); None where nothing ran."""
        found = [each for each in self._results if (each.traffic, each.load, each.policy) == (traffic, load, policy)]
        if not found:
            return None
        return fmean(each.kept_hits if figure == "kept" else getattr(each.summary, figure) for each in found)

    def best(self, traffic: str, load: float, figure: str, policies: Sequence[str]) -> float | None:
        """Returns the smallest value of the other policies."""
        found = [self.value(traffic, load, policy, figure) for policy in policies if policy != PRODUCT]
        return min((each for each in found if each is not None), default=None)

    def single(self, traffic: str) -> float:
        return next(each.single_cache_hit_rate for each in self._results if each.traffic == traffic)


def judgement_table(study: Study) -> tuple[list[str], list[list[str]]]:
    """Returns ratios of the product's policy: hits over consistent hashing's, times over the best baseline's."""
    rows = []
    for traffic in study.traffic:
        for load in study.loads:
            ratios = [
                _ratio(study, traffic, load, "kept", [_HASH]),
                *(_ratio(study, traffic, load, f"ttft_{share}_s", study.policies) for share in ("p50", "p90", "p99")),
                _ratio(study, traffic, load, "tpot_p99_s", [_LEAST_LOADED]),
            ]
            balance = study.value(traffic, load, PRODUCT, "decode_imbalance")
            rows.append([f"{traffic}, {load:g}", *ratios, "-" if balance is None else f"{balance:.2f}"])
    header = ["traffic, load", "hits / consistent hash's", "TTFT p50 / best other", "p90 / best", "p99 / best"]
    return [*header, "TPOT p99 / least loaded", "decode max/mean"], rows


def _ratio(study: Study, traffic: str, load: float, figure: str, policies: Sequence[str]) -> str:
    own, other = study.value(traffic, load, PRODUCT, figure), study.best(traffic, load, figure, policies)
    return "-" if own is None or not other else f"{own / other:.2f}"


def figures_table(study: Study, traffic: str) -> tuple[list[str], list[list[str]]]:
    """Returns a row for each load and policy."""
    rows = []
    for load in study.loads:
        for policy in study.policies:
            kept = study.value(traffic, load, policy, "kept")
            if kept is None:
                continue
            cells = []
            for _, figure, factor, digits in _FIGURES:
                value = study.value(traffic, load, policy, figure)
                assert value is not None
                cells.append(f"{factor * value:.{digits}f}")
            rows.append([f"{load:g}, {policy}", f"{kept:.0%}", *cells])
    return ["load, policy", "hits, of one cache's", *(name for name, *_ in _FIGURES)], rows


def charts(study: Study, traffic: str) -> Iterator[Chart]:
    """Yields hits and latencies over the load, a line for each policy."""
    for name, unit, figure, factor in _CHARTS:
        lines = []
        for policy in study.policies:
            found = [(load, study.value(traffic, load, policy, figure)) for load in study.loads]
            points = [(load, factor * value) for load, value in found if value is not None]
            lines.append(Series(policy, points, marked=True))
        yield Chart(f"{name}, {traffic}", Axis("load, of the capacity"), Axis(unit, low=0.0), lines)


def write_docs(results: Sequence[RunResult], docs: Path = DOCS) -> None:
    """Replaces the tables of docs/overload.md, and the charts in docs/overload/."""
    study, folder = Study(results), docs / "overload"
    folder.mkdir(exist_ok=True)
    parts = ["### Compared with the other policies", markdown_table(*judgement_table(study))]
    for traffic in study.traffic:
        name = traffic.lower().replace(",", "").replace(" ", "-")
        files = []
        for index, chart in enumerate(charts(study, traffic)):
            files.append(f"{name}-{index}.svg")
            (folder / files[-1]).write_text(render_svg(chart) + "\n")
        parts += [
            f"### {traffic}",
            f"One cache of all prefill workers' pages hits {study.single(traffic):.1%} of the prompts' tokens.",
            "\n".join(f"![{traffic}](overload/{file})" for file in files),
            markdown_table(*figures_table(study, traffic)),
        ]
    replace_between(docs / "overload.md", BEGIN, END, "\n\n".join(parts))
