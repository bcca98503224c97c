"""Computes quantiles of latencies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}


def quantile(ordered: Sequence[float], share: float) -> float:
    """Returns the nearest-rank quantile of ascending values: the smallest that a `share` of them do not exceed."""
    assert ordered, "no values"
    return ordered[max(0, min(len(ordered), math.ceil(share * len(ordered) - 1e-9)) - 1)]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """The distribution of one latency in seconds. A quantile with less than one value beyond it is the maximum."""

    count: int
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    p999_s: float
    max_s: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Quantiles | None:
        """Returns None for no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p90, p99, p999 = (quantile(ordered, share) for share in SHARES.values())
        return cls(len(ordered), sum(ordered) / len(ordered), p50, p90, p99, p999, ordered[-1])
