"""What has come of late, in bins of equal length: work for prefill and for decode in tokens, pages held. Pure.

How many workers would have served it is found by passing it through so many once more (`share_late`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bin:
    """One interval; tokens a second."""

    prefill_per_s: float  # uncached tokens of prompts that came
    sequences: float  # that ran, or would have had there been room
    contexts: float  # tokens of their contexts
    pages: float  # that they held


class History:
    """The newest bins. A gap, while data was missing, is left out rather than counted as quiet."""

    def __init__(self, length_s: float, bin_s: float) -> None:
        self.bin_s = bin_s
        self._bins: deque[Bin] = deque(maxlen=max(1, round(length_s / bin_s)))

    def add(self, one: Bin) -> None:
        self._bins.append(one)

    @property
    def bins(self) -> Sequence[Bin]:
        return self._bins

    @property
    def length_s(self) -> float:
        return len(self._bins) * self.bin_s

    def highest(self, length_s: float, value: Callable[[Bin], float]) -> float:
        """The highest mean over any so long a while."""
        count = min(len(self._bins), max(1, round(length_s / self.bin_s)))
        if not count:
            return 0.0
        values = [value(one) for one in self._bins]
        total = most = sum(values[:count])
        for come, gone in zip(values[count:], values, strict=False):
            total += come - gone
            most = max(most, total)
        return most / count

    def recent(self, length_s: float) -> list[Bin]:
        count = max(1, round(length_s / self.bin_s))
        return list(self._bins)[-count:]


def share_late(arrivals: Iterable[float], per_s: float, bin_s: float, slack_s: float, backlog: float = 0.0) -> float:
    """Of what arrives, that which would wait for longer than `slack_s` where `per_s` is served; 0 of nothing.

    A fluid queue, first come first served: what comes waits for as long as serving what is before it takes.
    """
    queue, total, late = backlog, 0.0, 0.0
    for rate in arrivals:
        came = rate * bin_s
        total += came
        if came > 0.0:
            # The bin's arrivals find the queue as it is, and half of each other.
            wait_s = (queue + max(0.0, came - per_s * bin_s) / 2) / per_s
            if wait_s > slack_s:
                late += came
        queue = max(0.0, queue + came - per_s * bin_s)
    return late / total if total else 0.0


def weighted_quantile(values: Sequence[float], share: float) -> float:
    """The value below which that share of the total lies: a busy moment counts for as much as happens in it."""
    total = sum(values)
    reached = 0.0
    for value in sorted(values):
        reached += value
        if reached >= share * total:
            return value
    return max(values, default=0.0)


class Trend:
    """Holt's linear method (Holt, 1957) over irregular steps: a level and how fast it changes, each forgetting.

    `ahead` looks no further than the trend has been seen for, never below zero, and believes of the change what is more
    than the values stray by: noise has a slope too.
    """

    def __init__(self, level_s: float = 60.0, trend_s: float = 240.0) -> None:
        self._level_s = level_s
        self._trend_s = trend_s
        self._level: float | None = None
        self._slope = 0.0
        self._seen_s = 0.0
        self._error = 0.0  # running means of what values are off by: without its sign,
        self._bias = 0.0  # and with it, which is what a trend not yet known for what it is leaves over

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
        if self._level is None:
            return 0.0
        return max(0.0, self._level + self._sure_change(horizon_s))

    def rises(self, horizon_s: float) -> bool:
        """For sure."""
        return self._sure_change(horizon_s) > 0.0

    def _sure_change(self, horizon_s: float) -> float:
        change = self._slope * min(horizon_s, self._seen_s / 2)
        noise = self._error - abs(self._bias)
        return math.copysign(max(0.0, abs(change) - noise), change)
