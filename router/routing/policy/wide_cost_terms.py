"""Prices the ends of pairs for hundreds of workers at once. Pure.

Computes the same sums as `cost_terms` and `prices`, in the same order, but over columns instead of view by view. The
results are equal to the last bit, which a property test checks. Most requests are priced here; those with an adapter,
a pull, a temperature, pages in host memory or a requested explanation are priced view by view.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from penstock.config import KvAwareConfig
from penstock.scheduling.chunk_costs import costs_of_chunks
from router.routing.policy import prices
from router.routing.policy.cost_terms import End, EndCosts, PrefillContention, local_weights
from router.routing.policy.interface import PlacementDemand
from router.routing.policy.session_affinity import session_bonuses
from router.routing.policy.view_table import Figures, ViewTable

Floor = tuple[float, float, End, float]  # the end's cost over the fastest link, tie-breaker, end, bytes to transfer


def is_plain(demand: PlacementDemand) -> bool:
    """Returns whether this module covers all cost terms of the demand."""
    return not (demand.explain or demand.adapter or demand.host_tokens or demand.pull is not None)


@dataclass(frozen=True, slots=True)
class WideEnds:
    """All ends of one role as columns; `End` says what they mean."""

    views: ViewTable
    cost_s: Figures
    ties: Figures
    bonus_s: Figures
    compute_s: Figures
    surcharge_s: Figures
    uncached: Figures  # tokens of the request that each worker lacks

    def take(self, places: np.ndarray) -> list[End]:
        columns = (self.cost_s, self.ties, self.bonus_s, self.compute_s, self.surcharge_s)
        cost_s, ties, bonus_s, compute_s, surcharge_s = (column[places].tolist() for column in columns)
        return list(zip(cost_s, ties, self.views.pick(places.tolist()), bonus_s, compute_s, surcharge_s, strict=True))


class WideEndCosts:
    """Prices ends as `EndCosts` does, and shares its estimates of contention."""

    def __init__(self, weights: KvAwareConfig, costs: EndCosts) -> None:
        self._weights = weights
        self._contention = costs.contention
        self._local_contention = costs.local_contention

    def cheapest_prefill(
        self, demand: PlacementDemand, views: ViewTable, rng: random.Random, max_ends: int
    ) -> list[End]:
        """Returns the cheapest prefill ends, cheapest first."""
        if not len(views):
            return []
        cached = views.tokens(demand.cached_tokens)
        uncached = _uncached(demand, cached)
        compute_s = _compute_s(demand, views, uncached)
        delay_s = _delays_s(self._contention, demand, views, uncached, compute_s)
        bonus_s = np.array(session_bonuses(demand.session, views.ids, self._weights.affinity_s))
        if demand.replicate:
            lacks = 2 * cached < cached.max()
            bonus_s[lacks] += np.minimum(self._weights.replica_s, compute_s - compute_s.min())[lacks]
        ties = _ties(rng, len(views))
        weight = self._weights.contention_weight
        cost_s = views.columns.queue_s + compute_s + weight * delay_s - bonus_s
        ends = WideEnds(views, cost_s, ties, bonus_s, compute_s, (weight - 1.0) * delay_s, uncached)
        return ends.take(np.lexsort((ties, cost_s))[:max_ends])

    def decode(self, demand: PlacementDemand, views: ViewTable, rng: random.Random) -> WideEnds:
        """Prices decoding on each worker, excluding the transfer."""
        columns, weights = views.columns, self._weights
        output_tokens, num_tokens = demand.output_tokens * weights.decode_weight, demand.num_tokens
        num_slowed = prices.num_slowed_sequences(int(columns.num_requests.sum()), len(views))
        cost_s = output_tokens * (columns.token_price + num_tokens * (columns.decode_context_s * num_slowed))
        is_full = columns.num_requests >= columns.max_running
        uncached = _uncached(demand, views.tokens(demand.cached_tokens))
        for place in ((uncached > columns.free_tokens) | is_full).nonzero()[0].tolist():
            view = views[place]
            delay_s = weights.contention_weight * prices.page_delay_s(demand, view)
            cost_s[place] += prices.decode_queue_s(demand, view) + delay_s
        bonus_s = np.array(session_bonuses(demand.session, views.ids, self._weights.affinity_s))
        ties, nothing = _ties(rng, len(views)), np.zeros(len(views))
        return WideEnds(views, cost_s - bonus_s, ties, bonus_s, nothing, nothing, uncached)

    def cheapest_local(
        self, demand: PlacementDemand, ends: WideEnds, has_prefill: bool, tie_s: float
    ) -> list[tuple[float, End]]:
        """Returns the decode workers that compute the prompt themselves at the lowest total cost, and that cost.

        All within `tie_s` of the lowest cost are returned, in the order of the views. If there are prefill workers, a
        decode worker computes up to its `max_local_tokens`.
        """
        views, columns, uncached = ends.views, ends.views.columns, ends.uncached
        contention = self._local_contention
        waiting, weight = local_weights(self._weights, contention.num_waiting, has_prefill)
        contention.observe_share(_share_with_queue(views))
        num_requests, queued = columns.num_requests, columns.queued_tokens
        is_busy = (num_requests > 0) | (queued > 0)
        costs = costs_of_chunks(columns, uncached, demand.num_tokens - uncached, queued, is_busy)
        harm_s = costs.harm_s(weight * num_requests, waiting, columns.itl_target_s, np.minimum, np.maximum)
        total_s = ends.cost_s + costs.total_s + harm_s
        if has_prefill:
            total_s[columns.max_local_tokens < uncached] = np.inf
        least_s = total_s.min()
        if np.isinf(least_s):
            return []
        places = (total_s <= least_s + tie_s).nonzero()[0]
        return list(zip(total_s[places].tolist(), ends.take(places), strict=True))

    def cheapest_floors(self, demand: PlacementDemand, ends: WideEnds, max_ends: int) -> list[Floor]:
        """Returns the decode ends that are cheapest over the fastest link, cheapest first."""
        latency_s, byte_s = demand.links.fastest
        num_bytes = ends.uncached * demand.token_bytes
        floor_s = ends.cost_s + latency_s + num_bytes * byte_s
        order = np.lexsort((ends.ties, floor_s))[:max_ends]
        taken = ends.take(order)
        return [
            (floor, end[1], end, moved)
            for floor, end, moved in zip(floor_s[order].tolist(), taken, num_bytes[order].tolist(), strict=True)
        ]


def _delays_s(
    contention: PrefillContention, demand: PlacementDemand, views: ViewTable, uncached: Figures, compute_s: Figures
) -> Figures:
    """Returns the delays of waiting prompts, and learns from the queues."""
    waiting = contention.num_waiting
    contention.observe_share(_share_with_queue(views))
    if not waiting:
        return np.zeros(len(views))
    fastest = views[int(compute_s.argmin())]
    cost = fastest.costs.prefill
    context_s, token_s = cost.context_s / 2, cost.token_s + cost.context_s * demand.num_tokens
    like_s = -(-uncached // fastest.chunk_tokens) * cost.fixed_s + uncached * (token_s - uncached * context_s)
    delays_s: Figures = waiting * like_s
    return delays_s


def _share_with_queue(views: ViewTable) -> float:
    return np.count_nonzero(views.columns.queue_s > 0.0) / len(views)


def _uncached(demand: PlacementDemand, cached: Figures) -> Figures:
    """Returns the tokens that each worker must compute: at least the last one."""
    uncached: Figures = demand.num_tokens - cached
    uncached[uncached == 0] = 1
    return uncached


def _compute_s(demand: PlacementDemand, views: ViewTable, uncached: Figures) -> Figures:
    columns = views.columns
    steps = -(-uncached // columns.chunk_tokens)
    token_s = columns.prefill_token_s + columns.prefill_context_s * (demand.num_tokens - uncached / 2)
    seconds: Figures = steps * columns.prefill_fixed_s + uncached * token_s
    return seconds


def _ties(rng: random.Random, count: int) -> Figures:
    """Returns the same random tie-breakers as pricing view by view would take."""
    pick = rng.random
    return np.array([pick() for _ in range(count)])
