"""Names all policies, and defines the simple ones that the kv-aware policy is compared with. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from penstock.config import KvAwareConfig
from router.routing.policy import prices
from router.routing.policy.cost_terms import DEFAULT_WEIGHTS
from router.routing.policy.interface import (
    MAX_CANDIDATES,
    PairChoice,
    PlacementDemand,
    PlacementPolicy,
    PrefillEstimate,
    WorkerView,
)
from router.routing.policy.kv_aware import KvAwarePolicy
from router.routing.policy.rendezvous import order

_MAX_OVER_MEAN = 1.25  # times the mean load; above it, a worker's keys go to the next worker


class LeastLoadedPolicy:
    """Chooses the decode worker with the fewest requests and the prefill worker with the fewest queued tokens.

    Ignores caches.
    """

    def choose(
        self, demand: PlacementDemand, decode: Sequence[WorkerView], prefill: Sequence[WorkerView], rng: random.Random
    ) -> PairChoice:
        by_requests = sorted(rng.sample(list(decode), len(decode)), key=_num_requests)
        by_queue = sorted(rng.sample(list(prefill), len(prefill)), key=_num_queued_tokens)
        return _choice(demand, by_requests[0], by_queue)


class RoundRobinPolicy:
    """Chooses workers in turn, in order of worker id."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(
        self, demand: PlacementDemand, decode: Sequence[WorkerView], prefill: Sequence[WorkerView], rng: random.Random
    ) -> PairChoice:
        turn = self._turn
        self._turn += 1
        decode, prefill = _by_id(decode), _by_id(prefill)
        start = turn % len(prefill) if prefill else 0
        return _choice(demand, decode[turn % len(decode)], [*prefill[start:], *prefill[:start]])


class RandomPolicy:
    """Chooses uniformly at random."""

    def choose(
        self, demand: PlacementDemand, decode: Sequence[WorkerView], prefill: Sequence[WorkerView], rng: random.Random
    ) -> PairChoice:
        return _choice(demand, rng.choice(list(decode)), rng.sample(list(prefill), len(prefill)))


class ConsistentHashPolicy:
    """Keeps a session, or else a prompt's prefix, on its workers while they have no more than a fair load.

    Consistent hashing with bounded loads (Mirrokni et al., 2016). Needs no KV events. A prompt shorter than a page,
    without a session, goes anywhere.
    """

    def choose(
        self, demand: PlacementDemand, decode: Sequence[WorkerView], prefill: Sequence[WorkerView], rng: random.Random
    ) -> PairChoice:
        key = demand.session.encode() or demand.prefix or rng.randbytes(8)
        ranked = _bounded(key, decode, _num_requests)
        return _choice(demand, ranked[0], _bounded(key, prefill, _num_queued_tokens))


def make_policy(name: str, weights: KvAwareConfig = DEFAULT_WEIGHTS) -> PlacementPolicy:
    """Makes the policy that `name`, a value of RouterConfig's `policy`, selects. Only kv-aware uses `weights`."""
    policies: dict[str, Callable[[], PlacementPolicy]] = {
        "kv-aware": lambda: KvAwarePolicy(weights),
        "least-loaded": LeastLoadedPolicy,
        "round-robin": RoundRobinPolicy,
        "random": RandomPolicy,
        "consistent-hash": ConsistentHashPolicy,
    }
    return policies[name]()


def _choice(demand: PlacementDemand, decode: WorkerView, ranked: Sequence[WorkerView]) -> PairChoice:
    """Returns a choice in which the first of `ranked` computes the prompt, or the decode worker if it is empty."""
    first = ranked[0] if ranked else None
    score = prices.price(demand, decode, first)
    return PairChoice(
        decode.worker_id,
        tuple(
            PrefillEstimate(
                view.worker_id,
                view.queue_s,
                prices.prefill_s(demand, view),
                demand.cached_tokens.get(view.worker_id, 0),
            )
            for view in ranked[:MAX_CANDIDATES]
        ),
        demand.uncached_on((first or decode).worker_id),
        score,
        (score,) if demand.explain else (),
    )


def _bounded(key: bytes, views: Sequence[WorkerView], load: Callable[[WorkerView], int]) -> list[WorkerView]:
    """Returns the workers in the key's order, but those with more than their share of the load last."""
    ranked = [views[position] for position in order(key, [view.worker_id for view in views])]
    limit = _MAX_OVER_MEAN * (sum(map(load, ranked)) + 1) / max(1, len(ranked))
    return sorted(ranked, key=lambda view: load(view) > limit)


def _num_requests(view: WorkerView) -> int:
    return view.num_requests


def _num_queued_tokens(view: WorkerView) -> int:
    return view.load.queued_prefill_tokens + view.sent.prefill_tokens


def _by_id(views: Sequence[WorkerView]) -> list[WorkerView]:
    return sorted(views, key=lambda view: view.worker_id)
