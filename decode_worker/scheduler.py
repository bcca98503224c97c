"""Which sequences a decode step computes: admission, continuous batching, preemption, page reservations. Pure.

Sequences that decode have a row in a table (engine/row_table.py), and a step that changes nothing but tokens costs a
few vector operations; only who joins, leaves or needs a page is looked at. Who has a row changes in
`decode_worker.run_queues`, where a row stands in `decode_worker.steps_under_way`, which pages it has here.

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

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Generic, cast

from decode_worker.looking_ahead import seat_ahead
from decode_worker.run_queues import Entry, RunQueues
from decode_worker.sequence_pages import SequencePages
from decode_worker.steps_under_way import StepsUnderWay
from engine.page_pool import OutOfPages, PagePool
from engine.prefix_cache import PrefixCache
from engine.sequence import SampledToken, ScheduledSequence, Sequence, StepOutput
from engine.step_plan import LaunchedT, Rows, RowTokens, StepPlan
from penstock.config import DecodeConfig
from penstock.types import Lane, PageId


@dataclass(frozen=True, slots=True)
class Reservation:
    """Pages for a prompt that is computed elsewhere: leading ones already here, and those to be written."""

    held: list[PageId]
    fresh: list[PageId]


class DecodeScheduler(Generic[LaunchedT]):
    """Decides who runs and who waits. Every step that was scheduled is recorded, in order; all on the step loop."""

    def __init__(
        self, pool: PagePool, cache: PrefixCache, page_size: int, config: DecodeConfig, rows: Rows[LaunchedT]
    ) -> None:
        """`rows` is empty, and nobody else's."""
        self._pool = pool
        self._page_size = page_size
        self._config = config
        self._pages = SequencePages(pool, cache, page_size)
        self._watermark_pages = int(config.watermark * pool.num_pages)
        self._table = rows
        self._queues = RunQueues(rows)
        self._steps = StepsUnderWay(pool, self._pages, rows)

    @property
    def num_running(self) -> int:
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        return len(self._queues.waiting)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens of prompts (and of preempted sequences) that are to be computed here."""
        return self._queues.num_uncomputed_tokens

    @property
    def num_under_way(self) -> int:
        """Steps scheduled and not recorded yet."""
        return len(self._steps)

    def track(self, sequence: Sequence) -> None:
        """From now on the sequence has its rank."""
        self._queues.track(sequence)

    def rank(self, sequence: Sequence) -> tuple[float, int]:
        """Of a tracked sequence; lower ones go first."""
        return self._queues[sequence].rank

    def compute_here(self, sequence: Sequence) -> None:
        """Queues a tracked sequence that holds no pages: all its tokens are computed by this worker."""
        assert not sequence.pages
        assert sequence.num_computed_tokens == 0
        self._queues.wait(self._queues[sequence])

    def join(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """A tracked sequence whose pages hold the KV of its first `num_computed_tokens` tokens runs from now on."""
        sequence.num_computed_tokens = num_computed_tokens
        self._pages.share_full(sequence)
        self._queues.run(self._queues[sequence])

    def is_running(self, sequence: Sequence) -> bool:
        """Whether it gets a token in every step: it runs, and the KV of all its tokens but the last is here."""
        return self._queues.is_running(sequence)

    def is_at_rest(self, sequence: Sequence) -> bool:
        """Whether no step under way computes it: its tokens and its KV are what they seem."""
        return not self._steps.computes(sequence)

    def pause(self, sequence: Sequence) -> None:
        """A running sequence stands still, from when it is at rest on, and keeps its pages."""
        self._queues.stop(self._queues[sequence])

    def resume(self, sequence: Sequence) -> None:
        """A paused one runs again."""
        self._queues.run(self._queues[sequence])

    def extend(self, sequence: Sequence, token_ids: Collection[int]) -> None:
        """More tokens of a running sequence are known than were drawn; their KV is computed next."""
        sequence.num_computed_tokens = sequence.num_computed_tokens  # these are not
        sequence.token_ids += token_ids
        if token_ids:
            self._queues.unseat(sequence)

    def forget(self, sequence: Sequence) -> None:
        """The sequence ends here: whatever it holds goes back."""
        if self._queues.forget(sequence):
            self.drop_pages(sequence)

    def drop_pages(self, sequence: Sequence) -> None:
        """Of one that does not run."""
        self._steps.give_back(sequence)
        self._pages.let_go(sequence)

    def num_cached_tokens(self, sequence: Sequence) -> int:
        return self._queues[sequence].num_cached_tokens

    def num_preemptions(self, sequence: Sequence) -> int:
        return self._queues[sequence].num_preemptions

    def peek_cached_tokens(self, sequence: Sequence) -> int:
        """Tokens at the start of the sequence that need no computing here."""
        return self._pages.peek(sequence) * self._page_size

    def reserve(self, sequence: Sequence, num_tokens: int) -> Reservation | None:
        """Pages for a tracked sequence's first `num_tokens`, cached ones first; None where the pool has too few now.

        It may have fewer tokens yet. The caller owns the references. Sequences that wait to be computed here go first,
        or they would starve.
        """
        if self._queues.waiting and self._queues.waiting[0].rank < self._queues[sequence].rank:
            return None
        if self._queues.num_holding >= self._config.max_batch_sequences:
            return None
        pages = self._pages.take(sequence, num_tokens, self._num_kept_back())
        if pages is None:
            return None
        num_held, taken = pages
        self._queues[sequence].num_cached_tokens = num_held * self._page_size
        return Reservation(taken[:num_held], taken[num_held:])

    def schedule(self, max_chunk_tokens: int | None = None) -> StepPlan[LaunchedT]:
        """The next step: each running sequence's next token, then chunks of prompts within the token budget, of at most
        `max_chunk_tokens` in all. With no step under way."""
        assert not self._steps, "a step is under way"
        num_waiting = len(self._queues.waiting)
        self._queues.seat([one for one in self._queues.rowless if one.sequence.num_uncomputed_tokens == 1])
        # One token each first (decode), then chunks: a long prompt must not delay those already streaming.
        short = self._table.short()
        if len(short) <= self._pool.num_available:
            self._add_page_each(short)
        else:
            for entry in self._queues.in_rank(short):
                if entry.sequence in self._table:  # not preempted for the sake of one before it
                    self._make_room(entry, 1)
        budget = self._chunk_budget(max_chunk_tokens)
        chunks = self._schedule_chunks(budget)
        budget -= sum(chunk.num_tokens for chunk in chunks)
        if (
            len(self._queues.waiting) <= num_waiting
        ):  # else pages are short: who was preempted does not come straight back
            chunks += self._admit_waiting(budget)
        return self._steps.launch(chunks)

    def schedule_ahead(self, max_chunk_tokens: int | None = None) -> StepPlan[LaunchedT] | None:
        """The step after the one under way, before that has drawn its tokens: a token more for everyone who decodes or
        draws its first one there, and chunks of prompts as in `schedule`.

        None where it has to wait: pages are too few, or a draw depends on the text. Never preempts.
        """
        if not self._steps.can_be_followed:
            return None
        prompts = seat_ahead(self._queues, self._steps)
        short = self._table.short()
        if prompts is None or self._table.is_special():
            return None
        budget = self._chunk_budget(max_chunk_tokens)
        chunks, num_pages = [], len(short)
        for prompt in prompts:
            if budget > 0:
                chunks.append(replace(prompt, num_tokens=min(budget, prompt.num_tokens)))
                budget -= chunks[-1].num_tokens
                num_pages += self._num_missing(chunks[-1])
        if num_pages > self._pool.num_available or any(one.draws and one.sequence.draws_by_text for one in chunks):
            return None
        if self._waits_for_text():
            return None
        self._add_page_each(short)
        for chunk in chunks:
            chunk.sequence.pages += self._pool.allocate(self._num_missing(chunk))
        return self._steps.launch([*chunks, *self._admit_waiting(budget, is_ahead=True)]) or None

    def _waits_for_text(self) -> bool:
        """Whether the first who waits may come, and draws by its text: it needs a step that follows no other."""
        waiting = self._queues.waiting
        has_place = self._queues.num_holding < self._config.max_batch_sequences
        return bool(waiting) and has_place and waiting[0].sequence.draws_by_text

    def cancel_ahead(self) -> None:
        """The step under way has failed: whatever was scheduled after it is not computed."""
        self._steps.cancel_ahead()

    def _chunk_budget(self, max_chunk_tokens: int | None) -> int:
        """Tokens of a step that rows leave."""
        budget = self._config.max_batch_tokens - len(self._table)
        return budget if max_chunk_tokens is None else min(budget, max_chunk_tokens)

    def _admit_waiting(self, budget: int, is_ahead: bool = False) -> list[ScheduledSequence]:
        chunks: list[ScheduledSequence] = []
        while self._queues.waiting and budget > 0:
            entry = self._queues.waiting[0]
            if is_ahead and entry.sequence.draws_by_text:
                break
            if self._queues.num_holding >= self._config.max_batch_sequences or not self._admit(entry):
                break
            chunks.append(ScheduledSequence(entry.sequence, min(budget, entry.sequence.num_uncomputed_tokens)))
            budget -= chunks[-1].num_tokens
        return chunks

    def _schedule_chunks(self, budget: int) -> list[ScheduledSequence]:
        chunks: list[ScheduledSequence] = []
        for entry in self._queues.rowless.copy():
            num_tokens = min(budget, entry.sequence.num_uncomputed_tokens)
            if num_tokens <= 0:
                break
            if entry not in self._queues.running or not self._make_room(entry, num_tokens):
                continue
            chunks.append(ScheduledSequence(entry.sequence, num_tokens))
            budget -= num_tokens
        # A preemption may have hit a sequence that was scheduled before it in this very step.
        return [chunk for chunk in chunks if chunk.sequence.pages]

    def record(self, plan: StepPlan[LaunchedT], drawn: RowTokens, others: Seq[int | None]) -> Collection[Sequence]:
        """The oldest step under way is over: appends the tokens that it has drawn, one for each row, and one or None
        for each chunk. Returns the sequences for which it has drawn in vain."""
        return self._steps.record(plan, drawn, others)

    def record_some(self, work: Seq[ScheduledSequence], token_ids: Seq[int | None]) -> Collection[Sequence]:
        """The only step under way is over, and this is what did not fail of it: like `record`."""
        return self._steps.record_some(work, token_ids)

    def commit(self, work: Seq[ScheduledSequence], output: StepOutput) -> list[tuple[Sequence, SampledToken]]:
        """`record` of a plan, `record_some` of anything else; returns each drawn token, already appended to its
        sequence."""
        token_ids = [None if token is None else token.token_id for token in output.tokens]
        if isinstance(work, StepPlan):
            num_rows = len(work.rows.items)
            void = self.record(work, cast(list[int], token_ids[:num_rows]), token_ids[num_rows:])
        else:
            void = self.record_some(work, token_ids)
        pairs = zip(work, output.tokens, strict=True)
        return [(item.sequence, token) for item, token in pairs if token is not None and item.sequence not in void]

    def check_integrity(self) -> None:
        """Raises AssertionError unless everybody is where they should be. With no step under way."""
        self._table.check_integrity()
        self._queues.check_integrity()
        self._steps.check_integrity()

    def _num_kept_back(self) -> int:
        """Pages that newcomers leave to those who run; with nobody running there is nobody to keep them back for."""
        return self._watermark_pages if self._queues.running else 0

    def _admit(self, entry: Entry) -> bool:
        taken = self._pages.take(entry.sequence, len(entry.sequence.token_ids), self._num_kept_back())
        if taken is None:
            return False
        self._pages.hold(entry.sequence, *taken)
        if entry.num_preemptions == 0:
            entry.num_cached_tokens = entry.sequence.num_computed_tokens
        self._queues.admit(entry)
        return True

    def _make_room(self, entry: Entry, num_tokens: int) -> bool:
        """Pages for the next `num_tokens`, preempting others where needed; False if it preempted itself."""
        sequence = entry.sequence
        missing = self._num_missing(ScheduledSequence(sequence, num_tokens))
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

    def _num_missing(self, chunk: ScheduledSequence) -> int:
        """Pages."""
        return max(0, -(-(chunk.start + chunk.num_tokens) // self._page_size) - len(chunk.sequence.pages))

    def _add_page_each(self, sequences: list[Sequence]) -> None:
        """A row needs one at most, since it gets a token a step."""
        if sequences:
            pages = self._pool.allocate(len(sequences))
            for sequence, page in zip(sequences, pages, strict=True):
                sequence.pages.append(page)
            self._table.add_pages(sequences, pages)

    def _choose_victim(self, entry: Entry) -> Entry:
        """Who makes room for `entry`: one that ranks behind it, or itself where there is none."""

        def cost(one: Entry) -> tuple[bool, int, float]:
            return one.sequence.lane is not Lane.BULK, one.sequence.num_computed_tokens, -one.rank[1]

        return min(self._queues.behind(entry), key=cost, default=entry)

    def _preempt(self, entry: Entry) -> None:
        self._queues.stop(entry)
        self.drop_pages(entry.sequence)
        entry.num_preemptions += 1
        self._queues.wait(entry)
