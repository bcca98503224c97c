"""Measures the lag of the router's event loop: how long a computation that does not yield delays everything else.

A timer is due every 20 ms. If a computation is running then, the timer fires when it ends, so a computation of P ms
is measured as at least P - 20 ms of lag.
"""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, Gauge

from penstock.metrics.families import HistogramFamily

_INTERVAL_S = 0.02
_LAG_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class LoopLag:
    """Measures between `start` and `stop`. Both must be called on the event loop."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._model = model
        self._registry = registry
        family = HistogramFamily(
            "penstock:router_loop_lag_seconds",
            "Lateness of a timer of the router's event loop, measured every 20 ms",
            ["model_name"],
            _LAG_S,
            registry,
        )
        self._lag_s = family.bind(model)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        tasks = Gauge(
            "penstock:router_tasks", "Tasks on the router's event loop", ["model_name"], registry=self._registry
        )
        tasks.labels(self._model).set_function(lambda: len(asyncio.all_tasks(loop)))
        self._schedule(loop)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        due_s = loop.time() + _INTERVAL_S
        self._timer = loop.call_at(due_s, self._observe, loop, due_s)

    def _observe(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        self._lag_s.observe(max(0.0, loop.time() - due_s))
        self._schedule(loop)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
