"""Gives sequences places in the batch and pages, and preempts others for them. Pure.

The decode scheduler owns it. A sequence that needs a page when none is left preempts one that ranks behind it
(`preemption_policy`). A sequence that begins preempts only bulk sequences, and only if it is not bulk itself. A
preempted sequence keeps its tokens, and their KV is recomputed later.
"""

from __future__ import annotations

from dataclasses import dataclass

from decode_worker.schedule.preemption_policy import choose_victim
from decode_worker.schedule.run_queues import RunQueues, TrackedSequence
from decode_worker.schedule.sequence_pages import SequencePages
from decode_worker.schedule.steps_in_flight import StepsInFlight
from engine.cache.page_pool import OutOfPages, PagePool
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.config import DecodeConfig
from penstock.metrics.worker_metrics import PREEMPTED_TOKENS, PREEMPTIONS, WorkerMetrics
from penstock.types import PageId


@dataclass(frozen=True, slots=True)
class Reservation:
    """Pages for a prompt that is computed elsewhere: leading ones cached here, and those to be written."""

    held: list[PageId]  # includes entries for pages that nothing will read
    fresh: list[PageId]
    num_dropped: int = 0  # number of such entries
    num_stripped: int = 0  # entries before the first one with a windowed part; without parts 0, as below
    num_attached: int = 0  # entries before the end of those with one


class SequenceRoom:
    """Decides what fits. `queues`, `pages` and `steps` are those of one scheduler."""

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        queues: RunQueues,
        pages: SequencePages,
        steps: StepsInFlight,
        config: DecodeConfig,
    ) -> None:
        self.metrics = WorkerMetrics()
        self._pool = pool
        self._page_size = page_size
        self._queues = queues
        self._pages = pages
        self._steps = steps
        self._max_sequences = config.max_batch_sequences
        self.watermark_pages = int(config.watermark * pool.num_pages)
        self.awaits_bulk = False  # whether a reservation waits for pages or a place of bulk sequences
        self.awaits_pages = False  # whether a prompt that is computed apart waits for pages of others
        self.is_owed_pages = False  # whether a decoding sequence waits for pages that the prompt stream may still write
        self.preempted: list[Sequence] = []  # since `take_preempted`

    def take_preempted(self) -> list[Sequence]:
        """Returns the sequences preempted since the last call."""
        preempted, self.preempted = self.preempted, []
        return preempted

    def reserve(
        self, sequence: Sequence, num_tokens: int, num_landing: int | None = None, num_unneeded: int = 0
    ) -> Reservation | None:
        """Returns pages for a tracked sequence's first `num_tokens`, cached ones first; None if there are too few now.

        The sequence may have fewer tokens so far. The caller owns the references. Pages and places are left for
        sequences that rank before it and wait to be computed here, so that they do not starve. `num_landing` tokens, by
        default all, come from elsewhere, and only pages before the last of them are taken from the cache. Nothing will
        read the first `num_unneeded` pages. Preempts bulk sequences for others unless a step is in flight.
        """
        entry = self._queues[sequence]
        while True:
            granted = self._try_to_reserve(sequence, num_tokens, num_landing, num_unneeded)
            if granted is not None or entry.is_bulk or not self._queues.num_running_bulk:
                return granted
            if self._steps:  # a page returned now would be free only after them
                self.awaits_bulk = True
                return None
            if not self._preempt_bulk(sequence):
                return None

    def _try_to_reserve(
        self, sequence: Sequence, num_tokens: int, num_landing: int | None, num_unneeded: int
    ) -> Reservation | None:
        num_places = self._max_sequences - self._queues.num_holding
        if num_places <= 0:
            return None
        earlier = self._queues.waiting_before(sequence, num_places)
        if len(earlier) == num_places:
            return None
        landing = num_tokens if num_landing is None else num_landing
        num_kept_back = self._num_kept_back + sum([self._pages.num_initial(entry.sequence) for entry in earlier])
        grant = self._pages.allocate(sequence, num_tokens, num_kept_back, landing, num_unneeded)
        if grant is None:
            return None
        self._queues[sequence].num_cached_tokens = grant.num_found * self._page_size
        held, fresh = grant.pages[: grant.num_filled], grant.pages[grant.num_filled :]
        return Reservation(held, fresh, grant.num_dropped, grant.num_stripped, grant.num_attached)

    @property
    def is_full(self) -> bool:
        return self._queues.num_holding >= self._max_sequences

    @property
    def _num_kept_back(self) -> int:
        """The number of pages that new sequences leave to running ones; 0 if none runs."""
        return self.watermark_pages if self._queues.running else 0

    def admit(self, entry: TrackedSequence, may_preempt: bool, num_owed: int = 0) -> bool:
        """Runs a waiting sequence. Returns False if there is no place or too few pages for it, of which it leaves
        `num_owed` to others.
        """
        sequence = entry.sequence
        while True:
            grant = None
            if not self.is_full:
                num_kept_back = self._num_kept_back + num_owed
                grant = self._pages.allocate(sequence, len(sequence.token_ids), num_kept_back)
            if grant is not None:
                break
            if not may_preempt or entry.is_bulk or not self._preempt_bulk(sequence):
                return False
        self._pages.hold(sequence, grant)
        if entry.num_preemptions == 0:
            entry.num_cached_tokens = sequence.num_computed_tokens
        self._queues.admit(entry)
        if entry.is_bulk:
            self._queues.release(entry)
        return True

    def has_pages(self, chunk: ScheduledSequence) -> bool:
        """Returns whether the chunk's missing pages can be allocated now."""
        return self._pages.has_room((), [chunk])

    def num_tokens_within(self, entry: TrackedSequence) -> int:
        """Returns how many of its next tokens to compute, as far as the pages of a sequence hold them; see
        `next_tokens`.
        """
        num_tokens, sequence = self.next_tokens(entry), entry.sequence
        return min(num_tokens, sequence.num_usable_pages * self._page_size - sequence.num_computed_tokens)

    def next_tokens(self, entry: TrackedSequence, fixed_start: int | None = None) -> int:
        """Returns how many of its next tokens to compute: those before the pages that were pulled for it meanwhile.

        Takes such pages where they come next, unless a step in flight computes the sequence up to `fixed_start`.
        """
        sequence = entry.sequence
        if fixed_start is not None:
            return self._pages.num_to_pulled(sequence, fixed_start)
        num_taken = self._pages.take_pulled(sequence)
        if entry.num_preemptions == 0:
            entry.num_cached_tokens += num_taken
        return self._pages.num_to_pulled(sequence, sequence.num_computed_tokens)

    def _preempt_bulk(self, sequence: Sequence) -> bool:
        """Preempts one bulk sequence for another sequence that lacks a place or pages. Returns False if there is none,
        or if all of them together hold too few pages.
        """
        bulk = self._queues.running_bulk()
        num_free = self._pool.num_available + sum(len(entry.sequence.held_pages) for entry in bulk)
        victim = choose_victim(bulk)
        if victim is None or num_free < self._pages.num_initial(sequence) - self._pages.peek(sequence):
            return False
        self._preempt(victim)
        return True

    def extend(self, entry: TrackedSequence, num_tokens: int) -> bool:
        """Allocates pages for the next `num_tokens`, preempting other sequences if necessary. Returns False if it
        preempted this one, or if pages become free only with the step of the prompt stream, which it then waits for.
        """
        chunk = ScheduledSequence(entry.sequence, num_tokens)
        while True:
            try:
                self._pages.extend(chunk)
                return True
            except OutOfPages:
                if self._steps.awaits_prompts:
                    self.is_owed_pages = True
                    self._queues.withdraw_row(entry.sequence)
                    return False
                victim = choose_victim(self._queues.behind(entry)) or entry
                self._preempt(victim)
                if victim is entry:
                    return False

    def _preempt(self, entry: TrackedSequence) -> None:
        self._queues.stop(entry)
        self.metrics.add(PREEMPTIONS)
        self.preempted.append(entry.sequence)
        self.metrics.add(PREEMPTED_TOKENS, entry.sequence.num_computed_tokens)
        self._steps.give_back(entry.sequence)
        self._pages.drop(entry.sequence)
        entry.num_preemptions += 1
        self._queues.wait(entry)
