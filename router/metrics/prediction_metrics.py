"""Metrics of predictions: actual over predicted for each worker that is followed, read when Prometheus scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.types import WorkerId
from router.routing.costs.predictions import WorkerPredictionErrors


class PredictionCollector(Collector):
    """Keeps nothing, so that workers that have left leave no series behind."""

    def __init__(self, model: str, workers: Callable[[], Mapping[WorkerId, WorkerPredictionErrors]]) -> None:
        self._model = model
        self._workers = workers

    def describe(self) -> list[Metric]:
        return []  # registering must not read the workers

    def collect(self) -> Iterator[Metric]:
        labels = ["model_name", "worker"]
        ratio = GaugeMetricFamily(
            "penstock:worker_time_ratio", "Actual over predicted time, running mean", labels=labels
        )
        shortfall = GaugeMetricFamily(
            "penstock:worker_cache_shortfall",
            "Share of the cached tokens promised by the index that the worker did not have, running mean",
            labels=labels,
        )
        alarms = CounterMetricFamily(
            "penstock:lying_index",
            "Times the index was found wrong about a worker, whose pages were then requested again",
            labels=labels,
        )
        for worker_id, errors in self._workers().items():
            names = [self._model, worker_id]
            ratio.add_metric(names, errors.time_ratio)
            shortfall.add_metric(names, errors.shortfall)
            alarms.add_metric(names, errors.num_alarms)
        yield from (ratio, shortfall, alarms)
