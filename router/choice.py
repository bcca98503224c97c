"""Which (prefill, decode) pair serves a request. Pure: views in, a choice out, randomness passed in.

The kv-aware policy prices the stages in seconds: the wait in the prefill queue, the tokens that no cache there holds,
the pages that must move, and the crowd on the decode worker. The two workers' prices add up, so the best pair is the
best of each kind; it is the decode worker's cache that says what has to move.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.types import WorkerId, WorkerLoad
from router.inflight import NO_WORK, Work

MAX_CANDIDATES = 3
PRIOR_TOKENS_PER_S = 2000.0  # of a worker that has not measured its own rate yet
_PRIOR_STEP_S = 0.02
_WIRE_BYTES_PER_S = 1e9
_TIE = 1e-9


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker that takes work, as far as a choice is concerned."""

    worker_id: WorkerId
    load: WorkerLoad
    page_size: int  # tokens
    sent: Work = NO_WORK  # beyond what `load` shows
    cached_tokens: int = 0  # leading ones of this prompt, whose pages its prefix cache holds


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks for."""

    num_tokens: int  # to have KV for: prompt, and what was emitted before
    token_bytes: float  # of KV


@dataclass(frozen=True, slots=True)
class PrefillEstimate:
    worker_id: WorkerId
    queue_s: float
    prefill_s: float

    @property
    def total_s(self) -> float:
        return self.queue_s + self.prefill_s


@dataclass(frozen=True, slots=True)
class Choice:
    decode: WorkerId
    prefill: tuple[PrefillEstimate, ...]  # best first; empty: the decode worker computes the prompt
    uncached_tokens: int  # on the first of them


class Policy(Protocol):
    def choose(
        self, demand: Demand, decode: Sequence[WorkerView], prefill: Sequence[WorkerView], rng: random.Random
    ) -> Choice:
        """`decode` is not empty; the prefill workers' pages fit each of them."""
        ...


class KvAware:
    """Least estimated seconds."""

    def choose(
        self, demand: Demand, decode: Sequence[WorkerView], prefill: Sequence[WorkerView], rng: random.Random
    ) -> Choice:
        has_prefill = bool(prefill)
        chosen = _cheapest(decode, lambda view: decode_s(demand, view, has_prefill), rng)
        return _choice(demand, chosen, _rank(demand, prefill, rng))


class LeastLoaded:
    """Fewest requests on decode, fewest tokens in the prefill queue; blind to caches."""

    def choose(
        self, demand: Demand, decode: Sequence[WorkerView], prefill: Sequence[WorkerView], rng: random.Random
    ) -> Choice:
        chosen = _cheapest(decode, num_requests, rng)
        shuffled = rng.sample(list(prefill), len(prefill))
        ranked = sorted(shuffled, key=lambda view: view.load.queued_prefill_tokens + view.sent.prefill_tokens)
        return _choice(demand, chosen, ranked)


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


def make_policy(name: str) -> Policy:
    policies: dict[str, Callable[[], Policy]] = {
        "kv-aware": KvAware,
        "least-loaded": LeastLoaded,
        "round-robin": RoundRobin,
        "random": Random,
    }
    return policies[name]()


def uncached_tokens(demand: Demand, view: WorkerView) -> int:
    """At least the last token: its logits are needed whatever is cached."""
    return max(1, demand.num_tokens - view.cached_tokens)


def estimate_prefill(demand: Demand, view: WorkerView) -> PrefillEstimate:
    rate = view.load.prefill_tokens_per_s or PRIOR_TOKENS_PER_S
    queued = view.load.queued_prefill_tokens + view.sent.prefill_tokens
    return PrefillEstimate(view.worker_id, queued / rate, uncached_tokens(demand, view) / rate)


def num_requests(view: WorkerView) -> float:
    return view.load.num_running + view.load.num_waiting + view.sent.num_requests


def decode_s(demand: Demand, view: WorkerView, has_prefill: bool) -> float:
    """Seconds that choosing this decode worker costs: pages to move or compute, the crowd there, and want of pages."""
    step_s = view.load.step_s or _PRIOR_STEP_S
    uncached = uncached_tokens(demand, view)
    if has_prefill:
        pages_s = uncached * demand.token_bytes / _WIRE_BYTES_PER_S
    else:
        pages_s = estimate_prefill(demand, view).total_s
    # A step serves everyone on the worker: each request more makes all the others' steps longer.
    crowd_s = num_requests(view) * step_s
    wanted = -(-uncached // view.page_size)
    missing = wanted + view.sent.num_pages - view.load.free_pages if view.load.total_pages else 0
    # Pages come free as sequences end; a whole pool's worth takes about as long as a prompt of that many tokens.
    admission_s = max(0, missing) * view.page_size * step_s
    return pages_s + crowd_s + admission_s


def _choice(demand: Demand, decode: WorkerView, ranked: Sequence[WorkerView]) -> Choice:
    candidates = tuple(estimate_prefill(demand, view) for view in ranked[:MAX_CANDIDATES])
    return Choice(decode.worker_id, candidates, uncached_tokens(demand, ranked[0] if ranked else decode))


def _rank(demand: Demand, prefill: Sequence[WorkerView], rng: random.Random) -> list[WorkerView]:
    """Cheapest first, equal ones in random order."""
    shuffled = rng.sample(list(prefill), len(prefill)) if len(prefill) > 1 else list(prefill)
    return sorted(shuffled, key=lambda view: estimate_prefill(demand, view).total_s)


def _cheapest(views: Sequence[WorkerView], cost: Callable[[WorkerView], float], rng: random.Random) -> WorkerView:
    """Equal ones are drawn from: the first must not get every request of an idle fleet."""
    costs = [cost(view) for view in views]
    least = min(costs)
    return rng.choice([view for view, value in zip(views, costs, strict=True) if value <= least + _TIE])


def _by_id(views: Sequence[WorkerView]) -> list[WorkerView]:
    return sorted(views, key=lambda view: view.worker_id)
