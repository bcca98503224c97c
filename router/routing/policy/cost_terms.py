"""Prices each end of a (prefill, decode) pair: every cost term of the kv-aware policy, weighted and summed. Pure.

The terms, in seconds, come from `prices`; their weights come from `penstock.config.KvAwareConfig`. To add a cost term,
compute it here (or in `prices`, if it also prices the choices of other policies), add it to the sum in `prefill`,
`decode` or `local_s` and to the same sum over columns in `wide_cost_terms`, add its weight to KvAwareConfig, and test
it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from penstock.config import KvAwareConfig
from penstock.scheduling.prompt_harm import QueueLength
from router.routing.policy import prices, pulls
from router.routing.policy.interface import PlacementDemand, WorkerView
from router.routing.policy.session_affinity import session_bonuses

# Cost in seconds, a random tie-breaker, the worker, the bonus already subtracted from the cost, the seconds that the
# worker takes to compute the prompt, and what the contention weight adds to the cost beyond the delay itself (both are
# 0 for decode workers). A plain tuple: every request makes one per worker.
End = tuple[float, float, WorkerView, float, float, float]


DEFAULT_WEIGHTS = KvAwareConfig()


def local_weights(weights: KvAwareConfig, num_waiting: float, has_prefill: bool) -> tuple[float, float]:
    """Returns what the delays count that a decode worker causes if it computes a prompt: that of the waiting prompts
    altogether, and that of each running sequence.

    A worker that may choose a prefill worker instead weighs neither.
    """
    return (num_waiting, 1.0) if has_prefill else (weights.contention_weight * num_waiting, weights.decode_weight)


class PrefillContention:
    """Estimates how many prompts wait behind the one that a worker computes.

    The cheapest worker for one request is often not the cheapest for all: a worker that computes what another has
    cached delays the prompts behind this one. While nothing waits the delay costs nothing; the longer the queues, the
    more a cached prefix is worth. docs/lab-notes/ shows what this term gains.
    """

    def __init__(self) -> None:
        self._queue = QueueLength()

    @property
    def num_waiting(self) -> float:
        """The mean queue length, including the prompt in service."""
        return self._queue.num_prompts

    def observe(self, views: Sequence[WorkerView]) -> None:
        """Learns from the queues at a request's arrival."""
        self.observe_share(sum([view.queue_s > 0.0 for view in views]) / len(views))

    def observe_share(self, share: float) -> None:
        """Learns from the share of workers that have a queue at a request's arrival."""
        self._queue.observe(share)

    def delays_s(
        self, demand: PlacementDemand, views: Sequence[WorkerView], computes_s: Sequence[float]
    ) -> list[float]:
        """Returns, for each view, how long waiting prompts are delayed if that worker computes this one.

        The costs of the fastest worker price all of them. Otherwise a small error in a worker's learned costs would
        count several times and drive work away from it, to workers that have no more of the prompt cached.
        """
        waiting = self.num_waiting
        if not waiting:
            return [0.0] * len(views)
        fastest = views[computes_s.index(min(computes_s))]
        return [waiting * compute_s for compute_s in prices.all_prefill_like_s(demand, views, fastest)]


class EndCosts:
    """Sums the weighted cost terms of prefill ends, decode ends, and decode workers that compute the prompt."""

    def __init__(self, weights: KvAwareConfig) -> None:
        self._weights = weights
        self.contention = PrefillContention()  # at prefill workers
        self.local_contention = PrefillContention()  # at decode workers

    def prefill(self, demand: PlacementDemand, views: Sequence[WorkerView], rng: random.Random) -> list[End]:
        """Prices prefill workers by the time until the prompt is computed and the delay of the prompts behind it.

        Returns them cheapest first.
        """
        if not views:
            return []
        pulled, plans = pulls.with_pulls(demand, views)
        computes = prices.all_prefill_s(pulled, views)
        delays = _delays_s(self.contention, pulled, views, computes)
        weight = self._weights.contention_weight
        waits = [
            wait_s + load_s
            for wait_s, load_s in zip(pulls.waits_s(views, plans), prices.adapter_waits_s(demand, views), strict=True)
        ]
        bonuses = session_bonuses(demand.session, [view.worker_id for view in views], self._weights.affinity_s)
        if demand.replicate:
            self._add_replica_bonuses(demand, views, computes, bonuses)
        tie_breaker = rng.random
        return sorted(
            (
                view.queue_s + wait_s + compute_s + weight * delay_s - bonus_s,
                tie_breaker(),
                view,
                bonus_s,
                compute_s,
                (weight - 1.0) * delay_s,
            )
            for view, wait_s, compute_s, delay_s, bonus_s in zip(views, waits, computes, delays, bonuses, strict=True)
        )

    def decode(self, demand: PlacementDemand, views: Sequence[WorkerView], rng: random.Random) -> list[End]:
        """Prices decoding on each worker, and the delay of the requests that wait for pages on it.

        Excludes the transfer, whose cost depends on both ends.
        """
        tie_breaker = rng.random
        weights = self._weights
        costs = prices.all_decode_s(demand, views, weights.decode_weight, weights.contention_weight)
        bonuses = session_bonuses(demand.session, [view.worker_id for view in views], self._weights.affinity_s)
        loads = prices.adapter_waits_s(demand, views)
        return [
            (cost_s + load_s - bonus_s, tie_breaker(), view, bonus_s, 0.0, 0.0)
            for view, cost_s, bonus_s, load_s in zip(views, costs, bonuses, loads, strict=True)
        ]

    def local_s(self, demand: PlacementDemand, ends: Sequence[End], has_prefill: bool) -> list[float]:
        """Returns the total cost of each decode end if it computes the prompt itself.

        Includes the delay of every sequence that the worker decodes and of the prompts that wait behind this one.
        """
        views = [end[2] for end in ends]
        pulled, plans = pulls.with_pulls(demand, views)
        waiting, weight = local_weights(self._weights, self.local_contention.num_waiting, has_prefill)
        self.local_contention.observe(views)
        waits, computes = pulls.waits_s(views, plans), prices.all_local(pulled, views)
        return [
            end[0]
            + wait_s
            + costs.total_s
            + costs.harm_s(weight * view.num_requests, waiting, view.limits.itl_target_s)
            for end, view, wait_s, costs in zip(ends, views, waits, computes, strict=True)
        ]

    def _add_replica_bonuses(
        self, demand: PlacementDemand, views: Sequence[WorkerView], computes: list[float], bonuses: list[float]
    ) -> None:
        """Makes workers without the prefix cheaper by the extra time to compute it, up to `replica_s`.

        The request then leaves a copy of the prefix on one of them, which serves later requests.
        """
        cached = [demand.cached_tokens.get(view.worker_id, 0) for view in views]
        most, least_s = max(cached), min(computes)
        for position, tokens in enumerate(cached):
            if 2 * tokens < most:
                bonuses[position] += min(self._weights.replica_s, computes[position] - least_s)


def _delays_s(
    contention: PrefillContention, demand: PlacementDemand, views: Sequence[WorkerView], computes: Sequence[float]
) -> list[float]:
    """Returns the delays of waiting prompts, and learns from the queues."""
    delays = contention.delays_s(demand, views, computes)
    contention.observe(views)
    return delays
