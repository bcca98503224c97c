"""Computes percentiles and weighted percentiles of plain numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_SHARES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Distribution:
    """The mean, the percentiles and the extremes of a quantity. `cv` is the standard deviation over the mean."""

    count: int
    mean: float
    cv: float
    p50: float
    p90: float
    p95: float
    p99: float
    largest: float


def summarize_values(values: Iterable[float]) -> Distribution:
    """Returns the distribution of the values; all fields are 0 for no values."""
    ordered = sorted(values)
    if not ordered:
        return Distribution(0, *(0.0,) * 7)
    mean = math.fsum(ordered) / len(ordered)
    variance = math.fsum((value - mean) ** 2 for value in ordered) / len(ordered)
    cv = math.sqrt(variance) / mean if mean else 0.0
    p50, p90, p95, p99 = (nearest_rank(ordered, share) for share in _SHARES)
    return Distribution(len(ordered), mean, cv, p50, p90, p95, p99, ordered[-1])


def nearest_rank(ordered: Sequence[float], share: float) -> float:
    """Returns the smallest of the sorted values that at least `share` of them do not exceed; 0 for no values."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered), max(1, math.ceil(share * len(ordered)))) - 1]


def weighted_percentile(pairs: Iterable[tuple[float, float]], share: float) -> float:
    """Returns the smallest value below or at which `share` of the weight lies, of (value, weight); 0 without weight."""
    ordered = sorted(pairs)
    wanted = share * math.fsum(weight for _, weight in ordered)
    reached = 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= wanted and weight > 0:
            return value
    return ordered[-1][0] if ordered else 0.0
