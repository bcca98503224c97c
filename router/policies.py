"""Every policy by its name, and the simple ones, yardsticks for the kv-aware one. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from router import prices
from router.choice import KvAware, Weights, estimate
from router.rendezvous import order
from router.views import MAX_CANDIDATES, Choice, Demand, Policy, WorkerView

_MAX_OVER_MEAN = 1.25  # of a worker's load, before a key goes to the next worker


class LeastLoaded:
    """Fewest requests on decode, fewest tokens in the prefill queue; blind to caches."""

    def choose(
        self, demand: Demand, decode: Sequence[WorkerView], prefill: Sequence[WorkerView], rng: random.Random
    ) -> Choice:
        by_requests = sorted(rng.sample(list(decode), len(decode)), key=_num_requests)
        by_queue = sorted(rng.sample(list(prefill), len(prefill)), key=_num_queued)
        return _choice(demand, by_requests[0], by_queue)


class RoundRobin:
    """Each in turn, in order of worker id."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(
        self, demand: Demand, decode: Sequence[WorkerView], prefill: Sequence[WorkerView], rng: random.Random
    ) -> Choice:
        turn = self._turn
        self._turn += 1
        decode, prefill = _by_id(decode), _by_id(prefill)
        start = turn % len(prefill) if prefill else 0
        return _choice(demand, decode[turn % len(decode)], [*prefill[start:], *prefill[:start]])


class Random:
    def choose(
        self, demand: Demand, decode: Sequence[WorkerView], prefill: Sequence[WorkerView], rng: random.Random
    ) -> Choice:
        return _choice(demand, rng.choice(list(decode)), rng.sample(list(prefill), len(prefill)))


class ConsistentHash:
    """A session, or what a prompt begins with, stays with its workers while these have no more than a fair load.

    Consistent hashing with bounded loads (Mirrokni and others, 2016). Needs no events; a short prompt goes anywhere.
    """

    def choose(
        self, demand: Demand, decode: Sequence[WorkerView], prefill: Sequence[WorkerView], rng: random.Random
    ) -> Choice:
        key = demand.session.encode() or demand.prefix or rng.randbytes(8)
        ranked = _bounded(key, decode, _num_requests)
        return _choice(demand, ranked[0], _bounded(key, prefill, _num_queued))


def make_policy(name: str, weights: Weights = Weights()) -> Policy:  # noqa: B008
    """As RouterConfig's `policy` names it; `weights` are the kv-aware one's."""
    policies: dict[str, Callable[[], Policy]] = {
        "kv-aware": lambda: KvAware(weights),
        "least-loaded": LeastLoaded,
        "round-robin": RoundRobin,
        "random": Random,
        "consistent-hash": ConsistentHash,
    }
    return policies[name]()


def _choice(demand: Demand, decode: WorkerView, ranked: Sequence[WorkerView]) -> Choice:
    """The first of `ranked` computes the prompt; where there is none, the decode worker does."""
    first = ranked[0] if ranked else None
    score = prices.price(demand, decode, first)
    return Choice(
        decode.worker_id,
        tuple(estimate(demand, view) for view in ranked[:MAX_CANDIDATES]),
        demand.uncached_on((first or decode).worker_id),
        score,
        (score,) if demand.explain else (),
    )


def _bounded(key: bytes, views: Sequence[WorkerView], load: Callable[[WorkerView], int]) -> list[WorkerView]:
    """The key's workers in order, those with more than their share last."""
    ranked = [views[place] for place in order(key, [view.worker_id for view in views])]
    limit = _MAX_OVER_MEAN * (sum(map(load, ranked)) + 1) / max(1, len(ranked))
    return sorted(ranked, key=lambda view: load(view) > limit)


def _num_requests(view: WorkerView) -> int:
    return view.num_requests


def _num_queued(view: WorkerView) -> int:
    return view.load.queued_prefill_tokens + view.sent.prefill_tokens


def _by_id(views: Sequence[WorkerView]) -> list[WorkerView]:
    return sorted(views, key=lambda view: view.worker_id)
