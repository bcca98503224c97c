"""Measures rates and bursts of arrivals. Pure.

Two figures say how bursty traffic is. The coefficient of variation (CV) of the times between arrivals is 1 for a
Poisson process and large where requests come together. The index of dispersion, the variance of counts in windows of
one length over their mean, is 1 for a Poisson process whatever the window, and grows with the window where bursts last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from simulator.traffic.statistics import summarize_values

WINDOWS_S = (1.0, 10.0, 60.0, 300.0)


@dataclass(frozen=True, slots=True)
class WindowRates:
    """Counts in windows of one length."""

    window_s: float
    peak_per_s: float  # rate in the fullest window, wherever it begins
    peak_to_mean: float
    dispersion: float  # variance over mean of the counts in successive windows; 1: Poisson


@dataclass(frozen=True, slots=True)
class ArrivalReport:
    """The arrivals of requests."""

    duration_s: float
    requests_per_s: float
    gap_cv: float  # CV of the times between arrivals; 1: Poisson
    windows: tuple[WindowRates, ...]


def describe_arrivals(times_s: Sequence[float], windows_s: Sequence[float] = WINDOWS_S) -> ArrivalReport:
    """Describes sorted arrival times. Windows longer than half of the trace are left out."""
    duration_s = times_s[-1] - times_s[0] if len(times_s) > 1 else 0.0
    if not duration_s:
        return ArrivalReport(0.0, 0.0, 0.0, ())
    rate = (len(times_s) - 1) / duration_s
    return ArrivalReport(
        duration_s,
        rate,
        summarize_values(later - earlier for earlier, later in pairwise(times_s)).cv,
        tuple(_window(times_s, window_s, rate) for window_s in windows_s if window_s <= duration_s / 2),
    )


def _window(times_s: Sequence[float], window_s: float, rate: float) -> WindowRates:
    counts = summarize_values(count_by_window(times_s, window_s))
    peak_per_s = most_within(times_s, window_s) / window_s
    return WindowRates(window_s, peak_per_s, peak_per_s / rate, counts.cv**2 * counts.mean)


def count_by_window(times_s: Sequence[float], window_s: float) -> list[int]:
    """Returns the number of arrivals in each whole window from the first arrival on."""
    num_windows = max(1, int((times_s[-1] - times_s[0]) / window_s))
    counts = [0] * num_windows
    for time_s in times_s:
        index = int((time_s - times_s[0]) / window_s)
        if index < num_windows:
            counts[index] += 1
    return counts


def most_within(times_s: Sequence[float], window_s: float) -> int:
    """Returns the largest number of arrivals in any window of this length."""
    most = first = 0
    for number, time_s in enumerate(times_s):
        while times_s[first] <= time_s - window_s:
            first += 1
        most = max(most, number - first + 1)
    return most
