"""Histograms that cost less than a microsecond to observe: those of the library take several for each value."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class BoundHistogram:
    """One series of a family, bound to the values of its labels. Not thread-safe: the router's event loop owns it."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Observes `count` equal values."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def totals(self) -> tuple[list[int], float]:
        """Returns how many values were at most each bound, then how many in all, and their sum."""
        return list(accumulate(self._counts)), self._sum


class HistogramFamily(Collector):
    """A histogram with labels. A series appears with its first `bind`, so that label values that never occur cost
    nothing."""

    def __init__(
        self, name: str, help_text: str, labels: Sequence[str], bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._help_text, self._labels, self._bounds = name, help_text, list(labels), bounds
        self._series: dict[tuple[str, ...], BoundHistogram] = {}
        registry.register(self)

    def bind(self, *values: str) -> BoundHistogram:
        """Returns the series of these label values, in the order of the labels."""
        if (series := self._series.get(values)) is None:
            if len(values) != len(self._labels):
                raise ValueError(f"{self._name} has the labels {self._labels}, not {len(values)}")
            series = self._series[values] = BoundHistogram(self._bounds)
        return series

    def describe(self) -> list[Metric]:
        return [HistogramMetricFamily(self._name, self._help_text, labels=self._labels)]

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._help_text, labels=self._labels)
        bounds = [*map(str, self._bounds), "+Inf"]
        for values, series in list(self._series.items()):
            counts, total = series.totals()
            family.add_metric(list(values), list(zip(bounds, map(float, counts), strict=True)), total)
        yield family
