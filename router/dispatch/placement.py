"""Places a request: looks its prompt up in the index, lets the policy choose workers, and records their new work.

Connects dispatch, which owns the request's path, with the pure decisions of `router.routing`, which see only views of
workers. Synchronous: placing a request never waits.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.errors import AdapterUnavailable
from penstock.kv.page_hash import hash_pages
from penstock.types import SHARED_STORE, Epoch, PageHash, WorkerId
from penstock.v1 import common_pb2, worker_pb2
from router.fleet.fleet_worker import FleetWorker
from router.fleet.worker_fleet import WorkerFleet
from router.fleet.worker_groups import WorkerGroup
from router.prepared_request import PreparedRequest
from router.routing.costs.link_costs import LinkCost
from router.routing.costs.predictions import Predictions
from router.routing.index.pending_prompts import MAX_MARKS_PER_PROMPT, mark_pages, marks_of
from router.routing.index.prefix_index import PrefixIndex
from router.routing.index.prefix_match import PrefixMatch
from router.routing.index.stored_pages import StoredPages, StoreKey
from router.routing.placement_core import Commitment, PlacementCore, num_naming_pages
from router.routing.policy.interface import PairChoice, PlacementDemand, PlacementPolicy, PlannedPull, PullOffer

_FIRST_HASHES = 4  # pages of a prompt that are hashed first
_NEXT_HASHES = 32  # pages hashed next if a worker holds all of those; the number then doubles each time
_BROKEN = LinkCost(1e6, 0.0)  # so expensive that any other pair is preferred


class PromptPages:
    """A prompt's leading page hashes by page size, computed little further than the pages that any worker holds."""

    def __init__(self, token_ids: Sequence[int], salt: bytes) -> None:
        self._token_ids = token_ids
        self._salt = salt
        self._hashes: dict[int, list[PageHash]] = {}

    @property
    def prefix(self) -> bytes:
        """A hash of the beginning of the prompt; empty for a prompt shorter than a page."""
        size = next((size for size, hashes in self._hashes.items() if hashes), None)
        count = num_naming_pages(len(self._token_ids), size) if size else 0
        return bytes(self._first(count, size)[count - 1]) if size and count else b""

    def cached_tokens(self, index: PrefixIndex, group: WorkerGroup) -> tuple[dict[WorkerId, int], dict[WorkerId, int]]:
        """Returns how many leading tokens each worker has cached, and how many of them on tiers below its device.

        The prompt is hashed in pages of each worker's own size.
        """
        found: dict[WorkerId, int] = {}
        below: dict[WorkerId, int] = {}
        for size in group.page_sizes:
            for worker_id, match in self._cached_pages(index, size).items():
                found[worker_id] = match.num_pages * size
                if match.num_pages > match.num_device_pages:
                    below[worker_id] = (match.num_pages - match.num_device_pages) * size
        return found, below

    def stored_tokens(self, stored: StoredPages, store: StoreKey, size: int) -> int:
        """Returns how many leading tokens a shared store holds, in pages of `size` tokens."""
        runs, num_full = stored.runs(store), len(self._token_ids) // size
        num_pages = 0
        while runs and (stop := num_pages + store.run_pages) <= num_full:
            hashes = self._first(min(num_full, max(stop, 2 * num_pages)), size)
            if hashes[stop - 1] not in runs:
                break
            num_pages = stop
        return num_pages * size

    def whole(self, size: int) -> list[PageHash]:
        """Returns the hashes of all full pages of that size."""
        return self._first(len(self._token_ids) // size, size)

    def marks(self, size: int) -> Iterator[PageHash]:
        """Yields the prompt's marks, which identify pending prompts. Hashes only as many pages as the caller needs."""
        stride = mark_pages(size)
        for count in range(stride, len(self._token_ids) // size + 1, stride)[:MAX_MARKS_PER_PROMPT]:
            yield self._first(count, size)[count - 1]

    def all_marks(self, size: int) -> Sequence[PageHash]:
        """Returns the marks of the whole prompt."""
        num_pages = min(len(self._token_ids) // size, mark_pages(size) * MAX_MARKS_PER_PROMPT)
        return marks_of(self._first(num_pages, size)[:num_pages], size)

    def _cached_pages(self, index: PrefixIndex, size: int) -> Mapping[WorkerId, PrefixMatch]:
        num_full = len(self._token_ids) // size
        count = min(_FIRST_HASHES, num_full)
        while True:
            hashes = self._first(count, size)
            cached = index.match(hashes[:count])
            if count == num_full or all(match.num_pages < count for match in cached.values()):
                return cached
            count = min(max(_NEXT_HASHES, 2 * count), num_full)

    def _first(self, count: int, size: int) -> list[PageHash]:
        hashes = self._hashes.get(size, [])
        if len(hashes) < count:
            hashes = self._hashes[size] = hash_pages(self._token_ids[: count * size], size, self._salt, hashes)
        return hashes


@dataclass(frozen=True, slots=True)
class Placement:
    """The workers chosen for a completion, and why."""

    decode: FleetWorker
    candidates: list[worker_pb2.PrefillCandidate]
    choice: PairChoice
    commitment: Commitment
    token_bytes: float  # of KV, for each token
    prefix_source: worker_pb2.PrefixSource | None = None  # that the decode worker may pull from


class FleetLinkPricing:
    """Prices the fleet's links at one moment, prohibitively if their circuit is open. Implements `LinkPricing`."""

    def __init__(self, fleet: WorkerFleet, workers: Sequence[FleetWorker], now_s: float) -> None:
        self._fleet = fleet
        self._epochs = {worker.worker_id: worker.epoch for worker in workers}
        self._now_s = now_s

    @property
    def fastest(self) -> LinkCost:
        return self._fleet.links.fastest

    def cost(self, prefill: WorkerId, decode: WorkerId) -> LinkCost:
        if self._fleet.health.link_is_open(self._epochs[prefill], self._epochs[decode], self._now_s):
            return _BROKEN
        return self._fleet.links.cost(prefill, decode)

    def bytes_ahead(self, prefill: WorkerId, decode: WorkerId) -> int:
        return self._fleet.ledger.link_bytes((prefill, decode))


class Placer:
    """Places all requests of a router. Owns the policy's state and what is learned from ended completions."""

    def __init__(
        self,
        fleet: WorkerFleet,
        policy: PlacementPolicy,
        rng: random.Random,
        max_replicas: int,
        on_error: Callable[[float, float, float], None],
        may_pull: bool = True,
    ) -> None:
        """`on_error` takes the prediction errors of a completion's queue, prefill and transfer, in seconds.

        Without `may_pull`, workers get no other worker to pull a prefix from.
        """
        self._fleet = fleet
        self._policy = policy
        self._rng = rng
        self._on_error = on_error
        self._may_pull = may_pull
        self.predictions = Predictions()
        self._core = PlacementCore(fleet.ledger, fleet.costs, fleet.links, max_replicas)

    def place(
        self,
        request: PreparedRequest,
        pages: PromptPages,
        num_emitted: int,
        group: WorkerGroup,
        decode: Sequence[FleetWorker],
    ) -> Placement:
        """Places a completion that has emitted `num_emitted` tokens.

        `decode` lists the group's workers that may serve it, at least one. Raises AdapterUnavailable if the request has
        an adapter and none of them has slots for adapters.
        """
        now_s = time.monotonic()
        decode = _with_slots(request, decode)
        if not decode:
            raise AdapterUnavailable(
                f"{request.adapter}: no decode worker has slots for adapters; set engine.max_adapters"
            )
        decode, prefill = self._usable(decode, now_s), self._usable(_with_slots(request, group.prefill), now_s)
        scores_prompt = request.sampling.prompt_logprobs is not None and not num_emitted
        if scores_prompt:  # the decode worker computes the whole prompt itself
            prefill = []
        links = FleetLinkPricing(self._fleet, (*decode, *group.prefill), now_s)
        demand = self._demand(request, pages, num_emitted, group, links, now_s, scores_prompt=scores_prompt)
        views, sent_to = self._core.views, functools.partial(self._fleet.sent_to_all, now_s=now_s)
        choice = self._policy.choose(demand, views(decode, sent_to), views(prefill, sent_to), self._rng)
        chosen = next(worker for worker in decode if worker.worker_id == choice.decode)
        candidates = self._reaching(chosen, _candidates(choice, group), now_s)
        first = Epoch(candidates[0].epoch) if candidates else None
        self._note_silent((chosen, *(worker for worker in prefill if worker.epoch == first)), pages, now_s)
        self._fleet.health.on_sent(chosen.epoch, first, now_s)
        computes = next((worker for worker in prefill if worker.epoch == first), chosen)

        def marks() -> Sequence[PageHash]:
            return () if scores_prompt else pages.all_marks(computes.page_size)

        commitment = self._core.commit(choice, demand, chosen.description.page_size, now_s, marks, chosen.limits)
        source = _source(choice.decode_pull, group, chosen.address)
        return Placement(chosen, candidates, choice, commitment, group.token_bytes, source)

    def _demand(
        self,
        request: PreparedRequest,
        pages: PromptPages,
        num_emitted: int,
        group: WorkerGroup,
        links: FleetLinkPricing,
        now_s: float,
        *,
        scores_prompt: bool,
    ) -> PlacementDemand:
        """Describes the completion to the policy, including which workers have or will have its prefix.

        If `scores_prompt`, the completion uses neither cached tokens nor a prefill worker.
        """
        cached, below = ({}, {}) if scores_prompt else pages.cached_tokens(self._fleet.index, group)
        return self._core.demand(
            num_tokens=len(request.token_ids) + num_emitted,
            max_tokens=request.sampling.max_tokens - num_emitted,
            token_bytes=group.token_bytes,
            cached_tokens=cached,
            host_tokens=below,
            pending_tokens={} if scores_prompt else self._pending_tokens(pages, group),
            prefill=[] if scores_prompt else [worker.worker_id for worker in group.prefill],
            links=links,
            now_s=now_s,
            prefix=pages.prefix,
            session=request.session,
            explain=request.explain,
            pull=None if scores_prompt else self._pull_offer(pages, group, cached, below),
            adapter=request.adapter.revision if request.adapter is not None else "",
        )

    def _pull_offer(
        self,
        pages: PromptPages,
        group: WorkerGroup,
        cached: Mapping[WorkerId, int],
        below: Mapping[WorkerId, int],
    ) -> PullOffer | None:
        on_device: dict[WorkerId, int] = {}
        if self._may_pull and group.pulls and cached:
            members = {worker.worker_id for worker in (*group.decode, *group.prefill)}
            on_device = {
                worker_id: tokens - below.get(worker_id, 0)
                for worker_id, tokens in cached.items()
                if worker_id in members
            }
        stored = 0
        if group.store is not None:
            stored = pages.stored_tokens(self._fleet.stored, group.store, next(iter(group.page_sizes)))
        return self._fleet.pulls.offer(on_device, stored)

    def _pending_tokens(self, pages: PromptPages, group: WorkerGroup) -> dict[WorkerId, int]:
        pending: dict[WorkerId, int] = {}
        for size in group.page_sizes:
            pending.update(self._core.pending_tokens(pages.marks(size), size))
        return pending

    def on_end(self, placement: Placement, timing: common_pb2.Timing, num_output_tokens: int) -> None:
        """Learns from a completion that has ended where it was placed."""
        self._core.on_end(num_output_tokens)
        if timing.pages_moved and timing.prefill_worker == placement.choice.score.prefill and not _is_split(timing):
            self._core.on_transfer(placement.choice, placement.commitment, timing.transfer_ms / 1e3)
        self._learn_pull(placement, timing)
        self._compare_times(placement, timing, num_output_tokens)
        self._compare_caches(placement, timing)

    def _learn_pull(self, placement: Placement, timing: common_pb2.Timing) -> None:
        choice, computed_by = placement.choice, WorkerId(timing.prefill_worker)
        expected = choice.score.pull if computed_by == (choice.score.prefill or choice.decode) else None
        pull = timing.pull if timing.HasField("pull") else None
        self._fleet.pulls.on_end(expected, computed_by, pull, placement.token_bytes)

    def _compare_times(self, placement: Placement, timing: common_pb2.Timing, num_output_tokens: int) -> None:
        score, decode = placement.choice.score, placement.choice.decode
        if num_output_tokens > 1:
            step_s = timing.decode_ms / 1e3 / (num_output_tokens - 1)
            self.predictions.on_time(decode, placement.commitment.step_s, step_s)
        computed_by = score.prefill or decode
        if timing.prefill_worker != computed_by or _is_split(timing):
            return
        actual_s = (timing.queue_ms + timing.prefill_ms) / 1e3
        self.predictions.on_time(computed_by, score.first_token_s, actual_s)
        self._on_error(
            abs(score.queue_s - timing.queue_ms / 1e3),
            abs(score.prefill_s - timing.prefill_ms / 1e3),
            abs(score.transfer_s - timing.transfer_ms / 1e3),
        )

    def _compare_caches(self, placement: Placement, timing: common_pb2.Timing) -> None:
        """Compares cached tokens with what the index promised.

        Requests a new snapshot from a worker about which the index is wrong.
        """
        score, promised, now_s = placement.choice.score, placement.commitment, time.monotonic()
        decode = placement.choice.decode
        checks = []
        if score.prefill is not None:
            checks.append((decode, promised.promised_decode_tokens, timing.decode_cached_tokens))
        computed_by = score.prefill or decode
        if timing.prefill_worker == computed_by and not _is_split(timing):
            cached = timing.decode_cached_tokens if score.prefill is None else timing.prefill_cached_tokens
            checks.append((computed_by, promised.promised_prefill_tokens, cached))
        for worker_id, promised_tokens, cached in checks:
            if self.predictions.on_cache(worker_id, promised_tokens, cached, now_s):
                self._fleet.distrust(worker_id)

    def _note_silent(self, workers: Sequence[FleetWorker], pages: PromptPages, now_s: float) -> None:
        """Notes the prompt in the index for workers that send no KV events."""
        for worker in workers:
            if worker.description.silent_cache:
                self._fleet.index.note(worker.worker_id, pages.whole(worker.page_size), now_s)

    def _usable(self, workers: Sequence[FleetWorker], now_s: float) -> list[FleetWorker]:
        """Leaves out workers that have failed recently, but never all of them."""
        if self._fleet.health.is_without_failures:
            return list(workers)
        usable = set(self._fleet.health.usable([worker.epoch for worker in workers], now_s, self._rng))
        return [worker for worker in workers if worker.epoch in usable]

    def _reaching(
        self, decode: FleetWorker, candidates: list[worker_pb2.PrefillCandidate], now_s: float
    ) -> list[worker_pb2.PrefillCandidate]:
        """Leaves out candidates whose link to the decode worker has an open circuit.

        If none are left, the decode worker computes the prompt itself.
        """
        health = self._fleet.health
        return [worker for worker in candidates if not health.link_is_open(Epoch(worker.epoch), decode.epoch, now_s)]


def _with_slots(request: PreparedRequest, workers: Sequence[FleetWorker]) -> Sequence[FleetWorker]:
    """Leaves out workers that cannot serve adapters, if the request has an adapter."""
    if request.adapter is None:
        return workers
    return [worker for worker in workers if worker.description.adapter_slots]


def _is_split(timing: common_pb2.Timing) -> bool:
    """Returns whether both workers computed a part of the prompt, so that neither's times match the prediction."""
    return bool(timing.prices) and timing.prices[0].place == "split"


def _candidates(choice: PairChoice, group: WorkerGroup) -> list[worker_pb2.PrefillCandidate]:
    members = {worker.worker_id: worker for worker in group.prefill}
    return [
        worker_pb2.PrefillCandidate(
            worker_id=estimate.worker_id,
            epoch=members[estimate.worker_id].epoch,
            address=members[estimate.worker_id].address,
            queue_s=estimate.queue_s,
            prefill_s=estimate.prefill_s,
            num_ranks=members[estimate.worker_id].description.num_ranks,
            cached_tokens=estimate.pull.tokens if estimate.pull else estimate.cached_tokens,
            prefix_source=_source(estimate.pull, group, members[estimate.worker_id].address),
        )
        for estimate in choice.prefill
    ]


def _source(pull: PlannedPull | None, group: WorkerGroup, own_address: str) -> worker_pb2.PrefixSource | None:
    """Describes the worker that the one at `own_address` pulls from; None also for the shared store, which each worker
    looks up itself.
    """
    if pull is None or pull.source == SHARED_STORE:
        return None
    source = next(worker for worker in (*group.prefill, *group.decode) if worker.worker_id == pull.source)
    return worker_pb2.PrefixSource(
        worker_id=pull.source,
        epoch=source.epoch,
        address=source.address,
        own_address=own_address,
        cached_tokens=pull.tokens,
        pull_s=pull.pull_s,
        compute_s=pull.compute_s,
    )
