"""A request's place: which workers hold its prompt, which of them the policy takes, what they are credited with.

Between dispatch, which owns the request's way, and the pure policy, which sees views alone. Synchronous.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.page_hash import hash_pages
from penstock.types import Epoch, PageHash, WorkerId
from penstock.v1 import worker_pb2
from router.choice import Choice, Demand, Policy, WorkerView
from router.follower import Follower
from router.inflight import InflightLedger, Work, WorkKey
from router.membership import Fleet, Group
from router.prefix_index import PrefixIndex
from router.prefix_match import PrefixMatch

_FIRST_HASHES = 32  # pages of a prompt hashed before the index is asked whether more are worth it


class PromptPages:
    """One prompt's leading page hashes by page size, made no further than little beyond what some worker holds."""

    def __init__(self, token_ids: Sequence[int], salt: bytes) -> None:
        self._token_ids = token_ids
        self._salt = salt
        self._hashes: dict[int, list[PageHash]] = {}

    def cached_tokens(self, index: PrefixIndex, group: Group) -> dict[WorkerId, int]:
        """Leading tokens of the prompt whose pages each worker holds, by hashes of pages as large as its own."""
        found: dict[WorkerId, int] = {}
        for size in group.page_sizes:
            cached = self._cached_pages(index, size)
            found.update((worker_id, held.num_pages * size) for worker_id, held in cached.items())
        return found

    def _cached_pages(self, index: PrefixIndex, size: int) -> Mapping[WorkerId, PrefixMatch]:
        token_ids = self._token_ids
        hashes = self._hashes.get(size, [])
        num_full = len(token_ids) // size
        count = min(_FIRST_HASHES, num_full)
        while True:
            if len(hashes) < count:
                hashes = self._hashes[size] = hash_pages(token_ids[: count * size], size, self._salt, hashes)
            cached = index.match(hashes[:count])
            if count == num_full or all(held.num_pages < count for held in cached.values()):
                return cached
            count = min(2 * count, num_full)

    def whole(self, size: int) -> list[PageHash]:
        """Hashes of all full pages of that size."""
        hashes = self._hashes.get(size, [])
        self._hashes[size] = hash_pages(self._token_ids, size, self._salt, hashes)
        return self._hashes[size]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a leg goes."""

    decode: Follower
    candidates: list[worker_pb2.PrefillCandidate]
    credits: list[WorkKey]


class Placer:
    """One for all requests: they share the policy, whose turns and sessions they take part in."""

    def __init__(self, fleet: Fleet, policy: Policy, rng: random.Random) -> None:
        self._fleet = fleet
        self._policy = policy
        self._rng = rng

    def place(self, pages: PromptPages, num_tokens: int, group: Group, decode: Sequence[Follower]) -> Placement:
        """`num_tokens` of KV are wanted; `decode` are the group's workers that may have them, at least one."""
        cached = pages.cached_tokens(self._fleet.index, group)
        demand = Demand(num_tokens, group.token_bytes)
        now_s = time.monotonic()
        decode, prefill = self._usable(decode, now_s), self._usable(group.prefill, now_s)

        def view(one: Follower) -> WorkerView:
            sent = self._fleet.sent_to(one.worker_id, now_s)
            return WorkerView(one.worker_id, one.load, one.description.page_size, sent, cached.get(one.worker_id, 0))

        choice = self._policy.choose(demand, [view(one) for one in decode], [view(one) for one in prefill], self._rng)
        chosen = next(one for one in decode if one.worker_id == choice.decode)
        num_pages = -(-num_tokens // chosen.description.page_size)
        candidates = self._reaching(chosen, _candidates(choice, group), now_s)
        first = Epoch(candidates[0].epoch) if candidates else None
        for one in (chosen, *(one for one in prefill if one.epoch == first)):
            if one.description.silent_cache:
                self._fleet.index.note(one.worker_id, pages.whole(one.description.page_size), now_s)
        self._fleet.health.on_sent(chosen.epoch, first, now_s)
        return Placement(chosen, candidates, _credit(self._fleet.ledger, choice, num_pages))

    def _usable(self, workers: Sequence[Follower], now_s: float) -> list[Follower]:
        """Without those that have failed of late."""
        usable = set(self._fleet.health.usable([one.epoch for one in workers], now_s, self._rng))
        return [one for one in workers if one.epoch in usable]

    def _reaching(
        self, decode: Follower, candidates: list[worker_pb2.PrefillCandidate], now_s: float
    ) -> list[worker_pb2.PrefillCandidate]:
        """Those whose pages get through to the decode worker; where none do, it computes the prompt."""
        health = self._fleet.health
        return [one for one in candidates if not health.link_is_open(Epoch(one.epoch), decode.epoch, now_s)]


def _credit(ledger: InflightLedger, choice: Choice, num_pages: int) -> list[WorkKey]:
    """What the chosen workers' next load reports will not show yet."""
    pages = Work(num_requests=1, num_pages=num_pages)
    compute = Work(prefill_tokens=choice.uncached_tokens)
    computed_by = choice.prefill[0].worker_id if choice.prefill else choice.decode
    now_s = time.monotonic()
    return [ledger.record(choice.decode, pages, now_s), ledger.record(computed_by, compute, now_s)]


def _candidates(choice: Choice, group: Group) -> list[worker_pb2.PrefillCandidate]:
    members = {one.worker_id: one for one in group.prefill}
    return [
        worker_pb2.PrefillCandidate(
            worker_id=one.worker_id,
            epoch=members[one.worker_id].epoch,
            address=members[one.worker_id].address,
            queue_s=one.queue_s,
            prefill_s=one.prefill_s,
        )
        for one in choice.prefill
    ]
