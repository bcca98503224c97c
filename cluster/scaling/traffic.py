"""Keeps recent traffic in bins of equal length (prefill work, sequences, contexts, pages), and forecasts it. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TrafficBin:
    """The traffic of one interval."""

    prefill_per_s: float  # uncached prompt tokens that arrived per second
    sequences: float  # sequences that run, or wait only for room
    contexts: float  # their context tokens, summed
    pages: float  # pages they hold


class TrafficHistory:
    """The newest bins. Intervals without data are left out rather than counted as idle."""

    def __init__(self, length_s: float, bin_s: float) -> None:
        self.bin_s = bin_s
        self._bins: deque[TrafficBin] = deque(maxlen=max(1, round(length_s / bin_s)))

    def add(self, newest: TrafficBin) -> None:
        self._bins.append(newest)

    @property
    def bins(self) -> Sequence[TrafficBin]:
        return self._bins

    @property
    def length_s(self) -> float:
        return len(self._bins) * self.bin_s

    def highest(self, length_s: float, value: Callable[[TrafficBin], float]) -> float:
        """Returns the highest mean over any window of `length_s`."""
        count = min(len(self._bins), max(1, round(length_s / self.bin_s)))
        if not count:
            return 0.0
        values = [value(each) for each in self._bins]
        total = most = sum(values[:count])
        for newer, older in zip(values[count:], values, strict=False):
            total += newer - older
            most = max(most, total)
        return most / count

    def recent(self, length_s: float) -> list[TrafficBin]:
        count = max(1, round(length_s / self.bin_s))
        return list(self._bins)[-count:]


def share_late(arrivals: Iterable[float], per_s: float, bin_s: float, slack_s: float, backlog: float = 0.0) -> float:
    """Returns the share of arrivals that wait longer than `slack_s` when `per_s` are served; 0 without arrivals.

    Models a fluid FIFO queue: each arrival waits until everything before it is served.
    """
    queue, total, late = backlog, 0.0, 0.0
    for rate in arrivals:
        arrived = rate * bin_s
        total += arrived
        if arrived > 0.0:
            # On average an arrival finds the queue at the bin's start and half of the bin's other arrivals.
            wait_s = (queue + max(0.0, arrived - per_s * bin_s) / 2) / per_s
            if wait_s > slack_s:
                late += arrived
        queue = max(0.0, queue + arrived - per_s * bin_s)
    return late / total if total else 0.0


def weighted_quantile(values: Sequence[float], share: float) -> float:
    """Returns the value below which `share` of the total lies, each value weighted by itself."""
    total = sum(values)
    reached = 0.0
    for value in sorted(values):
        reached += value
        if reached >= share * total:
            return value
    return max(values, default=0.0)


class Trend:
    """Holt's linear method (Holt, 1957) over irregular steps: a level and its slope, both exponentially smoothed.

    `ahead` extrapolates over at most half the observed time and never below zero. It uses only the part of the change
    that exceeds the values' noise, since noise has a slope too.
    """

    def __init__(self, level_s: float = 60.0, trend_s: float = 240.0) -> None:
        self._level_s = level_s
        self._trend_s = trend_s
        self._level: float | None = None
        self._slope = 0.0
        self._seen_s = 0.0
        self._error = 0.0  # running mean of the absolute forecast error
        self._bias = 0.0  # running mean of the signed error; not zero while the trend is not learned

    def add(self, value: float, after_s: float) -> None:
        if self._level is None:
            self._level = value
            return
        alpha, beta = after_s / (self._level_s + after_s), after_s / (self._trend_s + after_s)
        expected = self._level + self._slope * after_s
        self._error += alpha * (abs(value - expected) - self._error)
        self._bias += alpha * (value - expected - self._bias)
        level = expected + alpha * (value - expected)
        self._slope += beta * ((level - self._level) / after_s - self._slope)
        self._level = level
        self._seen_s += after_s

    def ahead(self, horizon_s: float) -> float:
        """Returns the forecast `horizon_s` from now."""
        if self._level is None:
            return 0.0
        return max(0.0, self._level + self._sure_change(horizon_s))

    def rises(self, horizon_s: float) -> bool:
        """Returns whether the value certainly rises over the horizon."""
        return self._sure_change(horizon_s) > 0.0

    def _sure_change(self, horizon_s: float) -> float:
        change = self._slope * min(horizon_s, self._seen_s / 2)
        noise = self._error - abs(self._bias)
        return math.copysign(max(0.0, abs(change) - noise), change)
