"""Exports the metrics that workers declare in `penstock.worker_metrics`, by worker, read when Prometheus scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.types import WorkerId, WorkerLoad
from penstock.worker_metrics import METRICS


class WorkerMetricsCollector(Collector):
    """Reads the latest load reports, so that workers that have left leave no series behind."""

    def __init__(self, model: str, loads: Callable[[], Mapping[WorkerId, WorkerLoad]]) -> None:
        self._model = model
        self._loads = loads

    def describe(self) -> list[Metric]:
        return []  # registering must not read the workers

    def collect(self) -> Iterator[Metric]:
        loads = self._loads()
        for metric in METRICS.values():
            family_type = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
            family = family_type(f"penstock:worker_{metric.name}", metric.help_text, labels=["model_name", "worker"])
            for worker_id, load in loads.items():
                if metric.name in load.metrics:
                    family.add_metric([self._model, worker_id], load.metrics[metric.name])
            yield family
