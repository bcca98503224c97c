"""A request's place: which workers hold its prompt, which of them the policy takes, what they are credited with.

Between dispatch, which owns the request's way, and the pure policy, which sees views alone. Synchronous.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.page_hash import hash_pages
from penstock.types import Epoch, PageHash, WorkerId
from penstock.v1 import common_pb2, worker_pb2
from router.appraisal import Appraisal, Commitment, Prompt, num_naming_pages
from router.follower import Follower
from router.health import FleetHealth
from router.inflight import InflightLedger
from router.membership import Fleet, Group
from router.predictions import Predictions
from router.prefix_index import PrefixIndex
from router.prefix_match import PrefixMatch
from router.request import Request
from router.topology import LinkBook, LinkCost
from router.views import Choice, Policy

_FIRST_HASHES = 4  # pages of a prompt hashed before the index is asked whether more are worth it
_NEXT_HASHES = 32  # if so; from there on twice as many each time
_BROKEN = LinkCost(1e6, 0.0)  # so dear that any other way is taken


class PromptPages:
    """One prompt's leading page hashes by page size, made no further than little beyond what some worker holds."""

    def __init__(self, token_ids: Sequence[int], salt: bytes) -> None:
        self._token_ids = token_ids
        self._salt = salt
        self._hashes: dict[int, list[PageHash]] = {}

    @property
    def prefix(self) -> bytes:
        """Names what the prompt begins with; empty where that is less than a page."""
        size = next((size for size, hashes in self._hashes.items() if hashes), None)
        count = num_naming_pages(len(self._token_ids), size) if size else 0
        return bytes(self._first(count, size)[count - 1]) if size and count else b""

    def cached_tokens(self, index: PrefixIndex, group: Group) -> tuple[dict[WorkerId, int], dict[WorkerId, int]]:
        """Leading tokens of the prompt whose pages each worker holds, and of these, those below its device.

        By hashes of pages as large as the worker's own.
        """
        found: dict[WorkerId, int] = {}
        below: dict[WorkerId, int] = {}
        for size in group.page_sizes:
            for worker_id, held in self._cached_pages(index, size).items():
                found[worker_id] = held.num_pages * size
                if held.num_pages > held.num_device_pages:
                    below[worker_id] = (held.num_pages - held.num_device_pages) * size
        return found, below

    def _cached_pages(self, index: PrefixIndex, size: int) -> Mapping[WorkerId, PrefixMatch]:
        num_full = len(self._token_ids) // size
        count = min(_FIRST_HASHES, num_full)
        while True:
            hashes = self._first(count, size)
            cached = index.match(hashes[:count])
            if count == num_full or all(held.num_pages < count for held in cached.values()):
                return cached
            count = min(max(_NEXT_HASHES, 2 * count), num_full)

    def _first(self, count: int, size: int) -> list[PageHash]:
        hashes = self._hashes.get(size, [])
        if len(hashes) < count:
            hashes = self._hashes[size] = hash_pages(self._token_ids[: count * size], size, self._salt, hashes)
        return hashes

    def whole(self, size: int) -> list[PageHash]:
        """Hashes of all full pages of that size."""
        return self._first(len(self._token_ids) // size, size)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a leg goes, and why."""

    decode: Follower
    candidates: list[worker_pb2.PrefillCandidate]
    choice: Choice
    commitment: Commitment


class LiveLinks:
    """What links cost, what is under way on them, and which of them let no pages through."""

    def __init__(self, book: LinkBook, ledger: InflightLedger, health: FleetHealth) -> None:
        self._book = book
        self._ledger = ledger
        self._health = health
        self.epochs: dict[WorkerId, Epoch] = {}
        self.now_s = 0.0

    @property
    def fastest(self) -> LinkCost:
        return self._book.fastest

    def cost(self, prefill: WorkerId, decode: WorkerId) -> LinkCost:
        if self._health.link_is_open(self.epochs[prefill], self.epochs[decode], self.now_s):
            return _BROKEN
        return self._book.cost(prefill, decode)

    def bytes_ahead(self, prefill: WorkerId, decode: WorkerId) -> int:
        return self._ledger.link_bytes((prefill, decode))


class Placer:
    """One for all requests: they share the policy, its turns among it, and what is learnt from their ends."""

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        rng: random.Random,
        max_replicas: int,
        on_error: Callable[[str, float], None],
    ) -> None:
        """`on_error` hears by how many seconds a stage was mispredicted."""
        self._fleet = fleet
        self._policy = policy
        self._rng = rng
        self._on_error = on_error
        self.predictions = Predictions()
        self._links = LiveLinks(fleet.links, fleet.ledger, fleet.health)
        self._appraisal = Appraisal(fleet.ledger, fleet.costs, fleet.links, max_replicas)

    def place(
        self, request: Request, pages: PromptPages, num_emitted: int, group: Group, decode: Sequence[Follower]
    ) -> Placement:
        """For a leg that has emitted so much. `decode` are the group's workers that may have it, at least one."""
        now_s = self._links.now_s = time.monotonic()
        cached, below = pages.cached_tokens(self._fleet.index, group)
        prompt = Prompt(
            num_tokens=len(request.token_ids) + num_emitted,
            max_tokens=request.sampling.max_tokens - num_emitted,
            cached_tokens=cached,
            host_tokens=below,
            prefix=pages.prefix,
            session=request.session,
            explain=request.explain,
        )
        demand = self._appraisal.demand(
            prompt, group.token_bytes, [one.worker_id for one in group.prefill], self._links, now_s
        )
        decode, prefill = self._usable(decode, now_s), self._usable(group.prefill, now_s)
        views, sent_to = self._appraisal.views, functools.partial(self._fleet.sent_to, now_s=now_s)
        for one in (*decode, *prefill):
            self._links.epochs[one.worker_id] = one.epoch
        choice = self._policy.choose(demand, views(decode, sent_to), views(prefill, sent_to), self._rng)
        chosen = next(one for one in decode if one.worker_id == choice.decode)
        candidates = self._reaching(chosen, _candidates(choice, group), now_s)
        first = Epoch(candidates[0].epoch) if candidates else None
        for one in (chosen, *(one for one in prefill if one.epoch == first)):
            if one.description.silent_cache:
                self._fleet.index.note(one.worker_id, pages.whole(one.description.page_size), now_s)
        self._fleet.health.on_sent(chosen.epoch, first, now_s)
        commitment = self._appraisal.commit(choice, demand, chosen.description.page_size, now_s)
        return Placement(chosen, candidates, choice, commitment)

    def on_end(self, placement: Placement, timing: common_pb2.Timing, num_output_tokens: int) -> None:
        """A leg has ended where it was placed: what it took is learnt."""
        self._appraisal.on_end(num_output_tokens)
        if timing.pages_moved and timing.prefill_worker == placement.choice.score.prefill:
            self._appraisal.on_transfer(placement.choice, placement.commitment, timing.transfer_ms / 1e3)
        self._compare(placement, timing, num_output_tokens)

    def _compare(self, placement: Placement, timing: common_pb2.Timing, num_output_tokens: int) -> None:
        """Predicted with actual; whoever turns out to be described wrongly is asked again."""
        score, promised, now_s = placement.choice.score, placement.commitment, time.monotonic()
        decode = placement.choice.decode
        if num_output_tokens > 1:
            step_s = timing.decode_ms / 1e3 / (num_output_tokens - 1)
            self.predictions.on_time(decode, promised.step_s, step_s)
        lying = []
        if score.prefill is not None:
            if self.predictions.on_cache(decode, promised.promised_decode_tokens, timing.decode_cached_tokens, now_s):
                lying.append(decode)
            cached = timing.prefill_cached_tokens
        else:
            cached = timing.decode_cached_tokens
        computed_by = score.prefill or decode
        if timing.prefill_worker == computed_by:
            actual_s = (timing.queue_ms + timing.prefill_ms) / 1e3
            self.predictions.on_time(computed_by, score.first_token_s, actual_s)
            for stage, predicted_s, actual_ms in (
                ("queue", score.queue_s, timing.queue_ms),
                ("prefill", score.prefill_s, timing.prefill_ms),
                ("transfer", score.transfer_s, timing.transfer_ms),
            ):
                self._on_error(stage, abs(predicted_s - actual_ms / 1e3))
            if self.predictions.on_cache(computed_by, promised.promised_prefill_tokens, cached, now_s):
                lying.append(computed_by)
        for worker_id in lying:
            self._fleet.distrust(worker_id)

    def _usable(self, workers: Sequence[Follower], now_s: float) -> list[Follower]:
        """Without those that have failed of late."""
        if self._fleet.health.is_spotless:
            return list(workers)
        usable = set(self._fleet.health.usable([one.epoch for one in workers], now_s, self._rng))
        return [one for one in workers if one.epoch in usable]

    def _reaching(
        self, decode: Follower, candidates: list[worker_pb2.PrefillCandidate], now_s: float
    ) -> list[worker_pb2.PrefillCandidate]:
        """Those whose pages get through to the decode worker; where none do, it computes the prompt."""
        health = self._fleet.health
        return [one for one in candidates if not health.link_is_open(Epoch(one.epoch), decode.epoch, now_s)]


def _candidates(choice: Choice, group: Group) -> list[worker_pb2.PrefillCandidate]:
    members = {one.worker_id: one for one in group.prefill}
    return [
        worker_pb2.PrefillCandidate(
            worker_id=one.worker_id,
            epoch=members[one.worker_id].epoch,
            address=members[one.worker_id].address,
            queue_s=one.queue_s,
            prefill_s=one.prefill_s,
            num_ranks=members[one.worker_id].description.num_ranks,
        )
        for one in choice.prefill
    ]
