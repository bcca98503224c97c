"""Metrics of the prefix index: what it holds and how it keeps up with events, read when Prometheus scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.routing.index.prefix_index import PrefixIndex

_TIERS = ("device", "host", "disk")


class IndexCollector(Collector):
    def __init__(self, model: str, index: PrefixIndex, num_mute: Callable[[], int]) -> None:
        self._model = model
        self._index = index
        self._num_mute = num_mute

    def collect(self) -> Iterator[Metric]:
        index, stats = self._index, self._index.stats
        for name, help_text, value in (
            ("pages", "Pages that the prefix index knows", index.num_pages),
            ("bytes", "Memory that the prefix index uses", index.num_bytes),
            ("mute_workers", "Workers that report prefix cache hits but send no page events", self._num_mute()),
        ):
            gauge = GaugeMetricFamily(f"penstock:prefix_index_{name}", help_text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, help_text, value in (
            ("gaps", "Times that events of a worker were missing", stats.gaps),
            ("replays", "Gaps closed by events sent again", stats.replays),
            ("snapshots", "Whole caches read", stats.snapshots),
            ("evicted_pages", "Pages evicted from the index for lack of room", stats.evicted_pages),
        ):
            counter = CounterMetricFamily(f"penstock:prefix_index_{name}", help_text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        yield self._by_worker()

    def _by_worker(self) -> Metric:
        pages = GaugeMetricFamily(
            "penstock:prefix_index_worker_pages",
            "Pages that the prefix index knows of a worker, each on the best tier that has it",
            labels=["model_name", "worker", "tier"],
        )
        for worker_id in self._index.worker_ids:
            for tier, count in zip(_TIERS, self._index.pages_by_tier(worker_id), strict=True):
                pages.add_metric([self._model, worker_id, tier], count)
        return pages
