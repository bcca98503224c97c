"""Decides which prompts a prefill step computes and how much of each. Bookkeeping over the page pool; no I/O, no clock.

Interactive prompts go before standard ones before bulk, and within a lane the shortest remaining prompt goes first. A
prompt's rank is fixed when it arrives, and later arrivals start further back (`penstock.scheduling.lane_order`), so
none starves: once its lane's handicap and its own length have been computed since it arrived, no newcomer goes ahead
of it.

A lane may have a share of each step reserved. Its prompts get that share before ranks count, so that prompts of other
lanes slow it down but never stop it.

A prompt takes all its pages when its first chunk is scheduled, so a begun prompt never waits for pages. Queued prompts
begin in rank order: a small one does not pass a large one that waits for pages, which might otherwise wait for ever.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.cache.page_pool import OutOfPages, PagePool
from engine.cache.prefix_cache import PrefixCache
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.scheduling.lane_order import LaneOrder
from penstock.types import Lane

# Full steps of later arrivals that may be computed before a prompt of the lane.
HANDICAP_STEPS = {Lane.INTERACTIVE: 0, Lane.STANDARD: 8, Lane.BULK: 64}


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    sequence: Sequence
    base: float
    arrival: int

    def rank(self) -> tuple[float, int]:
        """Returns the sort key, which changes only while the prompt is computed."""
        return self.base + self.sequence.num_uncomputed_tokens, self.arrival


class PrefillScheduler:
    """Owns the queue and the running prompts. `schedule` and `commit` alternate, on the step loop."""

    def __init__(
        self,
        pool: PagePool,
        cache: PrefixCache,
        page_size: int,
        max_batch_tokens: int,
        max_batch_sequences: int,
        reserved: Mapping[Lane, float] | None = None,
    ) -> None:
        """`reserved` holds shares of a step's tokens by lane."""
        self._pool = pool
        self._cache = cache
        self._page_size = page_size
        self._max_batch_tokens = max_batch_tokens
        self._max_batch_sequences = max_batch_sequences
        self._reserved = {lane: int(share * max_batch_tokens) for lane, share in (reserved or {}).items()}
        self._order = LaneOrder({lane: steps * max_batch_tokens for lane, steps in HANDICAP_STEPS.items()})
        self._entries: dict[Sequence, _Entry] = {}
        self._queue: list[_Entry] = []  # by rank
        self._num_queued_tokens = 0
        self._running: list[_Entry] = []
        self._num_arrivals = 0

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_uncomputed_tokens(self) -> int:
        return self._num_queued_tokens + sum(entry.sequence.num_uncomputed_tokens for entry in self._running)

    def add(self, sequence: Sequence) -> None:
        self._num_arrivals += 1
        entry = self._entries[sequence] = _Entry(sequence, self._order.rank(sequence.lane), self._num_arrivals)
        bisect.insort(self._queue, entry, key=_Entry.rank)
        self._num_queued_tokens += len(sequence.token_ids)

    def remove(self, sequence: Sequence) -> None:
        """Drops a queued or running sequence, if it is one; the caller keeps its pages."""
        entry = self._entries.pop(sequence, None)
        if entry is None:
            return
        if entry in self._running:
            self._running.remove(entry)
        else:
            self._dequeue(entry)

    def _dequeue(self, entry: _Entry) -> None:
        self._queue.remove(entry)
        self._num_queued_tokens -= len(entry.sequence.token_ids)

    def schedule(self) -> list[ScheduledSequence]:
        """Returns the next step's chunks, at most `max_batch_tokens` in all; prompts that begin take their pages."""
        chunks = self._schedule_reserved() if any(self._reserved.values()) else {}
        budget = self._max_batch_tokens - sum(chunks.values())
        may_begin = True
        for entry in heapq.merge(sorted(self._running, key=_Entry.rank), list(self._queue), key=_Entry.rank):
            if budget == 0:
                break
            if entry not in self._running:
                may_begin = may_begin and self._begin(entry)
                if not may_begin:
                    continue
            given = chunks.get(entry.sequence, 0)
            chunks[entry.sequence] = given + min(budget, entry.sequence.num_uncomputed_tokens - given)
            budget -= chunks[entry.sequence] - given
        return [ScheduledSequence(sequence, count) for sequence, count in chunks.items() if count]

    def _schedule_reserved(self) -> dict[Sequence, int]:
        """Returns the tokens that lanes with a reserved share get first, in rank order within each lane."""
        chunks: dict[Sequence, int] = {}
        for lane, share in self._reserved.items():
            begun = sorted((entry for entry in self._running if entry.sequence.lane is lane), key=_Entry.rank)
            waiting = [entry for entry in self._queue if entry.sequence.lane is lane]
            for entry in (*begun, *waiting):
                if share == 0 or not (entry in self._running or self._begin_ahead(entry)):
                    break
                chunks[entry.sequence] = min(share, entry.sequence.num_uncomputed_tokens)
                share -= chunks[entry.sequence]
        return chunks

    def _begin_ahead(self, entry: _Entry) -> bool:
        """Begins a prompt before those of lower rank if there are pages for all of them, so that none waits longer."""
        ahead = self._queue[: self._queue.index(entry) + 1]
        num_pages = sum(self._num_pages(queued.sequence) for queued in ahead)
        return num_pages <= self._pool.num_available and self._begin(entry)

    def _begin(self, entry: _Entry) -> bool:
        if len(self._running) >= self._max_batch_sequences or not self._take_pages(entry.sequence):
            return False
        self._dequeue(entry)
        self._running.append(entry)
        return True

    def _take_pages(self, sequence: Sequence) -> bool:
        """Takes all the prompt's pages, cached ones first; False, and nothing taken, if the pool has too few."""
        # At least one token is computed, because the first sampled token needs its logits.
        reusable = (len(sequence.token_ids) - 1) // self._page_size
        hashes = sequence.hash_full_pages(self._page_size)[:reusable]
        cached = self._cache.match(hashes)
        try:
            fresh = self._pool.allocate(self._num_pages(sequence) - len(cached))
        except OutOfPages:
            self._pool.release(cached)
            return False
        sequence.pages = [*cached, *fresh]
        sequence.num_computed_tokens = self._cache.promote(hashes, sequence.pages, len(cached)) * self._page_size
        return True

    def _num_pages(self, sequence: Sequence) -> int:
        return -(-len(sequence.token_ids) // self._page_size)

    def commit(self, work: Seq[ScheduledSequence]) -> list[Sequence]:
        """Records a computed step and caches its full pages. Returns the sequences whose prompts are complete."""
        complete = []
        for scheduled in work:
            sequence = scheduled.sequence
            is_complete = scheduled.is_sampled  # valid until the step is recorded
            num_shared = sequence.num_computed_tokens // self._page_size
            sequence.num_computed_tokens += scheduled.num_tokens
            self._order.advance(scheduled.num_tokens)
            num_full = sequence.num_computed_tokens // self._page_size
            self._cache.insert(sequence.page_hashes[:num_full], sequence.pages, start=num_shared)
            if is_complete:
                complete.append(sequence)
                self._running.remove(self._entries.pop(sequence))
        return complete
