"""Prices each end of a (prefill, decode) pair: every cost term of the kv-aware policy, weighted and summed. Pure.

The terms in seconds come from `prices`, their weights from `penstock.config.KvAwareConfig`. To add a cost term: compute
it here (or in `prices`, if other policies should be compared by it), add it to the sum of its end in `prefill`,
`decode` or `local_s` and to the same sum over columns in `wide_ends`, add its weight to KvAwareConfig, and test it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from penstock.config import KvAwareConfig
from penstock.scheduling.queue_length import QueueLength
from router.routing.policy import prices, pulls
from router.routing.policy.interface import PlacementDemand, WorkerView
from router.routing.policy.rendezvous import preferred

# Cost in seconds, a random tie-breaker, the worker, the bonus subtracted from the cost, and the seconds to compute the
# prompt there (0 for decode workers). A plain tuple: one is made for every worker of every request.
End = tuple[float, float, WorkerView, float, float]


DEFAULT_WEIGHTS = KvAwareConfig()


class PrefillContention:
    """Estimates how many prompts wait behind the one that a prefill worker computes.

    The cheapest worker for one request is often not the cheapest for all: if it computes what another has cached, it
    delays whatever is sent there next. While nothing waits this costs nothing; the fuller the queues are, the more a
    cached prefix is worth. docs/lab-notes/ shows what this term gains.
    """

    def __init__(self) -> None:
        self._queue = QueueLength()

    @property
    def num_waiting(self) -> float:
        """The mean queue length, including the prompt in service."""
        return self._queue.num_prompts

    def observe(self, views: Sequence[WorkerView]) -> None:
        """Learns from the queues that a request finds."""
        self.observe_share(sum([view.queue_s > 0.0 for view in views]) / len(views))

    def observe_share(self, share: float) -> None:
        """Learns from the share of workers with a queue that a request finds."""
        self._queue.observe(share)

    def delays_s(
        self, demand: PlacementDemand, views: Sequence[WorkerView], computes_s: Sequence[float]
    ) -> list[float]:
        """Returns, for each view, how long waiting prompts are delayed if this one is computed there.

        All are priced by the costs of one worker, the fastest: otherwise a small error in the learned costs of a worker
        would count several times and drive work away from it although no cache is gained.
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
        self.contention = PrefillContention()

    def prefill(self, demand: PlacementDemand, views: Sequence[WorkerView], rng: random.Random) -> list[End]:
        """Prices prefill workers by the time until they have computed the prompt and the delay of those behind it.

        Returns them cheapest first.
        """
        if not views:
            return []
        pulled, plans = pulls.with_pulls(demand, views)
        computes = prices.all_prefill_s(pulled, views)
        delays = self._weighted_delays(pulled, views, computes)
        waits = [
            wait_s + load_s
            for wait_s, load_s in zip(pulls.waits_s(views, plans), prices.adapter_waits_s(demand, views), strict=True)
        ]
        bonuses = self._session_bonuses(demand, views)
        if demand.replicate:
            self._add_replica_bonuses(demand, views, computes, bonuses)
        tie_breaker = rng.random
        return sorted(
            (view.queue_s + wait_s + compute_s + delay_s - bonus_s, tie_breaker(), view, bonus_s, compute_s)
            for view, wait_s, compute_s, delay_s, bonus_s in zip(views, waits, computes, delays, bonuses, strict=True)
        )

    def decode(self, demand: PlacementDemand, views: Sequence[WorkerView], rng: random.Random) -> list[End]:
        """Prices decoding on each worker, and the delay of those that wait there for pages.

        The transfer belongs to the pair and is not included.
        """
        tie_breaker = rng.random
        weights = self._weights
        costs = prices.all_decode_s(demand, views, weights.decode_weight, weights.contention_weight)
        bonuses = self._session_bonuses(demand, views)
        loads = prices.adapter_waits_s(demand, views)
        return [
            (cost_s + load_s - bonus_s, tie_breaker(), view, bonus_s, 0.0)
            for view, cost_s, bonus_s, load_s in zip(views, costs, bonuses, loads, strict=True)
        ]

    def local_s(self, demand: PlacementDemand, ends: Sequence[End], has_prefill: bool) -> list[float]:
        """Returns the total cost of each decode end that computes the prompt itself.

        Its chunks delay every sequence that decodes there. The prompts waiting behind it count only if there are no
        prefill workers to send them to.
        """
        views = [end[2] for end in ends]
        pulled, plans = pulls.with_pulls(demand, views)
        computes = prices.all_prefill_s(pulled, views)
        delays = [0.0] * len(views) if has_prefill else self._weighted_delays(pulled, views, computes)
        waits = pulls.waits_s(views, plans)
        decode_weight = self._weights.decode_weight
        return [
            cost_s + view.queue_s + wait_s + compute_s + delay_s + decode_weight * view.num_requests * compute_s
            for (cost_s, _, view, _, _), wait_s, compute_s, delay_s in zip(ends, waits, computes, delays, strict=True)
        ]

    def _weighted_delays(
        self, demand: PlacementDemand, views: Sequence[WorkerView], computes: Sequence[float]
    ) -> list[float]:
        delays = self.contention.delays_s(demand, views, computes)
        self.contention.observe(views)
        weight = self._weights.contention_weight
        return [weight * delay_s for delay_s in delays]

    def _session_bonuses(self, demand: PlacementDemand, views: Sequence[WorkerView]) -> list[float]:
        """Makes the session's worker cheaper: others serve the session only when it costs this much more."""
        bonuses = [0.0] * len(views)
        if demand.session and views:
            bonuses[preferred(demand.session.encode(), [view.worker_id for view in views])] = self._weights.affinity_s
        return bonuses

    def _add_replica_bonuses(
        self, demand: PlacementDemand, views: Sequence[WorkerView], computes: list[float], bonuses: list[float]
    ) -> None:
        """Makes workers without the prefix cheaper by the time to compute it, up to `replica_s`.

        The request leaves a copy there that serves others.
        """
        cached = [demand.cached_tokens.get(view.worker_id, 0) for view in views]
        most, least_s = max(cached), min(computes)
        for position, tokens in enumerate(cached):
            if 2 * tokens < most:
                bonuses[position] += min(self._weights.replica_s, computes[position] - least_s)
