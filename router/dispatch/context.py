"""Composes and holds what all requests of a router share while they are dispatched."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.config import RouterConfig
from penstock.config.admission import TenantLimits
from penstock.errors import Cancelled, PenstockError
from penstock.types import WorkerId
from router.admission.gate import AdmissionGate
from router.dispatch.placement import Placer
from router.dispatch.running_requests import RunningRequests
from router.fleet.quarantine import Quarantine
from router.fleet.worker_fleet import WorkerFleet
from router.metrics.completion_counts import CompletionCounts
from router.metrics.demand_report import DemandCounter
from router.metrics.metrics import RouterMetrics
from router.routing.costs.predictions import WorkerPredictionErrors
from router.routing.policy.policies import make_policy
from router.tracing.request_trace import RequestTrace

if TYPE_CHECKING:
    from router.tracing.tracer import RequestTracer


@dataclass(frozen=True, slots=True)
class DispatchContext:
    config: RouterConfig
    fleet: WorkerFleet
    gate: AdmissionGate
    placer: Placer
    quarantine: Quarantine
    metrics: RouterMetrics
    demand: DemandCounter
    counts: CompletionCounts
    limits_of: Callable[[str], TenantLimits]  # by tenant
    running: RunningRequests
    tracer: RequestTracer | None = None  # None: no request is traced

    @contextlib.contextmanager
    def counting_errors(self, trace: RequestTrace | None = None) -> Iterator[None]:
        """Counts an error that leaves the block by its reason, and ends the request's trace with it.

        A caller that goes away counts as a cancellation.
        """
        try:
            yield
        except PenstockError as error:
            self._fail(error.reason, trace)
            raise
        except (GeneratorExit, asyncio.CancelledError):
            self._fail(Cancelled.reason, trace)
            raise

    def _fail(self, reason: str, trace: RequestTrace | None) -> None:
        self.metrics.failed(reason)
        if trace is not None:
            trace.fail(reason)


def make_context(
    config: RouterConfig,
    fleet: WorkerFleet,
    metrics: RouterMetrics,
    limits_of: Callable[[str], TenantLimits],
    tracer: RequestTracer | None = None,
) -> DispatchContext:
    """Composes what all requests share. `limits_of` returns a tenant's limits by its name."""
    policy = make_policy(config.policy, config)
    placer = Placer(fleet, policy, random.Random(), config.max_replicas, metrics.mispredicted, config.pull)
    gate = AdmissionGate(config, fleet, metrics.admission, random.Random(), limits_of)
    demand = DemandCounter(config.slo)
    counts = CompletionCounts(metrics, gate.retries, demand)

    def current_predictions() -> Mapping[WorkerId, WorkerPredictionErrors]:
        placer.predictions.keep({worker.worker_id for worker in fleet.followers})
        return placer.predictions.workers

    metrics.watch_predictions(current_predictions)
    return DispatchContext(
        config, fleet, gate, placer, Quarantine(), metrics, demand, counts, limits_of, RunningRequests(), tracer
    )
