"""Prices a prompt's prefix that is pulled from another worker's cache instead of being computed. Pure.

A pull delays a prompt's start, beside the queue that it waits in anyway, and spares the worker the tokens that it
brings. With one, a worker without the prefix costs little more than its holder, so that load decides between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.types import WorkerId
from router.routing.policy.interface import DEFAULT_CHUNK_TOKENS, PlacementDemand, PlannedPull, WorkerView

_ADVANTAGE = 0.7  # a pull is counted on where it takes less than this share of the time to compute
_MIN_TOKENS = 512


def plan(demand: PlacementDemand, view: WorkerView) -> PlannedPull | None:
    """Returns what the worker would pull, or None where computing is about as fast."""
    offer = demand.pull
    if offer is None or view.worker_id == offer.source:
        return None
    tokens, held = min(offer.tokens, demand.num_tokens - 1), demand.cached_tokens.get(view.worker_id, 0)
    missing = tokens - held
    if missing < _MIN_TOKENS:
        return None
    compute_s = view.costs.prefill.prefill_s(missing, tokens, view.limits.chunk_tokens or DEFAULT_CHUNK_TOKENS)
    pull_s = offer.cost(offer.source, view.worker_id).transfer_s(missing * demand.token_bytes)
    return PlannedPull(offer.source, tokens, pull_s, compute_s) if pull_s < _ADVANTAGE * compute_s else None


def with_pulls(
    demand: PlacementDemand, views: Sequence[WorkerView]
) -> tuple[PlacementDemand, dict[WorkerId, PlannedPull]]:
    """Returns the demand as it is once every worker that gains from a pull has pulled, and these pulls."""
    if demand.pull is None:
        return demand, {}
    plans = {view.worker_id: found for view in views if (found := plan(demand, view)) is not None}
    return after(demand, plans), plans


def after(demand: PlacementDemand, plans: dict[WorkerId, PlannedPull]) -> PlacementDemand:
    """Returns the demand as it is once these workers have pulled."""
    if not plans:
        return demand
    pulled = {worker_id: each.tokens for worker_id, each in plans.items()}
    return replace(demand, cached_tokens={**demand.cached_tokens, **pulled})


def waits_s(views: Sequence[WorkerView], plans: dict[WorkerId, PlannedPull]) -> list[float]:
    """Returns for each view by how much its pull, if there is one, outlasts its queue."""
    if not plans:
        return [0.0] * len(views)
    return [
        max(0.0, found.pull_s - view.queue_s) if (found := plans.get(view.worker_id)) is not None else 0.0
        for view in views
    ]
