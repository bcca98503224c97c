"""Decides which prompts a prefill step computes and how much of each. Does no I/O and reads no clock.

Interactive prompts go first, then standard ones; within a lane the shortest remaining prompt goes first. A prompt's
rank is fixed when it arrives, and later arrivals start further back (`penstock.scheduling.lane_order`), so neither lane
starves: once four times its lane's handicap and its own length have been computed since it arrived, no new arrival goes
ahead of it.

A step ends early if the prompts that it completes gain more than the others lose (`prefill_worker.step_ends`). A prompt
that is left out has not begun, so in the next step it finds the prefixes that this one computes.

Bulk prompts are computed in steps without others, and in their turns (`penstock.scheduling.bulk_lane`) before others.
They begin only while there are pages for all queued prompts of other lanes.

A lane may have a reserved share of each step. Its prompts get that share before ranks count, so other lanes' prompts
slow it down but never stop it.

A prompt takes all its pages when its first chunk is scheduled, so a started prompt never waits for pages. Queued
prompts start in rank order: a small prompt does not overtake a large one that waits for pages, which might otherwise
wait forever.

If every layer of the model has a window, a prompt takes only the most pages that it holds at once, and returns pages
that fall behind the window as it takes the next ones. A returned page may still be used by another prompt that found it
cached. The prompt then waits until others return pages, and no new prompt starts before. The prompt that started last
lacks no pages, so it always progresses. The same holds for the windowed parts of pages if only some layers have a
window (`engine.cache.windows.window_parts`); then a prompt takes all its pages, but few windowed parts at a time.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.cache.page_pool import OutOfPages, PagePool
from engine.cache.prefix_cache import PrefixCache
from engine.cache.windows.page_window import PageWindow
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.scheduling.bulk_lane import BulkTurns
from penstock.scheduling.lane_order import LaneOrder
from penstock.types import Lane, PageHash, PageId
from prefill_worker.step_ends import StepEnds
from worker.pull.pulled_pages import num_tokens_to_pulled, take_pulled_pages

# The rank that a lane starts with, in full steps. See `AGING`.
HANDICAP_STEPS = {Lane.INTERACTIVE: 0, Lane.STANDARD: 8, Lane.BULK: 64}
# The computed tokens for which later arrivals start one token further back. The higher, the longer short prompts may
# keep a long one waiting: beyond the capacity, 4 instead of 1 lowers TTFT p90 by a third, and raises p99 by a sixth.
AGING = 4


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    sequence: Sequence
    base: float
    arrival: int
    window: PageWindow

    @property
    def is_bulk(self) -> bool:
        return self.sequence.lane is Lane.BULK

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
        max_steps_ahead: int = 0,
    ) -> None:
        """`reserved` holds shares of a step's tokens by lane. Pages that a step returns are free again after
        `max_steps_ahead` further calls of `schedule`.
        """
        self._pool = pool
        self._cache = cache
        self._page_size = page_size
        self._max_batch_tokens = max_batch_tokens
        self._max_batch_sequences = max_batch_sequences
        self._tokens_ahead = max_batch_tokens * (1 + max_steps_ahead)
        self._reserved = {lane: int(share * max_batch_tokens) for lane, share in (reserved or {}).items()}
        self._order = LaneOrder({lane: steps * max_batch_tokens for lane, steps in HANDICAP_STEPS.items()})
        self._entries: dict[Sequence, _Entry] = {}
        self._queue: list[_Entry] = []  # by rank
        self._num_queued_tokens = 0
        self._running: list[_Entry] = []
        self._num_arrivals = 0
        self._turns = BulkTurns()
        self.step_ends = StepEnds()
        self.num_bulk = 0  # bulk prompts, queued or running
        self._num_queued_bulk_tokens = 0

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_uncomputed_tokens(self) -> int:
        return self._num_queued_tokens + sum(entry.sequence.num_uncomputed_tokens for entry in self._running)

    @property
    def num_uncomputed_bulk_tokens(self) -> int:
        running = (entry.sequence.num_uncomputed_tokens for entry in self._running if entry.is_bulk)
        return self._num_queued_bulk_tokens + sum(running)

    def add(self, sequence: Sequence, num_extra: int = 0) -> None:
        """Queues a prompt. It keeps its pages `num_extra` tokens longer than the window requires."""
        self._num_arrivals += 1
        window = self._cache.window.wider(num_extra)
        entry = _Entry(sequence, self._order.rank(sequence.lane), self._num_arrivals, window)
        self._entries[sequence] = entry
        bisect.insort(self._queue, entry, key=_Entry.rank)
        self._num_queued_tokens += len(sequence.token_ids)
        self._num_queued_bulk_tokens += entry.is_bulk * len(sequence.token_ids)
        self.num_bulk += entry.is_bulk

    def remove(self, sequence: Sequence) -> None:
        """Drops the sequence if it is queued or running; the caller keeps its pages."""
        entry = self._entries.pop(sequence, None)
        if entry is None:
            return
        self.num_bulk -= entry.is_bulk
        if entry in self._running:
            self._running.remove(entry)
        else:
            self._dequeue(entry)

    def _dequeue(self, entry: _Entry) -> None:
        self._queue.remove(entry)
        self._num_queued_tokens -= len(entry.sequence.token_ids)
        self._num_queued_bulk_tokens -= entry.is_bulk * len(entry.sequence.token_ids)

    def schedule(self, max_bulk_tokens: int | None = None) -> list[ScheduledSequence]:
        """Returns the next step's chunks, with at most `max_batch_tokens` in total; prompts that start take their
        pages. Bulk prompts get at most `max_bulk_tokens`, apart from the lane's reserved share.
        """
        may_begin = self._extend_running()
        chunks = self._schedule_reserved(may_begin) if any(self._reserved.values()) else {}
        num_bulk = self._max_batch_tokens if max_bulk_tokens is None else max_bulk_tokens
        is_turn = self._turns.is_due
        if is_turn:
            self._fill(chunks, num_bulk, may_begin, is_bulk=True)
        self._fill(chunks, self._max_batch_tokens, may_begin, is_bulk=False)
        if not is_turn and not any(chunks.values()):
            is_turn = True
            self._fill(chunks, num_bulk, may_begin, is_bulk=True)
        if self.num_bulk:
            self._turns.on_step(was_turn=is_turn)
        return [ScheduledSequence(sequence, count) for sequence, count in chunks.items() if count]

    def _fill(self, chunks: dict[Sequence, int], most: int, may_begin: bool, *, is_bulk: bool) -> None:
        """Adds chunks of bulk prompts or of others until `most` tokens are computed in the step."""
        budget = min(most, self._max_batch_tokens) - sum(chunks.values())
        running = sorted((entry for entry in self._running if entry.is_bulk is is_bulk), key=_Entry.rank)
        # Ends as soon as a prompt cannot begin: the queue may be long.
        queued = (entry for entry in list(self._queue) if entry.is_bulk is is_bulk)
        waiting = itertools.takewhile(lambda _: may_begin, queued)
        for entry in heapq.merge(running, waiting, key=_Entry.rank):
            if budget <= 0 or (not is_bulk and self._ends_before(entry, chunks, budget)):
                break
            if entry not in self._running:
                may_begin = may_begin and (self._begin_after_others(entry) if is_bulk else self._begin(entry))
                if not may_begin:
                    continue
            given = chunks.get(entry.sequence, 0)
            chunks[entry.sequence] = given + min(budget, self._next_tokens(entry.sequence) - given)
            budget -= chunks[entry.sequence] - given

    def _ends_before(self, entry: _Entry, chunks: Mapping[Sequence, int], budget: int) -> bool:
        """Returns whether the step should end before a chunk of the prompt."""
        sequence = entry.sequence
        if sequence in chunks:
            return False
        others = [(other, count) for other, count in chunks.items() if other.lane is not Lane.BULK]
        num_complete = sum(count == other.num_uncomputed_tokens for other, count in others)
        if not num_complete:
            return False
        num_before = sequence.num_computed_tokens
        if entry not in self._running:
            num_before = self._page_size * self._cache.peek(sequence.reusable_hashes(self._page_size))
        num_tokens = min(budget, len(sequence.token_ids) - num_before)
        num_others = len(self._queue) + len(self._running) - self.num_bulk - num_complete
        return self.step_ends.ends_before(num_tokens, num_before, num_complete, num_others)

    def _next_tokens(self, sequence: Sequence) -> int:
        """Takes pulled pages that continue what is computed. Returns how many tokens to compute after them, limited by
        the sequence's pages and their windowed parts.
        """
        take_pulled_pages(sequence, self._cache, self._page_size)
        start = sequence.num_computed_tokens
        room = sequence.num_usable_pages * self._page_size - start
        return min(num_tokens_to_pulled(sequence, start, self._cache, self._page_size), room)

    def _extend_running(self) -> bool:
        """Gives running prompts the next pages or windowed parts within the window. Returns whether none lacks any."""
        if self._pool.parts is not None:
            attached = [self._attach_next(entry) for entry in sorted(self._running, key=_Entry.rank)]
            return all(attached)
        if self._cache.window.tokens is None:
            return True
        lacks_none = True
        for entry in sorted(self._running, key=_Entry.rank):
            sequence = entry.sequence
            first = entry.window.num_behind(sequence.num_computed_tokens)
            end = min(-(-len(sequence.token_ids) // self._page_size), first + self._max_held(entry))
            missing = max(0, end - len(sequence.pages))
            sequence.pages += self._pool.allocate(min(missing, self._pool.num_available))
            lacks_none = lacks_none and end <= len(sequence.pages)
        return lacks_none

    def _attach_next(self, entry: _Entry) -> bool:
        """Gives a running prompt its next windowed parts, as far as slots are available. Returns whether it lacks
        none.
        """
        parts, sequence = self._pool.parts, entry.sequence
        assert parts is not None
        first = sequence.num_attached
        end = self._windowed_end(entry, parts.window.num_behind(sequence.num_computed_tokens))
        stop = min(end, first + parts.num_available)
        if stop > first:
            parts.attach(sequence.pages[first:stop])
            sequence.num_attached = stop
        return stop >= end

    def _windowed_end(self, entry: _Entry, first: int) -> int:
        """Returns the end of the pages that have windowed parts while a prompt reads those from `first` on."""
        parts, num_tokens = self._pool.parts, len(entry.sequence.token_ids)
        assert parts is not None
        most = min(parts.window.max_pages(num_tokens, self._tokens_ahead), parts.num_slots)
        return min(-(-num_tokens // self._page_size), first + most)

    def _max_held(self, entry: _Entry) -> int:
        """Returns the most pages that a prompt holds at once, excluding those it shares with others."""
        most = entry.window.max_pages(len(entry.sequence.token_ids), self._tokens_ahead)
        return min(most, self._pool.num_pages)

    def _schedule_reserved(self, may_begin: bool) -> dict[Sequence, int]:
        """Returns the tokens that lanes with a reserved share get first, by rank within each lane."""
        chunks: dict[Sequence, int] = {}
        for lane, share in self._reserved.items():
            begun = sorted((entry for entry in self._running if entry.sequence.lane is lane), key=_Entry.rank)
            waiting = [entry for entry in self._queue if entry.sequence.lane is lane]
            for entry in (*begun, *waiting):
                if share == 0 or not (entry in self._running or (may_begin and self._begin_ahead(entry))):
                    break
                chunks[entry.sequence] = min(share, self._next_tokens(entry.sequence))
                share -= chunks[entry.sequence]
        return chunks

    def _begin_ahead(self, entry: _Entry) -> bool:
        """Starts a prompt ahead of those before it in the queue if there are pages for all of them, so that none waits
        longer.
        """
        return self._begin_behind(entry, self._queue[: self._queue.index(entry)])

    def _begin_after_others(self, entry: _Entry) -> bool:
        """Starts a bulk prompt if there are pages for it and for all queued prompts of other lanes."""
        return self._begin_behind(entry, (queued for queued in self._queue if not queued.is_bulk))

    def _begin_behind(self, entry: _Entry, ahead: Iterable[_Entry]) -> bool:
        num_pages = self._max_held(entry) + sum(self._max_held(queued) for queued in ahead)
        return num_pages <= self._pool.num_available and self._begin(entry)

    def _begin(self, entry: _Entry) -> bool:
        if len(self._running) >= self._max_batch_sequences:
            return False
        hashes = entry.sequence.reusable_hashes(self._page_size)
        # A prompt fits by itself, but perhaps not together with the cached pages of its own prefix.
        frees_pages = self._cache.window.tokens is not None or self._pool.parts is not None
        is_alone = frees_pages and not self._running
        if not (self._take_pages(entry, hashes) or (is_alone and self._take_pages(entry, []))):
            return False
        self._dequeue(entry)
        self._running.append(entry)
        return True

    def _take_pages(self, entry: _Entry, hashes: Seq[PageHash]) -> bool:
        """Takes the prompt's first pages, cached ones first. Returns False and takes none if the pool has too few."""
        sequence, window = entry.sequence, entry.window
        cached = self._cache.match(hashes, window=window)
        num_dropped = self._cache.first_needed(len(cached), window=window)
        windowed = self._cache.windowed(cached)
        num_pages = -(-len(sequence.token_ids) // self._page_size)
        first = len(cached) - len(windowed)
        end = len(cached) if self._pool.parts is None else self._windowed_end(entry, first)
        try:
            if self._pool.parts is not None and end - len(cached) > self._pool.parts.num_available:
                raise OutOfPages(end - len(cached), self._pool.parts.num_available)
            fresh = self._pool.allocate(min(num_pages - len(cached), self._max_held(entry)))
        except OutOfPages:
            self._pool.release(cached[num_dropped:], windowed)
            return False
        sequence.pages, sequence.num_dropped = [*cached, *fresh], num_dropped
        if self._pool.parts is not None:
            self._pool.parts.attach(sequence.pages[len(cached) : end])
            sequence.num_stripped, sequence.num_attached = first, end
        num_filled = self._cache.promote(hashes, sequence.pages, len(cached), window=window, owner=sequence.tenant)
        sequence.num_computed_tokens = num_filled * self._page_size
        self._cache.note_found_texts(sequence, hashes[:num_filled])
        return True

    def drop_behind(self, sequences: Collection[Sequence]) -> list[PageId]:
        """Takes the pages that no later token reads from started prompts; the caller releases them."""
        dropped: list[PageId] = []
        for sequence in sequences:
            entry = self._entries.get(sequence)
            if entry is not None:
                dropped += sequence.drop_pages(entry.window.num_behind(sequence.num_computed_tokens))
        return dropped

    def strip_behind(self, sequences: Collection[Sequence]) -> list[PageId]:
        """Takes the windowed parts that no later token reads from started prompts, and returns their pages; the caller
        releases them.
        """
        stripped: list[PageId] = []
        for sequence in sequences:
            if self._pool.parts is not None and sequence in self._entries:
                stripped += sequence.strip_pages(self._pool.parts.window.num_behind(sequence.num_computed_tokens))
        return stripped

    def commit(self, work: Seq[ScheduledSequence]) -> list[Sequence]:
        """Records a computed step and caches its full pages. Returns the sequences whose prompts are complete."""
        complete = []
        for scheduled in work:
            sequence = scheduled.sequence
            is_complete = scheduled.is_sampled  # only valid until the step is recorded
            num_shared = sequence.num_computed_tokens // self._page_size
            sequence.num_computed_tokens += scheduled.num_tokens
            self._order.advance(scheduled.num_tokens / AGING)
            num_full = sequence.num_computed_tokens // self._page_size
            self._cache.note_texts(sequence, sequence.page_hashes[:num_full], num_shared)
            self._cache.insert(sequence.page_hashes[:num_full], sequence.pages, num_shared, sequence.tenant)
            if is_complete:
                complete.append(sequence)
                entry = self._entries.pop(sequence)
                self._running.remove(entry)
                self.num_bulk -= entry.is_bulk
        return complete
