"""Scales axes: chooses the range of values and the ticks, and maps values to pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_STEPS = (1.0, 2.0, 5.0)
_MAX_LOG_RATIO = 1e9  # widest range that a logarithmic axis chooses; lower values are clamped
_MIN_SPREAD = 1e-9  # share of the larger bound; ticks of a narrower range would read the same


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis. Without bounds it fits the points; a logarithmic one omits values that are not positive."""

    label: str
    log: bool = False
    percent: bool = False
    low: float | None = None
    high: float | None = None


class Scale:
    """Maps values of one axis to pixels between `start` and `end`. Values beyond the bounds are clamped."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float) -> None:
        """Fits the bounds that the axis leaves open to `values`, which must not be empty."""
        self.start, self.end, self._log = start, end, axis.log
        low = min(values) if axis.low is None else axis.low
        high = max(values) if axis.high is None else axis.high
        if axis.log and axis.low is None:
            low = max(low, high / _MAX_LOG_RATIO)
        elif axis.low is None and 0 < low < 0.5 * high:
            low = 0.0
        self._low, self._high = low, high
        if high - low <= max(_MIN_SPREAD * max(abs(low), abs(high)), 1e-300):
            self._low, self._high = _widen(axis, low, high)

    def __call__(self, value: float) -> float:
        if self._log:
            share = math.log(max(value, self._low) / self._low) / math.log(self._high / self._low)
        else:
            share = (value - self._low) / (self._high - self._low)
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def holds(self, value: float) -> bool:
        return self._low <= value <= self._high

    def ticks(self) -> list[float]:
        """Returns about 5 evenly spaced values, or on a logarithmic axis 1, 2 and 5 in each decade.

        A wide logarithmic axis has only decades, and one too narrow for three ticks has evenly spaced ones.
        """
        found = self._log_ticks() if self._log else []
        return found if len(found) > 2 else self._even_ticks()

    def _log_ticks(self) -> list[float]:
        low, high = math.floor(math.log10(self._low)), math.ceil(math.log10(self._high))
        steps = _STEPS if high - low <= 3 else (1.0,)
        stride = max(1, math.ceil((high - low) / 8))
        found = [step * 10.0**power for power in range(low, high + 1, stride) for step in steps]
        return [value for value in found if self.holds(value)]

    def _even_ticks(self) -> list[float]:
        least = (self._high - self._low) / 5
        power = 10.0 ** math.floor(math.log10(least))
        step = next(step * power for step in (*_STEPS, 10.0) if step * power >= least * (1 - 1e-9))
        first, last = math.ceil(self._low / step - 1e-9), math.floor(self._high / step + 1e-9)
        return [index * step for index in range(first, last + 1)]


def _widen(axis: Axis, low: float, high: float) -> tuple[float, float]:
    """Returns bounds that differ; those given by the axis are kept."""
    if axis.log:
        return (low, 2 * low) if axis.high is None else (high / 10, high)
    if axis.high is not None:
        return high - (abs(high) or 1.0), high
    if axis.low is not None or low >= 0:
        return (low, low + (abs(low) or 1.0)) if abs(low) > 1e-300 else (0.0, 1.0)
    return (low, 0.0) if low < -1e-300 else (0.0, 1.0)


def format_tick(value: float, percent: bool = False) -> str:
    """Formats a tick's value briefly: 25%, 1.5k, 20M, 0.05."""
    if percent:
        return f"{value * 100:.4g}%"
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.4g}{unit}"
    return f"{value:.4g}"
