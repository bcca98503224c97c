"""Publishes a benchmark: a printed table, JSON with the hardware and versions of the run, and SVG charts next to it."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.charts import write_charts
from engine.cpu import isa
from penstock.charts.svg import cumulative_points

_CURVE_POINTS = 101
RESULTS = Path(__file__).resolve().parents[1] / "results"
_PACKAGES = ("torch", "triton", "ray", "grpcio", "tokenizers", "nixl-cu12", "nixl-cu13", "numpy")


@dataclass(frozen=True, slots=True)
class Row:
    """A figure and the baseline that it is compared with."""

    metric: str
    value: float
    unit: str
    baseline: str | None = None
    baseline_value: float | None = None

    @property
    def ratio(self) -> float | None:
        """value / baseline_value, None without a baseline."""
        return self.value / self.baseline_value if self.baseline_value else None


@dataclass(frozen=True, slots=True)
class Curves:
    """Lines over one axis: a distribution, or what changed over time. `series` maps labels to points."""

    title: str
    x: str
    y: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    log_x: bool = False


def distribution(title: str, unit: str, values: Mapping[str, Iterable[float]]) -> Curves:
    """Returns the cumulative distribution of each label's values, at most 102 points of four digits each."""
    lines = {}
    for label, found in values.items():
        points = cumulative_points(found)
        kept = [*points[: -1 : max(1, math.ceil(len(points) / _CURVE_POINTS))], *points[-1:]]
        lines[label] = [(float(f"{value:.4g}"), round(share, 4)) for value, share in kept]
    return Curves(title, unit, "share of values", lines, log_x=True)


def publish(
    name: str,
    workload: str,
    rows: list[Row],
    folder: Path = RESULTS,
    quiet: bool = False,
    curves: Sequence[Curves] = (),
) -> None:
    """Prints the table, unless `quiet`, and writes `NAME.json` and its charts into the folder."""
    if not quiet:
        show(name, workload, rows)
    result = {
        "name": name,
        "date": today(),
        "workload": workload,
        "hardware": hardware(),
        "versions": versions(),
        "rows": [asdict(row) | {"ratio": row.ratio} for row in rows],
    }
    write_result(result | ({"curves": [asdict(each) for each in curves]} if curves else {}), folder)


def write_result(result: Mapping[str, Any], folder: Path = RESULTS, indent: int = 2) -> None:
    """Writes `NAME.json`, a line for each curve, and next to it `NAME-INDEX.svg` for each chart."""
    folder.mkdir(parents=True, exist_ok=True)
    result = json.loads(json.dumps(result))  # the form that readers of the file get
    text = json.dumps({key: value for key, value in result.items() if key != "curves"}, indent=indent)
    if curves := result.get("curves"):
        space = " " * indent
        lines = (f"{2 * space}{json.dumps(each, separators=(',', ':'))}" for each in curves)
        text = text.removesuffix("\n}") + f',\n{space}"curves": [\n' + ",\n".join(lines) + f"\n{space}]\n}}"
    (folder / f"{result['name']}.json").write_text(text + "\n")
    write_charts(result, folder)


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def show(name: str, workload: str, rows: list[Row]) -> None:
    table = Table("metric", "value", "unit", "baseline", "baseline value", "ratio", title=f"{name}: {workload}")
    for row in rows:
        base = "" if row.baseline_value is None else f"{row.baseline_value:.4g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.metric, f"{row.value:.4g}", row.unit, row.baseline or "", base, ratio)
    Console(width=150).print(table)


def hardware() -> dict[str, object]:
    found: dict[str, object] = {"machine": platform.machine(), "cores": len(os.sched_getaffinity(0))}
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        found["cpu"] = models[0] if models else "unknown"
    found["instruction_set"] = next((each.name for each in isa.candidates()), "none")
    found["memory_gib"] = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return found


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def percentile(values: list[float], share: float) -> float:
    """Returns the nearest-rank percentile; `share` is from 0 to 1."""
    assert values, "no values"
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
