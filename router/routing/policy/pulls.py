"""Prices pulling a prompt's prefix from another worker's cache instead of computing it. Pure.

A pull that is fast enough to be planned here delays the prompt's start and saves the worker from computing the pulled
tokens; if it turns out to be slow, the worker computes the prompt's beginning meanwhile. With a pull, a worker without
the prefix costs little more than its holder, so load decides between them. In a full cache, the pages that a pull
brings evict others, which have to be computed again; that time counts too. The worker decides in the end
(`worker.pull.policy`), among the sources that routers name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.types import CacheStats, WorkerId
from router.routing.costs.pull_costs import MIN_TOKENS
from router.routing.policy.interface import (
    DEFAULT_CHUNK_TOKENS,
    PlacementDemand,
    PlannedPull,
    PullOffer,
    WorkerView,
)

_ADVANTAGE = 0.2  # a pull is planned if it costs less than this share of the compute time (2026-11-28)


def plan(demand: PlacementDemand, view: WorkerView) -> PlannedPull | None:
    """Returns what the worker would pull, or None if pulling would gain too little."""
    return None if demand.pull is None else _plans(demand, demand.pull, (view,)).get(view.worker_id)


def with_pulls(
    demand: PlacementDemand, views: Sequence[WorkerView]
) -> tuple[PlacementDemand, dict[WorkerId, PlannedPull]]:
    """Returns the demand as it stands after every worker that gains from a pull has pulled, and these pulls."""
    if demand.pull is None:
        return demand, {}
    plans = _plans(demand, demand.pull, views)
    return after(demand, plans), plans


def _plans(demand: PlacementDemand, offer: PullOffer, views: Sequence[WorkerView]) -> dict[WorkerId, PlannedPull]:
    """Returns the pull of each worker that gains from one. Inlined, like `prices.all_prefill_s`."""
    source, link, cached, token_bytes = offer.source, offer.cost, demand.cached_tokens.get, demand.token_bytes
    tokens = min(offer.tokens, demand.num_tokens - 1)
    found: dict[WorkerId, PlannedPull] = {}
    for view in views:
        worker_id = view.worker_id
        missing = tokens - cached(worker_id, 0)
        if missing < MIN_TOKENS or worker_id == source:
            continue
        fixed_s, token_s, context_s = view.costs.prefill
        steps = -(-missing // (view.limits.chunk_tokens or DEFAULT_CHUNK_TOKENS))
        compute_s = steps * fixed_s + missing * (token_s + context_s * (tokens - missing / 2))
        latency_s, byte_s = link(source, worker_id)
        pull_s = latency_s + missing * token_bytes * byte_s
        if pull_s < (_ADVANTAGE - _evicted_share(view.load.cache)) * compute_s:
            found[worker_id] = PlannedPull(source, tokens, pull_s, compute_s)
    return found


def _evicted_share(cache: CacheStats) -> float:
    """Returns which share of the tokens that a pull brings must be computed again because of what it evicts.

    A cache that has evicted is full: each new page evicts another one, which would be used again as often as a page
    that is looked up is found.
    """
    return cache.num_hits / max(1, cache.queries) if cache.evictions else 0.0


def after(demand: PlacementDemand, plans: dict[WorkerId, PlannedPull]) -> PlacementDemand:
    """Returns the demand as it stands after these pulls: what is pulled counts as cached."""
    if not plans:
        return demand
    pulled = {worker_id: each.tokens for worker_id, each in plans.items()}
    return replace(demand, cached_tokens={**demand.cached_tokens, **pulled})


def waits_s(views: Sequence[WorkerView], plans: dict[WorkerId, PlannedPull]) -> list[float]:
    """Returns how long a prompt waits on each worker for its pull; 0 without a pull."""
    if not plans:
        return [0.0] * len(views)
    return [found.pull_s if (found := plans.get(view.worker_id)) is not None else 0.0 for view in views]
