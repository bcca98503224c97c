"""The router's metrics, under vLLM's names where they exist, so that its dashboards work. Each router has its own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from penstock.config.autoscaler import SloConfig
from penstock.types import Role, WorkerEnd, WorkerId, WorkerLoad
from router.metrics.admission_metrics import AdmissionMetrics
from router.metrics.collectors import (
    CredentialCollector,
    IndexCollector,
    LoadedFiles,
    PredictionCollector,
    WorkerMetricsCollector,
)
from router.metrics.families import HistogramFamily, observe_all
from router.metrics.loop_lag import LoopLag
from router.metrics.request_metrics import RequestMetrics
from router.routing.costs.predictions import WorkerPredictionErrors
from router.routing.index.prefix_index import PrefixIndex

_DEFAULT_SLO = SloConfig()
_LABELS = ["model_name"]
_BATCH = 512
_ERROR_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)


class RouterMetrics:
    """Owns the registries. `requests` and `admission` count while a request is served; the rest is rare, or read when
    Prometheus scrapes.
    """

    def __init__(self, model: str, tenant_labels: int = 0, slo: SloConfig = _DEFAULT_SLO) -> None:
        self._model = model
        self._registry = registry = CollectorRegistry()
        self._of_requests = CollectorRegistry()  # a hundred thousand lines where tenants have labels
        self._errors = Counter("vllm:request_errors", "Requests failed", [*_LABELS, "reason"], registry=registry)
        self._limited = Counter(
            "penstock:limited",
            "Connections and streams that a limit has refused or ended, by its key in router.limits",
            [*_LABELS, "limit"],
            registry=registry,
        )
        self._picks = Counter(
            "penstock:endpoint_picks",
            "Calls of gateways by how they were answered: placed by their prompt, by load, refused; fallback: another "
            "endpoint than the picked one has served the call",
            [*_LABELS, "how"],
            registry=registry,
        )
        self._traces = Counter(
            "penstock:traces",
            "Sampled requests whose trace was exported, failed at the collector, or was dropped from the queue",
            [*_LABELS, "result"],
            registry=registry,
        )
        self.requests = RequestMetrics(self._of_requests, model, slo, tenant_labels)
        self.admission = AdmissionMetrics(registry, model)
        self.loop_lag = LoopLag(registry, model)
        errors = HistogramFamily(
            "penstock:prediction_error_seconds",
            "Difference between a stage's actual and predicted time",
            [*_LABELS, "stage"],
            _ERROR_S,
            registry,
        )
        self._mispredicted = [errors.bind(model, stage) for stage in ("queue", "prefill", "transfer")]
        self._errors_s: list[tuple[float, float, float]] = []  # not observed yet

    def watch(
        self,
        *,
        num_running: Callable[[], float],
        num_waiting: Callable[[], float],
        cache_usage: Callable[[], float],
        open_circuits: Callable[[], float],
        tier_hits: Callable[[str], float],
        num_workers: Callable[[Role], float],
    ) -> None:
        """Adds gauges whose values are read when Prometheus scrapes."""
        for name, help_text, value in (
            ("vllm:num_requests_running", "Sequences decoding, by the workers' reports", num_running),
            (
                "vllm:num_requests_waiting",
                "Requests queued in the router and sequences waiting at the workers",
                num_waiting,
            ),
            ("vllm:kv_cache_usage_perc", "Share of the decode workers' pages in use, 0 to 1", cache_usage),
            ("penstock:open_circuits", "Workers and links avoided because they failed recently", open_circuits),
        ):
            Gauge(name, help_text, _LABELS, registry=self._registry).labels(self._model).set_function(value)
        roles = tuple(role.value for role in Role)
        self._gauges("workers", "Workers that would serve a request now", "role", roles, lambda r: num_workers(Role(r)))
        self._gauges(
            "prefix_cache_tier_hits",
            "Pages of prompts found on a tier, by the reports of the workers that run now, since they started",
            "tier",
            ("device", "host", "disk"),
            tier_hits,
        )

    def watch_spares(self, count: Callable[[str], float]) -> None:
        """Adds a gauge of the warm spares of each pool, by role."""
        help_text = "Warm processes that may become workers of the pool, by the controller"
        self._gauges("warm_spares", help_text, "pool", tuple(role.value for role in Role), count)

    def watch_ends(self, count: Callable[[str], float]) -> None:
        """Adds a gauge of the workers that ended, by how they ended; planned ends have their own labels."""
        help_text = "Workers that ended since the controller started, by the controller"
        self._gauges("worker_ends", help_text, "how", tuple(end.value for end in WorkerEnd), count)

    def watch_index(self, index: PrefixIndex, num_mute: Callable[[], int]) -> None:
        self._registry.register(IndexCollector(self._model, index, num_mute))

    def watch_predictions(self, workers: Callable[[], Mapping[WorkerId, WorkerPredictionErrors]]) -> None:
        """Adds the prediction errors of every worker that is followed."""
        self._registry.register(PredictionCollector(self._model, workers))

    def watch_workers(self, loads: Callable[[], Mapping[WorkerId, WorkerLoad]]) -> None:
        """Adds the metrics that workers report with their load."""
        self._registry.register(WorkerMetricsCollector(self._model, loads))

    def watch_credentials(self, files: Callable[[], Sequence[LoadedFiles]]) -> None:
        """Adds the age of the keys and certificates that were read from files."""
        self._registry.register(CredentialCollector(self._model, files))

    def mispredicted(self, queue_s: float, prefill_s: float, transfer_s: float) -> None:
        """Observes by how much each of these stages of a completion was mispredicted."""
        self._errors_s.append((queue_s, prefill_s, transfer_s))
        if len(self._errors_s) >= _BATCH:
            self._fold_errors()

    def _fold_errors(self) -> None:
        if self._errors_s:
            values, self._errors_s = np.array(self._errors_s).ravel(), []
            observe_all(self._mispredicted, np.arange(len(values)) % len(self._mispredicted), values)

    def failed(self, reason: str) -> None:
        self._errors.labels(self._model, reason).inc()

    def limited(self, limit: str) -> None:
        self._limited.labels(self._model, limit).inc()

    def picked(self, how: str) -> None:
        self._picks.labels(self._model, how).inc()

    def traced(self, result: str, num_requests: int) -> None:
        self._traces.labels(self._model, result).inc(num_requests)

    def render(self) -> bytes:
        """Returns the text exposition format."""
        return self._render_others() + generate_latest(self._of_requests)

    async def render_aside(self) -> bytes:
        """Returns the text exposition format; renders the metrics of requests on a thread."""
        return self._render_others() + await asyncio.to_thread(generate_latest, self._of_requests)

    def _render_others(self) -> bytes:
        """Counts the requests that have ended, and renders every metric that is not about requests."""
        self.requests.fold()
        self._fold_errors()
        return generate_latest(self._registry)

    def _gauges(
        self, name: str, help_text: str, label: str, values: tuple[str, ...], read: Callable[[str], float]
    ) -> None:
        """Adds one gauge for each value of a label, read when Prometheus scrapes."""
        family = Gauge(f"penstock:{name}", help_text, [*_LABELS, label], registry=self._registry)
        for value in values:
            family.labels(self._model, value).set_function(functools.partial(read, value))
