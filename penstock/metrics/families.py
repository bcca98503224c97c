"""Provides counters and histograms that take about 0.1 us to update; those of prometheus_client take up to 3 us.

Observing a batch of values with numpy takes a third of the time of observing them one by one. One thread at a time may
update a series. Another thread may call `collect` meanwhile, which copies the list of series first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from operator import add

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class BoundCounter:
    """A series of a counter, bound to the values of its labels."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount


class BoundHistogram:
    """A series of a histogram, bound to the values of its labels."""

    __slots__ = ("_bounds", "_counts", "_deferred", "_sum", "defer")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._deferred: list[float] = []
        # Keeps a value until the next `fold`. A method of the list takes half as long as one in Python.
        self.defer: Callable[[float], None] = self._deferred.append

    def observe(self, value: float, count: int = 1) -> None:
        """Observes `count` equal values."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def fold(self, at_least: int = 1) -> None:
        """Observes the deferred values if there are at least so many."""
        if len(self._deferred) >= at_least:
            values = np.array(self._deferred)
            self._deferred.clear()
            observe_all((self,), np.zeros(len(values), np.int64), values)

    def add(self, bucket: int, count: int) -> None:
        """Adds `count` values to a bucket but not to the sum."""
        self._counts[bucket] += count

    def add_sum(self, total: float) -> None:
        """Adds to the sum but not to any bucket."""
        self._sum += total

    @property
    def bounds(self) -> Sequence[float]:
        return self._bounds

    def totals(self) -> tuple[list[int], float]:
        """Returns the cumulative counts (up to each bound, then of all values) and the sum of the values."""
        return list(accumulate(self._counts)), self._sum


def observe_all(series: Sequence[BoundHistogram], numbers: Ints, values: Floats) -> None:
    """Observes `values[i]` in `series[numbers[i]]` for every i. All series must have the same bounds."""
    if not len(values):
        return
    bounds = series[0].bounds
    flat_buckets = numbers * (len(bounds) + 1) + np.searchsorted(bounds, values)
    counts = np.bincount(flat_buckets)
    non_empty = np.flatnonzero(counts)
    for flat_bucket, count in zip(non_empty.tolist(), counts[non_empty].tolist(), strict=True):
        number, bucket = divmod(flat_bucket, len(bounds) + 1)
        series[number].add(bucket, count)
    for each, total in zip(series, np.bincount(numbers, values, len(series)).tolist(), strict=True):
        each.add_sum(total)


class CounterFamily(Collector):
    """A counter with labels. A series appears with its first `bind`."""

    def __init__(self, name: str, help_text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._name, self._help_text, self._labels = name, help_text, tuple(labels)
        self._series: dict[tuple[str, ...], BoundCounter] = {}
        registry.register(self)

    def bind(self, *values: str) -> BoundCounter:
        """Returns the series with these label values, given in the order of the labels. Creates it if needed."""
        if (series := self._series.get(values)) is None:
            _check_values(self._name, self._labels, values)
            series = self._series[values] = BoundCounter()
        return series

    def describe(self) -> list[Metric]:
        return [CounterMetricFamily(self._name, self._help_text, labels=self._labels)]

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._help_text, labels=self._labels)
        for values, series in list(self._series.items()):
            family.add_metric(values, series.value)
        yield family


class HistogramFamily(Collector):
    """A histogram with labels. A series appears with its first `bind`, so label values that never occur cost
    nothing."""

    def __init__(
        self,
        name: str,
        help_text: str,
        labels: Sequence[str],
        bounds: Sequence[float],
        registry: CollectorRegistry | None,
    ) -> None:
        """Registers nothing without a `registry`; the owner then collects the family."""
        self.bounds = bounds
        self._name, self._help_text, self._labels = name, help_text, tuple(labels)
        self._series: dict[tuple[str, ...], BoundHistogram] = {}
        if registry is not None:
            registry.register(self)

    def bind(self, *values: str) -> BoundHistogram:
        """Returns the series with these label values, given in the order of the labels. Creates it if needed."""
        if (series := self._series.get(values)) is None:
            _check_values(self._name, self._labels, values)
            series = self._series[values] = BoundHistogram(self.bounds)
        return series

    def fold(self, at_least: int = 1) -> None:
        """Observes the deferred values of every series that has at least so many."""
        for series in self._series.values():
            series.fold(at_least)

    def total(self, where: Mapping[str, str]) -> tuple[list[int], float]:
        """Returns the `totals` summed over all series whose labels have the values `where`."""
        counts, total = [0] * (len(self.bounds) + 1), 0.0
        wanted = [(self._labels.index(label), value) for label, value in where.items()]
        for values, series in list(self._series.items()):
            if all(values[position] == value for position, value in wanted):
                series_counts, series_total = series.totals()
                counts, total = list(map(add, counts, series_counts)), total + series_total
        return counts, total

    def describe(self) -> list[Metric]:
        return [HistogramMetricFamily(self._name, self._help_text, labels=self._labels)]

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._help_text, labels=self._labels)
        for values, series in list(self._series.items()):
            _add_series(family, values, self.bounds, series.totals())
        yield family


class HistogramTotal(Collector):
    """A histogram computed at each scrape as the sum of a family's series, so that no value is observed twice."""

    def __init__(
        self,
        name: str,
        help_text: str,
        labels: Mapping[str, str],
        parts: HistogramFamily,
        registry: CollectorRegistry,
        where: Mapping[str, str] | None = None,
    ) -> None:
        """Sums the series of `parts` whose labels have the values `where`; by default all series."""
        self._name, self._help_text, self._labels = name, help_text, labels
        self._parts, self._where = parts, where or {}
        registry.register(self)

    def describe(self) -> list[Metric]:
        return [HistogramMetricFamily(self._name, self._help_text, labels=tuple(self._labels))]

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._help_text, labels=tuple(self._labels))
        _add_series(family, tuple(self._labels.values()), self._parts.bounds, self._parts.total(self._where))
        yield family


def _add_series(
    family: HistogramMetricFamily, values: Sequence[str], bounds: Sequence[float], totals: tuple[list[int], float]
) -> None:
    counts, total = totals
    family.add_metric(values, list(zip([*map(str, bounds), "+Inf"], map(float, counts), strict=True)), total)


def _check_values(name: str, labels: Sequence[str], values: Sequence[str]) -> None:
    if len(values) != len(labels):
        raise ValueError(f"{name}: got {len(values)} label values {list(values)} for the labels {list(labels)}")
