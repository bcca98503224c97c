"""Makes the charts of a benchmark's result from its JSON alone, so that a committed result has the same charts on any
machine.

Bars show the rows that `bar_specs` selects; a result may also hold curves (`benchmarks.common.report.Curves`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.bar_specs import OTHER, OTHER_PARTS, SPECS, BarSpec
from penstock.charts.bars import BarChart, render_bars
from penstock.charts.scale import Axis
from penstock.charts.svg import Chart, Series, render_svg

Result = Mapping[str, Any]
_OURS = "Penstock"
_MAX_ROWS = 40  # rows of a chart of a benchmark without specs; a longer chart is split


@dataclass(frozen=True, slots=True)
class NamedChart:
    title: str
    svg: str


def charts_of(result: Result) -> list[NamedChart]:
    """Returns the charts of a result in their order; none for a result without rows and curves."""
    machine, rows = machine_of(result), list(rows_of(result))
    specs = SPECS.get(str(result.get("name")), OTHER)
    if specs is OTHER and len(rows) > _MAX_ROWS:
        specs = OTHER_PARTS
    charts = [chart for spec in specs for chart in _bars(spec, rows, machine)]
    if specs is OTHER_PARTS:
        charts = [chart for chart in charts if len(chart.rows) > 1]
    found = [NamedChart(chart.title, render_bars(chart) + "\n") for chart in charts]
    for curves in result.get("curves", ()):
        found.append(NamedChart(curves["title"], render_svg(_curves(curves, machine)) + "\n"))
    return found


def write_charts(result: Result, folder: Path) -> list[Path]:
    """Writes `NAME-INDEX.svg` into the folder, in place of those of an earlier result, and returns the files."""
    name = str(result["name"])
    for stale in folder.glob(f"{name}-*.svg"):
        if re.fullmatch(r"\d+", stale.stem.removeprefix(f"{name}-")):
            stale.unlink()
    files = []
    for index, chart in enumerate(charts_of(result)):
        files.append(folder / f"{name}-{index}.svg")
        files[-1].write_text(chart.svg)
    return files


def machine_of(result: Result) -> str:
    """Returns the machine in words. Simulations name none: their figures depend only on their costs."""
    hardware = result.get("hardware")
    if hardware is None:
        return "virtual time: figures depend on the simulated costs, not on the machine"
    named = re.sub(r"\((?:R|TM)\)", "", str(hardware.get("device") or hardware.get("cpu", "unknown processor")))
    isa = f" ({hardware['instruction_set']})" if "instruction_set" in hardware else ""
    memory = f", {hardware['memory_gib']:g} GiB" if "memory_gib" in hardware else ""
    cores = "1 core" if hardware["cores"] == 1 else f"{hardware['cores']} cores"
    return f"{cores} of {' '.join(named.split())}{isa}{memory}"


def rows_of(result: Result) -> Iterator[Mapping[str, Any]]:
    """Yields rows as `report.Row` has them, also for the benchmarks whose results have another form."""
    name = result.get("name")
    if name == "replay":
        yield from _replay_rows(result["rows"])
    elif name == "autoscale":
        yield from _autoscale_rows(result["cases"])
    elif name == "validation":
        for row in result["rows"]:
            figure = row["figure"] if row["figure"].endswith("/s") else f"{row['figure']}, ms"
            metric = f"{row['shape']}, {row['workload']}: {figure}"
            yield _row(metric, row["measured"], "", "predicted", row["predicted"])
    else:
        yield from result.get("rows", ())


def _row(metric: str, value: float, unit: str, baseline: str | None = None, other: float | None = None) -> Result:
    return {"metric": metric, "value": value, "unit": unit, "baseline": baseline, "baseline_value": other}


def _replay_rows(rows: Sequence[Result]) -> Iterator[Result]:
    fields = {
        "hit rate": "hit_rate",
        "TTFT p50, s": "ttft_p50_s",
        "TTFT p99, s": "ttft_p99_s",
        "TPOT p99, s": "tpot_p99_s",
        "goodput": "goodput",
    }
    for row in rows:
        trace = str(row["trace"]).removesuffix(".jsonl.gz")
        caches = "unlimited caches" if row["cache_pages"] == "unlimited" else f"{row['cache_pages']} pages a worker"
        for figure, field in fields.items():
            metric = f"{trace} at load {row['offered_load']:g}, {caches}: {figure}, {row['policy']}"
            yield _row(metric, row[field], "share" if field in ("hit_rate", "goodput") else "s")


def _autoscale_rows(cases: Sequence[Result]) -> Iterator[Result]:
    """Yields ours, the cheapest queue-length setting with the fewest missed requests, and foresight."""
    fields = {"missed requests": "num_missed", "worker hours": "worker_hours", "changes of size": "num_changes"}
    for case in cases:
        queues = [row for row in case["rows"] if row["policy"].startswith("queues")]
        best = min(queues, key=lambda row: (row["num_missed"], row["worker_hours"]))
        shown = {"ours": "ours", best["policy"]: "queue lengths", case["foresight"]: "foresight"}
        for row in case["rows"]:
            if row["policy"] in shown:
                for figure, field in fields.items():
                    trace = f"held out: {case['trace']}" if case["split"] == "held out" else case["trace"]
                    metric = f"{trace}, start {case['start_s']:g} s: {figure}, {shown[row['policy']]}"
                    yield _row(metric, row[field], "")


def _bars(spec: BarSpec, rows: Sequence[Result], machine: str) -> Iterator[BarChart]:
    """Yields a chart for each part that the spec's pattern names, in the order of the rows."""
    parts: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        matched = re.fullmatch(spec.pattern, row["metric"])
        if matched is None or (spec.unit and not re.fullmatch(spec.unit, row["unit"])):
            continue
        groups = matched.groupdict()
        label = (groups.get("row") or row["metric"]).strip()
        values = parts.setdefault(groups.get("part") or "", {}).setdefault(label, {})
        values[spec.kind(groups.get("kind") or _OURS)] = row["value"]
        if spec.with_baselines and row["baseline"] is not None and row["baseline_value"] is not None:
            values[spec.kind(row["baseline"])] = row["baseline_value"]
    for part, labels in parts.items():
        kinds = list(dict.fromkeys(kind for values in labels.values() for kind in values))
        table = [(label, [values.get(kind) for kind in kinds]) for label, values in labels.items()]
        yield BarChart(f"{spec.title}: {part}" if part else spec.title, kinds, table, machine, spec.shared_scale)


def _curves(curves: Result, machine: str) -> Chart:
    is_share = curves["y"].startswith("share")
    y = Axis(curves["y"], percent=is_share, low=0.0, high=1.0 if is_share else None)
    series = [Series(label, [(x, y) for x, y in points]) for label, points in curves["series"].items()]
    return Chart(curves["title"], Axis(curves["x"], log=curves["log_x"]), y, series, width=640, note=machine)
