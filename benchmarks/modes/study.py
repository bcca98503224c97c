"""Keeps the measurements of one workload in files between runs: its calibration, and the sweep of every mode."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from penstock.bench.results.compare import PointComparison, compare
from penstock.bench.results.record import RunRecord
from penstock.bench.results.result_file import BenchResult, PointResult, from_json, make_point, to_json
from penstock.bench.results.slo import SloSet, parse_slo

SLO_SCALES = (3.0, 5.0, 10.0)  # times the latencies of an idle deployment, as in DistServe (OSDI'24)
MIDDLE_SLO = 1  # index in SLO_SCALES: the one that the workers get, and that charts show


@dataclass(frozen=True, slots=True)
class Calibration:
    """The limits of two colocated workers on this machine: with a single request, and at full load."""

    ttft_s: float
    tpot_s: float
    capacity: float  # requests/s of a closed loop

    @property
    def itl_target_s(self) -> float:
        """The limit that decode workers get: the time per token of the middle SLO."""
        return SLO_SCALES[MIDDLE_SLO] * self.tpot_s

    def slos(self) -> list[SloSet]:
        """Returns the SLOs, tightest first."""
        return [parse_slo(f"ttft={scale * self.ttft_s:.4g},tpot={scale * self.tpot_s:.4g}") for scale in SLO_SCALES]


@dataclass(slots=True)
class WorkloadStudy:
    """A workload."""

    name: str
    folder: Path
    calibration: Calibration | None = None
    results: dict[str, BenchResult] = field(default_factory=dict)  # by mode

    def save(self) -> None:
        """Writes all measurements."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.calibration is not None:
            (self.folder / "calibration.json").write_text(json.dumps(asdict(self.calibration)) + "\n")
        for mode, result in self.results.items():
            self._file(mode).write_text(json.dumps(to_json(result)) + "\n")

    @classmethod
    def load(cls, name: str, folder: Path, modes: Sequence[str]) -> WorkloadStudy:
        """Returns the measurements that earlier runs have written into the folder."""
        study = cls(name, folder / name)
        file = study.folder / "calibration.json"
        if file.exists():
            study.calibration = Calibration(**json.loads(file.read_text()))
        for mode in modes:
            path = study._file(mode)
            if path.exists():
                study.results[mode] = from_json(json.loads(path.read_text()), str(path))
        return study

    def _file(self, mode: str) -> Path:
        return self.folder / f"{mode.replace(' ', '-').replace('+', '-')}.json"

    def add(self, mode: str, result: BenchResult) -> None:
        """Adds a round: its requests join those of earlier rounds at the same load."""
        before = self.results.get(mode)
        self.results[mode] = result if before is None else pooled(before, result)

    def comparison(self, a: str, b: str) -> Mapping[str, PointComparison]:
        """Compares B with A by load; returns nothing if either was not measured."""
        if a not in self.results or b not in self.results:
            return {}
        return {point.name: point for point in compare(self.results[a], self.results[b])}

    def peak_goodput(self, mode: str, slo: int) -> float | None:
        """Returns the best goodput of a mode over all loads."""
        if mode not in self.results:
            return None
        return max(point.figures.slos[slo].goodput for point in self.results[mode].points)


def pooled(before: BenchResult, after: BenchResult) -> BenchResult:
    """Returns one result with the requests of both, point by point; a point that only one has stays as it is."""
    points = {point.name: point for point in before.points}
    for point in after.points:
        points[point.name] = _joined(points[point.name], point, before.slos) if point.name in points else point
    ordered = sorted(points.values(), key=lambda point: max(point.offered.values(), default=0.0))
    return replace(before, points=ordered)


def _joined(a: PointResult, b: PointResult, slos: Sequence[SloSet]) -> PointResult:
    first, offset_s = len(a.run.requests), a.run.elapsed_s
    later = (
        replace(each, number=first + index, due_s=each.due_s + offset_s, sent_s=each.sent_s + offset_s)
        for index, each in enumerate(b.run.requests)
    )
    run = RunRecord(
        (*a.run.requests, *later), offset_s + b.run.elapsed_s, (*a.run.lags_s, *b.run.lags_s), a.run.is_interrupted
    )
    return make_point(a.name, a.offered, run, slos)
