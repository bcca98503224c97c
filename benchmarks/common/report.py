"""Publishes the rows of a benchmark: a printed table, and JSON with the hardware and versions of the run."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

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


def publish(name: str, workload: str, rows: list[Row], folder: Path = RESULTS, quiet: bool = False) -> None:
    """Prints the table, unless `quiet`, and writes `NAME.json` into the folder."""
    if not quiet:
        show(name, workload, rows)
    result = {
        "name": name,
        "workload": workload,
        "hardware": hardware(),
        "versions": versions(),
        "rows": [asdict(row) | {"ratio": row.ratio} for row in rows],
    }
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")


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
