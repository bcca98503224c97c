"""What the gate counts: waits and refusals by lane, tokens by tenant; and its state, for whoever scrapes."""

from __future__ import annotations

import functools
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from penstock.types import Lane

_WAIT_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class AdmissionMetrics:
    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry = registry
        self._model = model
        waits = Histogram(
            "penstock:admission_wait_seconds",
            "In the router's queue, of requests that went to the workers",
            ["model_name", "lane"],
            buckets=_WAIT_S,
            registry=registry,
        )
        self._waits = {lane: waits.labels(model, lane.value) for lane in Lane}
        self._refusals = Counter(
            "penstock:admission_refusals",
            "Requests refused, or given up in the queue; shed is at random under load",
            ["model_name", "lane", "reason"],
            registry=registry,
        )
        self._tokens = Counter(
            "penstock:tenant_tokens",
            "Prompt and output tokens that count against a tenant's rate",
            ["model_name", "tenant"],
            registry=registry,
        )

    def passed(self, lane: Lane, waited_s: float) -> None:
        self._waits[lane].observe(waited_s)

    def refused(self, lane: Lane, reason: str) -> None:
        self._refusals.labels(self._model, lane.value, str(reason)).inc()

    def spent(self, tenant: str, num_tokens: int) -> None:
        self._tokens.labels(self._model, tenant).inc(num_tokens)

    def watch(
        self,
        *,
        num_waiting: Callable[[Lane], float],
        num_out: Callable[[], float],
        saturation: Callable[[], float],
        level: Callable[[], float],
        retries_left: Callable[[], float],
    ) -> None:
        depth = Gauge(
            "penstock:admission_queue_depth",
            "Requests waiting in the router",
            ["model_name", "lane"],
            registry=self._registry,
        )
        for lane in Lane:
            depth.labels(self._model, lane.value).set_function(functools.partial(num_waiting, lane))
        for name, help_text, value in (
            ("admission_requests_out", "Requests of this router at the workers", num_out),
            ("saturation", "How full the deployment is; 1: newcomers would wait as long as they may", saturation),
            ("overload_level", "0 normal, 1 answers shortened, 2 bulk paused, 3 only interactive may wait", level),
            ("retries_left", "Re-dispatches that the retry budget allows now", retries_left),
        ):
            gauge = Gauge(f"penstock:{name}", help_text, ["model_name"], registry=self._registry)
            gauge.labels(self._model).set_function(value)
