"""Exports state that other rooms own, read at each scrape: credentials, prefix index, predictions, worker metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.metrics.worker_metrics import METRICS
from penstock.types import WorkerId, WorkerLoad
from router.routing.costs.predictions import WorkerPredictionErrors
from router.routing.index.prefix_index import PrefixIndex

_TIERS = ("device", "host", "disk")


class LoadedFiles(Protocol):
    """Describes credential files that are reloaded when they change."""

    setting: str
    loaded_unix_s: float
    problem: str


class CredentialCollector:
    """Exports how long ago keys and certificates were read from files, and whether newer files were rejected."""

    def __init__(self, model: str, files: Callable[[], Sequence[LoadedFiles]]) -> None:
        self._model = model
        self._files = files

    def collect(self) -> Iterator[GaugeMetricFamily]:
        labels = ["model_name", "setting"]
        age = GaugeMetricFamily(
            "penstock:credentials_age_seconds", "Time since the keys or certificates in use were read", labels=labels
        )
        refused = GaugeMetricFamily(
            "penstock:credentials_refused",
            "1 while the files on disk are unusable and the credentials read earlier stay in use",
            labels=labels,
        )
        now_s = time.time()
        for files in self._files():
            age.add_metric([self._model, files.setting], max(0.0, now_s - files.loaded_unix_s))
            refused.add_metric([self._model, files.setting], float(bool(files.problem)))
        yield age
        yield refused


class IndexCollector(Collector):
    """Exports the size of the prefix index and how well it keeps up with the workers' events."""

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
            ("gaps", "Gaps found in the workers' event streams", stats.gaps),
            ("replays", "Gaps closed by replayed events", stats.replays),
            ("snapshots", "Snapshots of a worker's whole cache read", stats.snapshots),
            ("evicted_pages", "Pages evicted from the index for lack of room", stats.evicted_pages),
        ):
            counter = CounterMetricFamily(f"penstock:prefix_index_{name}", help_text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        yield self._by_worker()

    def _by_worker(self) -> Metric:
        pages = GaugeMetricFamily(
            "penstock:prefix_index_worker_pages",
            "Pages that the prefix index knows at a worker, each counted on the fastest tier that holds it",
            labels=["model_name", "worker", "tier"],
        )
        for worker_id in self._index.worker_ids:
            for tier, count in zip(_TIERS, self._index.pages_by_tier(worker_id), strict=True):
                pages.add_metric([self._model, worker_id, tier], count)
        return pages


class PredictionCollector(Collector):
    """Exports how wrong predictions were for each followed worker. The series of a worker that left disappear."""

    def __init__(self, model: str, workers: Callable[[], Mapping[WorkerId, WorkerPredictionErrors]]) -> None:
        self._model = model
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        labels = ["model_name", "worker"]
        ratio = GaugeMetricFamily(
            "penstock:worker_time_ratio", "Actual time divided by predicted time, running mean", labels=labels
        )
        shortfall = GaugeMetricFamily(
            "penstock:worker_cache_shortfall",
            "Share of the cached tokens predicted by the index that the worker did not have, running mean",
            labels=labels,
        )
        alarms = CounterMetricFamily(
            "penstock:lying_index",
            "Times that the index was found wrong about a worker and its pages were requested again",
            labels=labels,
        )
        for worker_id, errors in self._workers().items():
            names = [self._model, worker_id]
            ratio.add_metric(names, errors.time_ratio)
            shortfall.add_metric(names, errors.shortfall)
            alarms.add_metric(names, errors.num_alarms)
        yield from (ratio, shortfall, alarms)


class WorkerMetricsCollector(Collector):
    """Exports the metrics of `penstock.metrics.worker_metrics` that each worker reports with its load."""

    def __init__(self, model: str, loads: Callable[[], Mapping[WorkerId, WorkerLoad]]) -> None:
        self._model = model
        self._loads = loads

    def collect(self) -> Iterator[Metric]:
        loads = self._loads()
        for metric in METRICS.values():
            family_type = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
            family = family_type(f"penstock:worker_{metric.name}", metric.help_text, labels=["model_name", "worker"])
            for worker_id, load in loads.items():
                if metric.name in load.metrics:
                    family.add_metric([self._model, worker_id], load.metrics[metric.name])
            yield family
