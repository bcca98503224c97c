"""Which sequences a decode step computes: admission, continuous batching, preemption, page reservations. Pure.

Sequences that decode have a row in a table (engine/row_table.py), and a step that changes nothing but tokens costs a
few vector operations; only who joins, leaves or needs a page is looked at.

A step is under way from `schedule` until it is recorded, and meanwhile anything may be asked of the scheduler: requests
come and end, pages land, sequences pause (`decode_worker.steps_under_way` keeps that safe). One step more may be
scheduled ahead, where it needs nobody's tokens but the device's.

Every sequence that is running gets its next token first; what is left of the step's token budget goes to chunks of
prompts that are computed here. Sequences have a rank for their whole life: by arrival, interactive ones with a head
start before standard ones before bulk (penstock/aging.py). A sequence that needs a page when none is left preempts one
that ranks behind it, bulk first and then the one with least work to lose; its tokens are kept and its KV is computed
again later. So the first in rank always gets on, everybody comes to be first, and nobody starves.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Generic

from decode_worker.sequence_pages import SequencePages
from decode_worker.steps_under_way import StepsUnderWay
from engine.page_pool import OutOfPages, PagePool
from engine.prefix_cache import PrefixCache
from engine.sequence import SampledToken, ScheduledSequence, Sequence, StepOutput
from engine.step_plan import LaunchedT, Rows, StepPlan
from penstock.aging import Aging
from penstock.config import DecodeConfig
from penstock.types import Lane, PageId

# Later arrivals that may go first.
HANDICAP_REQUESTS = {Lane.INTERACTIVE: 0, Lane.STANDARD: 32, Lane.BULK: 256}


@dataclass(slots=True, eq=False)
class _Entry:
    """A sequence and what scheduling remembers of it."""

    sequence: Sequence
    rank: tuple[float, int]  # the second counts the order of arrival
    num_cached_tokens: int = 0  # found in the prefix cache at the first admission
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Reservation:
    """Pages for a prompt that is computed elsewhere: leading ones already here, and those to be written."""

    held: list[PageId]
    fresh: list[PageId]


class DecodeScheduler(Generic[LaunchedT]):
    """Owns who runs and who waits. Every step that was scheduled is recorded, in order; all on the step loop."""

    def __init__(
        self, pool: PagePool, cache: PrefixCache, page_size: int, config: DecodeConfig, rows: Rows[LaunchedT]
    ) -> None:
        """`rows` is empty, and nobody else's."""
        self._pool = pool
        self._page_size = page_size
        self._config = config
        self._pages = SequencePages(pool, cache, page_size)
        self._watermark_pages = int(config.watermark * pool.num_pages)
        self._entries: dict[Sequence, _Entry] = {}
        self._running: list[_Entry] = []  # by rank
        self._rowless: list[_Entry] = []  # of these, by rank: computed in chunks, or new
        self._table = rows
        self._steps = StepsUnderWay(pool, self._pages, rows, page_size)
        self._waiting: list[_Entry] = []  # by rank; to be computed here
        self._num_arrivals = 0
        self._aging = Aging(HANDICAP_REQUESTS)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens of prompts (and of preempted sequences) that are to be computed here."""
        waiting = sum(entry.sequence.num_uncomputed_tokens for entry in self._waiting)
        return waiting + sum(entry.sequence.num_uncomputed_tokens - 1 for entry in self._rowless)

    @property
    def num_under_way(self) -> int:
        """Steps scheduled and not recorded yet."""
        return len(self._steps)

    def track(self, sequence: Sequence) -> None:
        """From now on the sequence has its rank."""
        self._num_arrivals += 1
        self._entries[sequence] = _Entry(sequence, (self._aging.rank(sequence.lane), self._num_arrivals))
        self._aging.advance(1)

    def rank(self, sequence: Sequence) -> tuple[float, int]:
        """Of a tracked sequence; lower ones go first."""
        return self._entries[sequence].rank

    def compute_here(self, sequence: Sequence) -> None:
        """Queues a tracked sequence that holds no pages: all its tokens are computed by this worker."""
        assert not sequence.pages
        assert sequence.num_computed_tokens == 0
        bisect.insort(self._waiting, self._entries[sequence], key=_rank)

    def join(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """A tracked sequence whose pages hold the KV of its first `num_computed_tokens` tokens runs from now on."""
        sequence.num_computed_tokens = num_computed_tokens
        self._pages.share_full(sequence)
        self._run(self._entries[sequence])

    def is_running(self, sequence: Sequence) -> bool:
        """Whether it gets a token in every step: it runs, and the KV of all its tokens but the last is here."""
        if sequence in self._table:
            return True
        entry = self._entries.get(sequence)
        return entry in self._rowless and sequence.num_uncomputed_tokens == 1

    def is_at_rest(self, sequence: Sequence) -> bool:
        """Whether no step under way computes it: its tokens and its KV are what they seem."""
        return not self._steps.computes(sequence)

    def pause(self, sequence: Sequence) -> None:
        """A running sequence stands still, from when it is at rest on, and keeps its pages."""
        self._stop(self._entries[sequence])

    def resume(self, sequence: Sequence) -> None:
        """A paused one runs again."""
        self._run(self._entries[sequence])

    def extend(self, sequence: Sequence, token_ids: Collection[int]) -> None:
        """More tokens of a running sequence are known than were drawn; their KV is computed next."""
        sequence.token_ids += token_ids
        if token_ids and sequence in self._table:
            self._table.remove(sequence)
            bisect.insort(self._rowless, self._entries[sequence], key=_rank)

    def forget(self, sequence: Sequence) -> None:
        """The sequence ends here: whatever it holds goes back."""
        entry = self._entries.get(sequence)
        if entry is None:
            return
        if entry in self._waiting:
            self._waiting.remove(entry)
        elif entry in self._running:
            self._stop(entry)
        self.drop_pages(sequence)
        del self._entries[sequence]

    def drop_pages(self, sequence: Sequence) -> None:
        """Of one that does not run."""
        self._steps.give_back(sequence)
        self._pages.let_go(sequence)

    def _run(self, entry: _Entry) -> None:
        bisect.insort(self._running, entry, key=_rank)
        bisect.insort(self._rowless, entry, key=_rank)

    def _stop(self, entry: _Entry) -> None:
        self._running.remove(entry)
        if entry.sequence in self._table:
            self._table.remove(entry.sequence)
        else:
            self._rowless.remove(entry)

    def num_cached_tokens(self, sequence: Sequence) -> int:
        return self._entries[sequence].num_cached_tokens

    def num_preemptions(self, sequence: Sequence) -> int:
        return self._entries[sequence].num_preemptions

    def peek_cached_tokens(self, sequence: Sequence) -> int:
        """Tokens at the start of the sequence that need no computing here."""
        return self._pages.peek(sequence) * self._page_size

    def reserve(self, sequence: Sequence, num_tokens: int) -> Reservation | None:
        """Pages for a tracked sequence's first `num_tokens`, cached ones first; None where the pool has too few now.

        It may have fewer tokens yet. The caller owns the references. Sequences that wait to be computed here go first,
        or they would starve.
        """
        if self._waiting and self._waiting[0].rank < self._entries[sequence].rank:
            return None
        if self._num_holding() >= self._config.max_batch_sequences:
            return None
        pages = self._pages.take(sequence, num_tokens, self._num_kept_back())
        if pages is None:
            return None
        num_held, taken = pages
        self._entries[sequence].num_cached_tokens = num_held * self._page_size
        return Reservation(taken[:num_held], taken[num_held:])

    def schedule(self, max_chunk_tokens: int | None = None) -> StepPlan[LaunchedT]:
        """The next step: each running sequence's next token, then chunks of prompts within the token budget, of at most
        `max_chunk_tokens` in all. With no step under way."""
        assert not self._steps, "a step is under way"
        num_waiting = len(self._waiting)
        self._seat()
        # One token each first (decode), then chunks: a long prompt must not delay those already streaming.
        short = self._table.short()
        if len(short) <= self._pool.num_available:
            self._add_page_each(short)
        else:
            for entry in sorted((self._entries[sequence] for sequence in short), key=_rank):
                if entry.sequence in self._table:  # not preempted for the sake of one before it
                    self._make_room(entry, 1)
        budget = self._config.max_batch_tokens - len(self._table)
        if max_chunk_tokens is not None:
            budget = min(budget, max_chunk_tokens)
        chunks = self._schedule_chunks(budget)
        budget -= sum(chunk.num_tokens for chunk in chunks)
        # Where pages are short, whoever was preempted does not come straight back.
        while self._waiting and budget > 0 and len(self._waiting) <= num_waiting:
            entry = self._waiting[0]
            if self._num_holding() >= self._config.max_batch_sequences or not self._admit(entry):
                break
            chunks.append(ScheduledSequence(entry.sequence, min(budget, entry.sequence.num_uncomputed_tokens)))
            budget -= chunks[-1].num_tokens
        return self._steps.launch(chunks)

    def schedule_ahead(self) -> StepPlan[LaunchedT] | None:
        """The step after the one under way, before that has drawn its tokens: a token more for everyone who decodes.

        None where it has to wait for the tokens or the pages, since there are prompts to compute, too few pages, or
        draws that depend on the text. Never preempts.
        """
        if self._waiting or not self._steps.can_be_followed:
            return None
        if self._rowless and not all(self._is_seatable(entry) for entry in self._rowless):
            return None
        self._seat()
        short = self._table.short()
        if self._table.is_special() or len(short) > self._pool.num_available:
            return None
        self._add_page_each(short)
        return self._steps.launch([]) or None

    def cancel_ahead(self) -> None:
        """The step under way has failed: whatever was scheduled after it is not computed."""
        self._steps.cancel_ahead()

    def _seat(self) -> None:
        """Those who decode from now on get their row."""
        if any(self._is_seatable(entry) for entry in self._rowless):
            for entry in self._rowless:
                if self._is_seatable(entry):
                    self._table.add(entry.sequence)
            self._rowless = [entry for entry in self._rowless if entry.sequence not in self._table]

    def _is_seatable(self, entry: _Entry) -> bool:
        return entry.sequence.num_uncomputed_tokens == 1 and self.is_at_rest(entry.sequence)

    def _schedule_chunks(self, budget: int) -> list[ScheduledSequence]:
        chunks: list[ScheduledSequence] = []
        for entry in self._rowless.copy():
            num_tokens = min(budget, entry.sequence.num_uncomputed_tokens)
            if num_tokens <= 0:
                break
            if entry not in self._running or not self._make_room(entry, num_tokens):
                continue
            chunks.append(ScheduledSequence(entry.sequence, num_tokens))
            budget -= num_tokens
        # A preemption may have hit a sequence that was scheduled before it in this very step.
        return [chunk for chunk in chunks if chunk.sequence.pages]

    def record(self, work: Seq[ScheduledSequence], token_ids: Seq[int | None]) -> Collection[Sequence]:
        """The oldest step under way is over: appends the tokens that it has drawn. Returns the sequences for which it
        has drawn in vain.

        `work` is its plan, with a token or None for each, or, where some of it failed, what did not: then no step after
        it may be under way.
        """
        return self._steps.record(work, token_ids)

    def commit(self, work: Seq[ScheduledSequence], output: StepOutput) -> list[tuple[Sequence, SampledToken]]:
        """`record`; returns each drawn token, already appended to its sequence."""
        void = self.record(work, [None if token is None else token.token_id for token in output.tokens])
        pairs = zip(work, output.tokens, strict=True)
        return [(item.sequence, token) for item, token in pairs if token is not None and item.sequence not in void]

    def check_integrity(self) -> None:
        """Raises AssertionError unless everybody is where they should be. With no step under way."""
        self._table.check_integrity()
        rowless = {entry.sequence for entry in self._rowless}
        running = [entry.sequence for entry in self._running]
        assert len(rowless) + len(self._table) == len(running), "who runs has a row or is among the rowless"
        assert all((one in self._table) != (one in rowless) for one in running)
        self._steps.check_integrity()

    def _num_holding(self) -> int:
        """Sequences that hold pages: running, or with a transfer under way."""
        return sum(1 for entry in self._entries.values() if entry.sequence.pages)

    def _num_kept_back(self) -> int:
        """Pages that newcomers leave to those who run; with nobody running there is nobody to keep them back for."""
        return self._watermark_pages if self._running else 0

    def _admit(self, entry: _Entry) -> bool:
        taken = self._pages.take(entry.sequence, len(entry.sequence.token_ids), self._num_kept_back())
        if taken is None:
            return False
        self._pages.hold(entry.sequence, *taken)
        if entry.num_preemptions == 0:
            entry.num_cached_tokens = entry.sequence.num_computed_tokens
        self._waiting.remove(entry)
        self._run(entry)
        return True

    def _make_room(self, entry: _Entry, num_tokens: int) -> bool:
        """Pages for the next `num_tokens`, preempting others where needed; False if it preempted itself."""
        sequence = entry.sequence
        num_pages = -(-(sequence.num_computed_tokens + num_tokens) // self._page_size)
        missing = num_pages - len(sequence.pages)
        while missing > 0:
            try:
                if sequence in self._table:
                    self._add_page_each([sequence])
                else:
                    sequence.pages += self._pool.allocate(missing)
                return True
            except OutOfPages:
                victim = self._choose_victim(entry)
                self._preempt(victim)
                if victim is entry:
                    return False
        return True

    def _add_page_each(self, sequences: list[Sequence]) -> None:
        """A row needs one at most, since it gets a token a step."""
        if sequences:
            pages = self._pool.allocate(len(sequences))
            for sequence, page in zip(sequences, pages, strict=True):
                sequence.pages.append(page)
            self._table.add_pages(sequences, pages)

    def _choose_victim(self, entry: _Entry) -> _Entry:
        """Who makes room for `entry`: one that ranks behind it, or itself where there is none."""
        behind = self._running[bisect.bisect_right(self._running, entry.rank, key=_rank) :]

        def cost(one: _Entry) -> tuple[bool, int, float]:
            return one.sequence.lane is not Lane.BULK, one.sequence.num_computed_tokens, -one.rank[1]

        return min(behind, key=cost, default=entry)

    def _preempt(self, entry: _Entry) -> None:
        self._stop(entry)
        self.drop_pages(entry.sequence)
        entry.num_preemptions += 1
        bisect.insort(self._waiting, entry, key=_rank)


def _rank(entry: _Entry) -> tuple[float, int]:
    return entry.rank
