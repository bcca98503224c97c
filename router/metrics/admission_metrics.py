"""Counts admission's waits and refusals by lane and tokens by tenant; reads the gate's state at each scrape."""

from __future__ import annotations

import functools
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge

from penstock.metrics.families import BoundCounter, CounterFamily, HistogramFamily
from penstock.types import Lane

_WAIT_S = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class AdmissionMetrics:
    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry = registry
        self._model = model
        waits = HistogramFamily(
            "penstock:admission_wait_seconds",
            "Time that dispatched requests spent in the router's queue",
            ["model_name", "lane"],
            _WAIT_S,
            registry,
        )
        self._waits = {lane.value: waits.bind(model, lane.value) for lane in Lane}  # enums are slow to hash
        self._refusals = CounterFamily(
            "penstock:admission_refusals",
            "Requests refused on arrival or dropped from the queue, by reason (shed: at random, if enabled)",
            ["model_name", "lane", "reason"],
            registry,
        )
        self._spent: dict[str, BoundCounter] = {}  # by tenant
        self._tokens = CounterFamily(
            "penstock:tenant_tokens",
            "Prompt and output tokens that count against a tenant's rate",
            ["model_name", "tenant"],
            registry,
        )

    def passed(self, lane: Lane, waited_s: float) -> None:
        self._waits[lane._value_].defer(waited_s)

    def refused(self, lane: Lane, reason: str) -> None:
        self._refusals.bind(self._model, lane.value, str(reason)).inc()

    def spent(self, tenant: str, num_tokens: int) -> None:
        if (series := self._spent.get(tenant)) is None:
            series = self._spent[tenant] = self._tokens.bind(self._model, tenant)
        series.value += num_tokens

    def fold(self, at_least: int = 1) -> None:
        """Observes the waits of a lane that have not been counted yet, if there are so many. Call it before rendering
        the metrics."""
        for series in self._waits.values():
            series.fold(at_least)

    def watch(
        self,
        *,
        num_waiting: Callable[[Lane], float],
        queue_bytes: Callable[[Lane], float],
        num_out: Callable[[], float],
        saturation: Callable[[], float],
        level: Callable[[], float],
        retries_left: Callable[[], float],
    ) -> None:
        """Adds gauges whose values are read when Prometheus scrapes."""
        for name, help_text, read in (
            ("queue_depth", "Requests queued in the router", num_waiting),
            ("queue_bytes", "Estimated memory of the requests queued in the router", queue_bytes),
        ):
            gauge = Gauge(f"penstock:admission_{name}", help_text, ["model_name", "lane"], registry=self._registry)
            for lane in Lane:
                gauge.labels(self._model, lane.value).set_function(functools.partial(read, lane))
        for name, help_text, value in (
            ("admission_requests_out", "Requests that this router has in flight at the workers", num_out),
            ("saturation", "How full the deployment is; at 1, a new request waits its lane's target time", saturation),
            ("overload_level", "0 normal, 1 outputs shortened, 2 no bulk queued, 3 only interactive queued", level),
            ("retries_left", "Re-dispatches that the retry budget currently allows", retries_left),
        ):
            gauge = Gauge(f"penstock:{name}", help_text, ["model_name"], registry=self._registry)
            gauge.labels(self._model).set_function(value)
