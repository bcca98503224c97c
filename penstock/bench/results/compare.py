"""Tests whether two results differ, with bootstrap confidence intervals for the ratio of each figure.

Requests that follow each other wait in the same queues, so they are resampled in blocks of neighbours (circular block
bootstrap, Politis and Romano 1992). If both runs sent the same plan, the same requests are resampled from both, which
removes the differences between requests from the comparison.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from penstock.bench.results.figures import LATENCIES
from penstock.bench.results.quantiles import SHARES, quantile
from penstock.bench.results.record import Ending, RequestRecord
from penstock.bench.results.result_file import BenchResult, PointResult
from penstock.bench.results.slo import SloSet

NUM_RESAMPLES = 1000
_CONFIDENCE = 0.95
_SHARES = {name: share for name, share in SHARES.items() if name != "p99.9"}
_MIN_REQUESTS = 10

Figures = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class FigureRatio:
    """A figure of both results, and B / A with its confidence interval; None where A has none or is 0."""

    figure: str
    a: float | None
    b: float | None
    ratio: float | None
    low: float | None
    high: float | None
    is_higher_better: bool

    @property
    def verdict(self) -> str:
        """`better` and `worse` compare B with A."""
        if self.ratio is None or self.low is None or self.high is None:
            return "cannot be compared"
        if self.low <= 1.0 <= self.high:
            return "no difference shown"
        return "better" if (self.ratio > 1.0) is self.is_higher_better else "worse"


@dataclass(frozen=True, slots=True)
class PointComparison:
    """The comparison of a point that both results have."""

    name: str
    is_paired: bool  # both sent the same plan
    num_requests: tuple[int, int]
    ratios: Sequence[FigureRatio]


def compare(a: BenchResult, b: BenchResult, seed: int = 0, resamples: int = NUM_RESAMPLES) -> list[PointComparison]:
    """Compares points with equal names, using the SLOs of A. Other points are left out."""
    others = {point.name: point for point in b.points}
    return [
        _compare_points(point, others[point.name], a.slos, random.Random(f"{seed}/{point.name}"), resamples)
        for point in a.points
        if point.name in others
    ]


def _compare_points(
    a: PointResult, b: PointResult, slos: Sequence[SloSet], rng: random.Random, resamples: int
) -> PointComparison:
    ends = [_Resampled(point, slos) for point in (a, b)]
    is_paired = _plan_of(a) == _plan_of(b)
    found = [end.figures([1] * end.size) for end in ends]
    ratios: dict[str, list[float]] = {name: [] for name in found[0]}
    for _ in range(resamples if min(end.size for end in ends) >= _MIN_REQUESTS else 0):
        counts = block_counts(ends[0].size, rng)
        sampled = (ends[0].figures(counts), ends[1].figures(counts if is_paired else block_counts(ends[1].size, rng)))
        for name, values in ratios.items():
            if (ratio := _ratio(sampled[0][name], sampled[1][name])) is not None:
                values.append(ratio)
    return PointComparison(
        a.name,
        is_paired,
        (ends[0].size, ends[1].size),
        [_figure(name, found[0][name], found[1][name], values, resamples) for name, values in ratios.items()],
    )


def _figure(name: str, a: float | None, b: float | None, ratios: list[float], resamples: int) -> FigureRatio:
    low = high = None
    if ratios and len(ratios) >= 0.9 * resamples:
        ordered = sorted(ratios)
        low, high = (quantile(ordered, share) for share in ((1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2))
    return FigureRatio(name, a, b, _ratio(a, b), low, high, name.split()[0] not in LATENCIES)


def _ratio(a: float | None, b: float | None) -> float | None:
    return b / a if a and b is not None else None


def _plan_of(point: PointResult) -> list[tuple[object, ...]]:
    """Returns the parts of the records that are equal in two runs of the same plan."""
    return [
        (each.number, each.lane, each.planned_input_tokens, each.planned_output_tokens) for each in point.run.requests
    ]


def block_counts(size: int, rng: random.Random) -> list[int]:
    """Returns how often each of `size` neighbours is in a sample of `size`, taken in blocks of about the cube root."""
    length = max(1, round(size ** (1 / 3)))
    counts, left = [0] * size, size
    while left:
        start = rng.randrange(size)
        for offset in range(min(length, left)):
            counts[(start + offset) % size] += 1
        left -= min(length, left)
    return counts


class _Resampled:
    """The requests of a point, prepared so that the figures of a resample cost little."""

    def __init__(self, point: PointResult, slos: Sequence[SloSet]) -> None:
        requests = point.run.requests
        self.size = len(requests)
        self._latencies = {name: _Owned(requests, values) for name, values in LATENCIES.items()}
        judged = [request.ending is not Ending.CANCELLED for request in requests]
        self._judged = [float(each) for each in judged]
        self._met = {
            slo.text: [float(each and slo.is_met(request)) for each, request in zip(judged, requests, strict=True)]
            for slo in slos
        }
        self._tokens = [float(request.output_tokens) for request in requests]
        self._busy_s = [request.e2e_s for request in requests]
        self._prompt = [float(request.prompt_tokens or 0) for request in requests]
        self._cached = [float(request.cached_tokens or 0) for request in requests]
        self._elapsed_s = max(point.run.elapsed_s, 1e-9)
        self._is_closed_loop = "concurrency" in point.offered

    def figures(self, counts: Sequence[int]) -> Figures:
        """Returns the figures of the sample that contains each request `counts` times."""
        found: Figures = {}
        for name, owned in self._latencies.items():
            found |= {f"{name} {share}": value for share, value in owned.quantiles(counts).items()}
        elapsed_s = self._elapsed_s
        if self._is_closed_loop:  # slower answers lengthen the run; in an open loop its length is given
            elapsed_s *= _dot(self._busy_s, counts) / max(1e-9, sum(self._busy_s))
        found["output tokens/s"] = _dot(self._tokens, counts) / max(elapsed_s, 1e-9)
        prompt = _dot(self._prompt, counts)
        found["hit rate"] = _dot(self._cached, counts) / prompt if prompt else None
        num_judged = _dot(self._judged, counts)
        for slo, met in self._met.items():
            num_met = _dot(met, counts)
            found[f"attainment of {slo}"] = num_met / num_judged if num_judged else None
            found[f"goodput at {slo}"] = num_met / max(elapsed_s, 1e-9)
        return found


class _Owned:
    """Latencies in ascending order, each with the index of its request."""

    def __init__(self, requests: Sequence[RequestRecord], values: Callable[[RequestRecord], object]) -> None:
        pairs = sorted(_pairs(requests, values))
        self._values = [value for value, _ in pairs]
        self._owners = [owner for _, owner in pairs]

    def quantiles(self, counts: Sequence[int]) -> Mapping[str, float | None]:
        ranks = list(accumulate(map(counts.__getitem__, self._owners)))
        total = ranks[-1] if ranks else 0
        if not total:
            return dict.fromkeys(_SHARES)
        return {
            name: self._values[bisect_left(ranks, max(1, math.ceil(share * total - 1e-9)))]
            for name, share in _SHARES.items()
        }


def _pairs(requests: Sequence[RequestRecord], values: Callable[[RequestRecord], object]) -> Iterator[tuple[float, int]]:
    for owner, request in enumerate(requests):
        for value in values(request):  # type: ignore[attr-defined]
            yield value, owner


def _dot(values: Sequence[float], counts: Sequence[int]) -> float:
    return sum(map(float.__mul__, values, map(float, counts)))
