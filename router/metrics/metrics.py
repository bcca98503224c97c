"""Holds one router's metrics. They use vLLM's names where vLLM has the metric, so that its dashboards work."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from penstock.config.autoscaler import SloConfig
from penstock.metrics.families import HistogramFamily, observe_all
from penstock.types import Role, WorkerEnd, WorkerId, WorkerLoad
from router.metrics.admission_metrics import AdmissionMetrics
from router.metrics.collectors import (
    CredentialCollector,
    IndexCollector,
    LoadedFiles,
    PredictionCollector,
    WorkerMetricsCollector,
)
from router.metrics.loop_lag import LoopLag
from router.metrics.recent_requests import RecentRequests
from router.metrics.request_metrics import BATCH, RequestMetrics
from router.routing.costs.predictions import WorkerPredictionErrors
from router.routing.index.prefix_index import PrefixIndex

_DEFAULT_SLO = SloConfig()
_LABELS = ["model_name"]
_INTERVAL_S = 0.1  # so many completions are read at once that the code is in the processor's caches
_ERROR_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)


class RouterMetrics:
    """Owns the registries. Serving a request updates `requests` and `admission`; all other metrics are updated rarely
    or read when Prometheus scrapes.
    """

    def __init__(self, model: str, tenant_labels: int = 0, slo: SloConfig = _DEFAULT_SLO) -> None:
        self._model = model
        self._registry = registry = CollectorRegistry()
        self._request_registry = CollectorRegistry()  # renders to 100,000 lines if tenants have labels
        self._errors = Counter("vllm:request_errors", "Requests failed", [*_LABELS, "reason"], registry=registry)
        self._http_errors = Counter(
            "penstock:http_errors",
            "HTTP calls answered with an error before a stream began, also those that never became requests",
            [*_LABELS, "reason"],
            registry=registry,
        )
        self._limited = Counter(
            "penstock:limited",
            "Connections and streams that a limit refused or ended, by the limit's key in router.limits",
            [*_LABELS, "limit"],
            registry=registry,
        )
        self._picks = Counter(
            "penstock:endpoint_picks",
            "Gateway calls by answer: placed by prompt, placed by load, or refused; fallback: an endpoint other than "
            "the picked one served the call",
            [*_LABELS, "how"],
            registry=registry,
        )
        self._traces = Counter(
            "penstock:traces",
            "Sampled requests by what became of their trace: exported, failed at the collector, dropped from the queue",
            [*_LABELS, "result"],
            registry=registry,
        )
        self.requests = RequestMetrics(self._request_registry, model, slo, tenant_labels)
        self.admission = AdmissionMetrics(registry, model)
        self.recent = RecentRequests()
        self.loop_lag = LoopLag(registry, model)
        self._catching_up: asyncio.TimerHandle | None = None
        errors = HistogramFamily(
            "penstock:prediction_error_seconds",
            "Absolute difference between a stage's actual and predicted time",
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
            ("vllm:num_requests_running", "Sequences that are decoding, as the workers report", num_running),
            (
                "vllm:num_requests_waiting",
                "Requests queued in the router and sequences waiting at the workers",
                num_waiting,
            ),
            ("vllm:kv_cache_usage_perc", "Share of the decode workers' pages in use, 0 to 1", cache_usage),
            ("penstock:open_circuits", "Workers and links that the router avoids after recent failures", open_circuits),
        ):
            Gauge(name, help_text, _LABELS, registry=self._registry).labels(self._model).set_function(value)
        roles = tuple(role.value for role in Role)
        self._gauges("workers", "Workers that can serve a request now", "role", roles, lambda r: num_workers(Role(r)))
        self._gauges(
            "prefix_cache_tier_hits",
            "Prompt pages found on a tier, summed over the current workers since each of them started",
            "tier",
            ("device", "host", "disk"),
            tier_hits,
        )

    def watch_spares(self, count: Callable[[str], float]) -> None:
        """Adds a gauge of each pool's warm spares. `count` takes a pool's role."""
        help_text = "Warm spares that can become workers of the pool, as the controller reports"
        self._gauges("warm_spares", help_text, "pool", tuple(role.value for role in Role), count)

    def watch_ends(self, count: Callable[[str], float]) -> None:
        """Adds a gauge of ended workers by how they ended, which distinguishes planned ends from failures."""
        help_text = "Workers that ended since the controller started, as the controller reports"
        self._gauges("worker_ends", help_text, "how", tuple(end.value for end in WorkerEnd), count)

    def watch_index(self, index: PrefixIndex, num_mute: Callable[[], int]) -> None:
        self._registry.register(IndexCollector(self._model, index, num_mute))

    def watch_predictions(self, workers: Callable[[], Mapping[WorkerId, WorkerPredictionErrors]]) -> None:
        """Adds the prediction errors of every followed worker."""
        self._registry.register(PredictionCollector(self._model, workers))

    def watch_workers(self, loads: Callable[[], Mapping[WorkerId, WorkerLoad]]) -> None:
        """Adds the metrics that workers report with their load."""
        self._registry.register(WorkerMetricsCollector(self._model, loads))

    def watch_credentials(self, files: Callable[[], Sequence[LoadedFiles]]) -> None:
        """Adds the age of the keys and certificates that were read from files."""
        self._registry.register(CredentialCollector(self._model, files))

    def mispredicted(self, queue_s: float, prefill_s: float, transfer_s: float) -> None:
        """Observes by how much the queue, prefill and transfer times of a completion were mispredicted."""
        self._errors_s.append((queue_s, prefill_s, transfer_s))

    def _fold_errors(self, at_least: int = 1) -> None:
        if len(self._errors_s) >= at_least:
            values, self._errors_s = np.array(self._errors_s).ravel(), []
            observe_all(self._mispredicted, np.arange(len(values)) % len(self._mispredicted), values)

    def failed(self, reason: str) -> None:
        self._errors.labels(self._model, reason).inc()

    def answered_error(self, reason: str) -> None:
        """Counts an HTTP call that was answered with an error. Reasons must be few."""
        self._http_errors.labels(self._model, reason).inc()

    def limited(self, limit: str) -> None:
        self._limited.labels(self._model, limit).inc()

    def picked(self, how: str) -> None:
        self._picks.labels(self._model, how).inc()

    def traced(self, result: str, num_requests: int) -> None:
        self._traces.labels(self._model, result).inc(num_requests)

    def start(self) -> None:
        """Begins to count events every 100 ms, and to measure the event loop's lag. Call it on the event loop."""
        self.loop_lag.start()
        self._keep_up(asyncio.get_running_loop())

    def stop(self) -> None:
        self.loop_lag.stop()
        if self._catching_up is not None:
            self._catching_up.cancel()
            self._catching_up = None

    def _keep_up(self, loop: asyncio.AbstractEventLoop) -> None:
        self._catching_up = loop.call_later(_INTERVAL_S, self._keep_up, loop)
        self.catch_up()

    def catch_up(self) -> None:
        """Releases what ended completions hold, and counts events that have become many."""
        self.requests.catch_up()
        self.recent.catch_up()
        self.admission.fold(BATCH)
        self._fold_errors(BATCH)

    def render(self) -> bytes:
        """Returns the text exposition format."""
        return self._render_others() + generate_latest(self._request_registry)

    async def render_aside(self) -> bytes:
        """Returns the text exposition format; renders the request metrics on a thread, since they can be large."""
        return self._render_others() + await asyncio.to_thread(generate_latest, self._request_registry)

    def _render_others(self) -> bytes:
        """Folds all deferred values into the metrics and renders those that are not request metrics."""
        self.requests.fold()
        self.admission.fold()
        self._fold_errors()
        return generate_latest(self._registry)

    def _gauges(
        self, name: str, help_text: str, label: str, values: tuple[str, ...], read: Callable[[str], float]
    ) -> None:
        """Adds one gauge for each value of a label, read when Prometheus scrapes."""
        family = Gauge(f"penstock:{name}", help_text, [*_LABELS, label], registry=self._registry)
        for value in values:
            family.labels(self._model, value).set_function(functools.partial(read, value))
