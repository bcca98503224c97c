"""Decides which sequences a decode step computes: admission, continuous batching, preemption, page reservation. Pure.

Decoding sequences have a row in a table (`engine.step.row_table`), and a step that only changes tokens takes a few
vector operations; only sequences that join, leave or need a page are handled one by one. `run_queues` decides which
sequences have a row, `steps_in_flight` how far each row is, and `sequence_pages` which pages it has.

A step is in flight from `schedule` until it is recorded. Meanwhile any method may be called: requests come and end,
pages land, sequences pause (`steps_in_flight` makes that safe). One more step may be scheduled ahead if all tokens that
it needs can stay on the device.

Every running sequence gets its next token first; the rest of the step's token budget goes to chunks of prompts that are
computed here. A sequence that needs a page when none is left preempts one that ranks behind it (`preemption_policy`),
which keeps its tokens and recomputes their KV later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from decode_worker.schedule.chunk_budget import ChunkBudget
from decode_worker.schedule.preemption_policy import choose_victim
from decode_worker.schedule.run_ahead import assign_rows_ahead
from decode_worker.schedule.run_queues import RunQueues, TrackedSequence
from decode_worker.schedule.sequence_pages import SequencePages
from decode_worker.schedule.steps_in_flight import StepsInFlight
from engine.cache.page_pool import OutOfPages, PagePool
from engine.cache.prefix_cache import PrefixCache
from engine.memory.estimates import SCORED_TOKENS
from engine.step.plan import StepPlan
from engine.step.row_table import RowTable
from engine.step.sequence import SampledToken, ScheduledSequence, Sequence, StepOutput
from engine.step.speculation.speculator import Speculator
from penstock.config import DecodeConfig
from penstock.errors import InternalError
from penstock.types import PageId
from penstock.worker_metrics import PREEMPTED_TOKENS, PREEMPTIONS, WorkerMetrics


@dataclass(frozen=True, slots=True)
class Reservation:
    """Pages for a prompt that is computed elsewhere: leading ones cached here, and those to be written."""

    held: list[PageId]  # includes entries for pages that nothing will read
    fresh: list[PageId]
    num_dropped: int = 0  # number of such entries


class DecodeScheduler:
    """Owns the queues, the row table and the steps in flight. Every scheduled step is recorded, in order."""

    def __init__(
        self,
        pool: PagePool,
        cache: PrefixCache,
        page_size: int,
        config: DecodeConfig,
        rows: RowTable,
        speculator: Speculator | None = None,
    ) -> None:
        """`rows` must be empty. Only this scheduler uses `rows` and `speculator`; without a speculator nothing is
        proposed.
        """
        self.metrics = WorkerMetrics()
        self._pool = pool
        self._page_size = page_size
        self._config = config
        self._pages = SequencePages(pool, cache, page_size, rows, config.max_batch_tokens)
        self._watermark_pages = int(config.watermark * pool.num_pages)
        self._table = rows
        self._queues = RunQueues(rows)
        self._steps = StepsInFlight(pool, self._pages, rows)
        self._speculator = speculator
        self._asked = (0, False)  # (step, whether verifying proposals after it pays)
        self.preempted: list[Sequence] = []  # preempted for the newest step of `schedule`

    @property
    def num_running(self) -> int:
        return len(self._queues.running)

    @property
    def is_decoding(self) -> bool:
        """Returns whether a sequence that has tokens may get another one in the next step."""
        if self._steps or len(self._table):
            return True
        sequences = (entry.sequence for entry in self._queues.rowless)
        return any(sequence.num_uncomputed_tokens == 1 or sequence.is_fast_forwarding for sequence in sequences)

    @property
    def num_waiting(self) -> int:
        return len(self._queues.waiting)

    @property
    def num_uncomputed_tokens(self) -> int:
        """The number of tokens of prompts and preempted sequences that this worker has yet to compute."""
        return self._queues.num_uncomputed_tokens

    @property
    def num_in_flight(self) -> int:
        """The number of steps that are scheduled but not recorded yet."""
        return len(self._steps)

    # Sequences.

    def track(self, sequence: Sequence) -> None:
        """Starts to track the sequence and gives it its rank."""
        self._queues.track(sequence)

    def is_tracked(self, sequence: Sequence) -> bool:
        """Returns whether the sequence is tracked and not forgotten."""
        return sequence in self._queues

    def rank(self, sequence: Sequence) -> tuple[float, int]:
        """Returns a tracked sequence's rank; lower goes first."""
        return self._queues[sequence].rank

    def compute_here(self, sequence: Sequence) -> None:
        """Queues a tracked sequence that holds no pages: this worker computes all its tokens."""
        if sequence.pages or sequence.num_computed_tokens:
            held = f"{len(sequence.pages)} pages and {sequence.num_computed_tokens} computed tokens"
            raise InternalError(f"{sequence.request_id} to be computed here holds {held}")
        self._queues.wait(self._queues[sequence])

    def join(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Runs a tracked sequence whose pages hold the KV of its first `num_computed_tokens` tokens."""
        sequence.num_computed_tokens = num_computed_tokens
        self._pages.share_full(sequence)
        self._queues.run(self._queues[sequence])

    def is_running(self, sequence: Sequence) -> bool:
        """Returns whether it gets a token in every step: it runs, and all its tokens but the last have KV here."""
        return self._queues.is_running(sequence)

    def is_at_rest(self, sequence: Sequence) -> bool:
        """Returns whether no step in flight computes it, so that its tokens and its KV are final."""
        return not self._steps.computes(sequence)

    def discarded(self, plan: StepPlan) -> Collection[Sequence]:
        """Returns the sequences of a step in flight whose tokens will be discarded, because they have ended, lost their
        pages or got other tokens.
        """
        return self._steps.discarded(plan)

    def pause(self, sequence: Sequence) -> None:
        """Stops a running sequence, which keeps its pages; a step in flight may still compute it."""
        self._queues.stop(self._queues[sequence])

    def resume(self, sequence: Sequence) -> None:
        """Runs a paused sequence again."""
        self._queues.run(self._queues[sequence])

    def extend(self, sequence: Sequence, token_ids: Collection[int]) -> None:
        """Appends tokens to a running sequence that no step has sampled. Their KV is computed next, and tokens that a
        step in flight samples for the sequence are discarded.
        """
        if token_ids:
            self._steps.supersede(sequence)
            sequence.append_uncomputed(token_ids)
            self._queues.withdraw_row(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Ends the sequence here and returns its pages; does nothing if it is not tracked."""
        if self._queues.forget(sequence):
            self.drop_pages(sequence)
            if self._speculator is not None:
                self._speculator.forget(sequence)

    def drop_pages(self, sequence: Sequence) -> None:
        """Returns the pages of a sequence that is not running."""
        self._steps.give_back(sequence)
        self._pages.drop(sequence)

    def num_cached_tokens(self, sequence: Sequence) -> int:
        return self._queues[sequence].num_cached_tokens

    def num_preemptions(self, sequence: Sequence) -> int:
        return self._queues[sequence].num_preemptions

    def peek_cached_tokens(self, sequence: Sequence) -> int:
        """Returns how many leading tokens of the sequence need not be computed here."""
        return self._pages.peek(sequence) * self._page_size

    def reserve(
        self, sequence: Sequence, num_tokens: int, num_landing: int | None = None, num_unneeded: int = 0
    ) -> Reservation | None:
        """Returns pages for a tracked sequence's first `num_tokens`, cached ones first; None if there are too few now.

        The sequence may have fewer tokens so far. The caller owns the references. Pages and places are left for
        sequences that rank before it and wait to be computed here, so that they do not starve. `num_landing` tokens, by
        default all, come from elsewhere, and only pages before the last of them are taken from the cache. Nothing will
        read the first `num_unneeded` pages.
        """
        num_places = self._config.max_batch_sequences - self._queues.num_holding
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
        return Reservation(grant.pages[: grant.num_filled], grant.pages[grant.num_filled :], grant.num_dropped)

    def keep_whole(self, sequence: Sequence, *, keeps: bool) -> None:
        """Sets whether a sequence keeps even the pages that none of its later tokens reads."""
        self._pages.keep_whole(sequence, keeps=keeps)

    @property
    def _is_full(self) -> bool:
        return self._queues.num_holding >= self._config.max_batch_sequences

    @property
    def _num_kept_back(self) -> int:
        """The number of pages that new sequences leave to running ones; 0 if none runs."""
        return self._watermark_pages if self._queues.running else 0

    # Steps.

    def schedule(self, max_chunk_tokens: int | None = None) -> StepPlan:
        """Returns the next step: each running sequence's next token, then chunks of prompts within the token budget.

        The chunks have at most `max_chunk_tokens` tokens in total. No step may be in flight.
        """
        assert not self._steps, "a step is in flight"
        num_waiting = len(self._queues.waiting)
        self.preempted = []
        proposed = self._propose()
        self._queues.assign_rows(
            [
                entry
                for entry in self._queues.rowless
                if entry.sequence.num_uncomputed_tokens == 1 and entry.sequence not in proposed
            ]
        )
        # First one token each (decode), then chunks, so that a long prompt does not delay running streams.
        without_room = self._table.without_room()
        if len(without_room) <= self._pool.num_available:
            self._pages.extend_rows(without_room)
        else:
            for entry in self._queues.by_rank(without_room):
                if entry.sequence in self._table:  # not preempted for an earlier sequence
                    self._make_room(entry, 1)
        verified = self._schedule_verified(proposed)
        budget = self._chunk_budget(max_chunk_tokens, sum(item.num_positions for item in verified))
        chunks = [*verified, *self._schedule_chunks(budget, proposed)]
        # A preemption may have taken the pages of a sequence that was scheduled earlier in this same step.
        chunks = [chunk for chunk in chunks if chunk.sequence.pages]
        if (
            len(self._queues.waiting) <= num_waiting
        ):  # otherwise a sequence was just preempted and must not return at once
            chunks += self._admit_waiting(budget)
        return self._steps.launch(chunks)

    def schedule_ahead(self, max_chunk_tokens: int | None = None) -> StepPlan | None:
        """Returns the step after the one in flight, before that has sampled its tokens: one more token for every
        sequence that decodes or gets its first token in it, and chunks of prompts as in `schedule`.

        Returns None if it has to wait because there are too few pages or sampling depends on the text. Never preempts.
        """
        if len(self._steps) != 1 or self._steps.newest.speculates or self._pays_to_propose():
            return None
        prompts = assign_rows_ahead(self._queues, self._steps)
        without_room = self._table.without_room()
        if prompts is None or self._table.needs_text():
            return None
        budget = self._chunk_budget(max_chunk_tokens)
        chunks, num_pages = [], len(without_room)
        for prompt in prompts:
            if num_tokens := budget.take(prompt.sequence, prompt.num_tokens):
                chunks.append(replace(prompt, num_tokens=num_tokens))
                num_pages += self._pages.num_missing(chunks[-1])
        samples_by_text = any(chunk.is_sampled and chunk.sequence.sampling_needs_text for chunk in chunks)
        if num_pages > self._pool.num_available or samples_by_text or self._first_waiting_needs_text():
            return None
        self._pages.extend_rows(without_room)
        for chunk in chunks:
            self._pages.extend(chunk)
        return self._steps.launch([*chunks, *self._admit_waiting(budget, is_ahead=True)]) or None

    def _first_waiting_needs_text(self) -> bool:
        """Returns whether the first waiting sequence could be admitted but its sampling depends on its text, so that
        its step cannot be scheduled ahead.
        """
        waiting = self._queues.waiting
        return bool(waiting) and not self._is_full and waiting[0].sequence.sampling_needs_text

    def _chunk_budget(self, max_chunk_tokens: int | None, num_verified: int = 0) -> ChunkBudget:
        budget = self._config.max_batch_tokens - len(self._table) - num_verified
        return ChunkBudget(budget if max_chunk_tokens is None else min(budget, max_chunk_tokens))

    def _schedule_chunks(self, budget: ChunkBudget, proposed: Collection[Sequence]) -> list[ScheduledSequence]:
        chunks: list[ScheduledSequence] = []
        # Streaming sequences with tokens forced by their grammars go before prompts.
        for entry in sorted(self._queues.rowless, key=lambda entry: not entry.sequence.is_fast_forwarding):
            if budget.is_spent:
                break
            if entry.sequence in proposed or entry not in self._queues.running:
                continue
            num_tokens = budget.take(entry.sequence, entry.sequence.num_uncomputed_tokens)
            if num_tokens and self._make_room(entry, num_tokens):
                chunks.append(ScheduledSequence(entry.sequence, num_tokens))
        return chunks

    def _admit_waiting(self, budget: ChunkBudget, is_ahead: bool = False) -> list[ScheduledSequence]:
        chunks: list[ScheduledSequence] = []
        while self._queues.waiting and not budget.is_spent:
            entry = self._queues.waiting[0]
            if is_ahead and entry.sequence.sampling_needs_text:
                break
            if self._is_full or not self._admit(entry):
                break
            room = len(entry.sequence.pages) * self._page_size - entry.sequence.num_computed_tokens
            num_tokens = budget.take(entry.sequence, min(entry.sequence.num_uncomputed_tokens, room))
            if not num_tokens:  # admitted, but other prompts are scored in this step or it needs more pages
                break
            chunks.append(ScheduledSequence(entry.sequence, num_tokens))
        return chunks

    def _admit(self, entry: TrackedSequence) -> bool:
        grant = self._pages.allocate(entry.sequence, len(entry.sequence.token_ids), self._num_kept_back)
        if grant is None:
            return False
        self._pages.hold(entry.sequence, grant)
        if entry.num_preemptions == 0:
            entry.num_cached_tokens = entry.sequence.num_computed_tokens
        self._queues.admit(entry)
        return True

    def _make_room(self, entry: TrackedSequence, num_tokens: int) -> bool:
        """Allocates pages for the next `num_tokens`, preempting other sequences if necessary. Returns False if it
        preempted this one.
        """
        chunk = ScheduledSequence(entry.sequence, num_tokens)
        while True:
            try:
                self._pages.extend(chunk)
                return True
            except OutOfPages:
                victim = choose_victim(self._queues.behind(entry)) or entry
                self._preempt(victim)
                if victim is entry:
                    return False

    def _preempt(self, entry: TrackedSequence) -> None:
        self._queues.stop(entry)
        self.metrics.add(PREEMPTIONS)
        self.preempted.append(entry.sequence)
        self.metrics.add(PREEMPTED_TOKENS, entry.sequence.num_computed_tokens)
        self.drop_pages(entry.sequence)
        entry.num_preemptions += 1
        self._queues.wait(entry)

    # Speculation.

    def _propose(self) -> Mapping[Sequence, tuple[int, ...]]:
        """Returns the tokens to verify in the next step, and withdraws the rows of their sequences."""
        decoding = self._decoding()
        if self._speculator is None or not decoding:
            return {}
        limit = min(SCORED_TOKENS, self._config.max_batch_tokens - len(decoding))
        proposed = self._speculator.propose(decoding, self._table.num_left, limit)
        for sequence in proposed:
            self._queues.withdraw_row(sequence)
        return proposed

    def _pays_to_propose(self) -> bool:
        """Returns whether the step after the one in flight should verify proposals, for which it would have to wait."""
        step = self._steps.newest.step
        if self._asked[0] != step:  # each call during a step in flight would ask again
            decoding = self._decoding()
            pays = False
            if decoding and self._speculator is not None:
                pays = self._speculator.would_propose(decoding, self._table.num_left)
            self._asked = step, pays
        return self._asked[1]

    def _decoding(self) -> list[Sequence]:
        """Returns the sequences that get one token each in the next step. Returns none if proposals for so many cannot
        pay, or if prompts are computed too, since such a step is long enough already.
        """
        num_running = len(self._queues.running)
        if self._speculator is None or not num_running or self._queues.waiting:
            return []
        if not self._speculator.may_pay(num_running):
            return []
        rowless = [entry.sequence for entry in self._queues.rowless]
        if any(sequence.num_uncomputed_tokens > 1 for sequence in rowless):
            return []
        return [*self._table.sequences, *rowless]

    def _schedule_verified(self, proposed: Mapping[Sequence, tuple[int, ...]]) -> list[ScheduledSequence]:
        """Returns the sequences with as many of their proposed tokens as free pages allow, since nothing is preempted
        for a proposal.
        """
        chunks: list[ScheduledSequence] = []
        for entry in self._queues.by_rank(proposed):
            sequence = entry.sequence
            if not sequence.pages or not self._make_room(entry, 1):
                continue
            num_spare = max(0, self._pool.num_available - self._watermark_pages)
            room = (len(sequence.pages) + num_spare) * self._page_size - len(sequence.token_ids)
            chunk = ScheduledSequence(sequence, 1, proposed=proposed[sequence][: max(0, room)])
            self._pages.extend(chunk)
            chunks.append(chunk)
        return chunks

    def append_verified(self, sequence: Sequence, token_id: int) -> None:
        """Appends a further token that the step just recorded has sampled; the KV before it is there."""
        sequence.token_ids.append(token_id)
        self._pages.share_full(sequence)

    # Several steps at once.

    def num_steps_alike(self, plan: StepPlan, limit: int, *, awaits_pages: bool = False) -> int:
        """Returns how many steps, including `plan`, compute the same rows and nothing else, at most `limit`.

        They do so until a row ends or pages run out, unless another method is called. If a sequence waits to be
        computed here or, as `awaits_pages` says, for a reservation, they stop when a page is filled: what it caches may
        let that sequence begin.
        """
        if plan.chunks or self._queues.rowless or self.preempted:
            return 1
        rows = plan.rows
        num_steps = min(limit, int((rows.members.last_R - rows.positions_R).min()) + 1)
        if awaits_pages or self._queues.waiting:
            num_steps = min(num_steps, self._page_size - int((rows.positions_R % self._page_size).max()))
        while num_steps > 1 and int(self._table.num_missing_pages(num_steps - 1).sum()) > self._pool.num_available:
            num_steps //= 2
        return max(1, num_steps)

    def advance(self, num_steps: int, append: Callable[[int], None], *, goes_on: bool = False) -> None:
        """Takes several steps at once that compute only rows; `append(n)` appends the next n tokens of every sequence.

        `goes_on` says that another such step has begun. No step may be in flight. The state is the same as after that
        many calls of `schedule` and `record`, so that simulations can skip them.
        """
        assert not self._steps, "a step is in flight"
        while num_steps:
            num_together = self._num_together(num_steps)
            self._pages.extend_rows_by(num_together)
            append(num_together)
            filled = self._table.advance(num_together)
            self._pages.share_filled(filled)
            self._steps.drop_behind(filled)
            num_steps -= num_together
        if goes_on:
            self._pages.extend_rows_by(1)

    def _num_together(self, num_steps: int) -> int:
        """Returns how many steps may get their pages before any of them fills one.

        Which pages an eviction takes depends on which are cached by then. So if pages have to be evicted, the steps end
        with the first one that fills a page.
        """
        if int(self._table.num_missing_pages(num_steps).sum()) <= self._pool.num_free:
            return num_steps
        return min(num_steps, self._table.num_steps_to_fill())

    # Ends of steps.

    def cancel_ahead(self) -> None:
        """Cancels the step scheduled after the one in flight, which has failed."""
        self._steps.cancel_ahead()

    def record(
        self, plan: StepPlan, tokens_R: Seq[int] | np.ndarray, chunk_tokens: Seq[int | None]
    ) -> Collection[Sequence]:
        """Ends the oldest step in flight and appends its tokens: one for each row, one or None for each chunk.

        Returns the sequences whose tokens are discarded.
        """
        return self._steps.record(plan, tokens_R, chunk_tokens)

    def record_some(self, work: Seq[ScheduledSequence], token_ids: Seq[int | None]) -> Collection[Sequence]:
        """Ends the only step in flight like `record`, but records only the part of it that did not fail."""
        return self._steps.record_some(work, token_ids)

    def commit(self, work: Seq[ScheduledSequence], output: StepOutput) -> list[tuple[Sequence, SampledToken]]:
        """Calls `record` for a plan and `record_some` for anything else. Returns each token that was appended."""
        token_ids = [None if token is None else token.token_id for token in output.tokens]
        if isinstance(work, StepPlan):
            num_rows = len(work.rows)
            discarded = self.record(work, cast(list[int], token_ids[:num_rows]), token_ids[num_rows:])
        else:
            discarded = self.record_some(work, token_ids)
        pairs = zip(work, output.tokens, strict=True)
        return [(item.sequence, token) for item, token in pairs if token is not None and item.sequence not in discarded]

    def check_integrity(self) -> None:
        """Raises AssertionError unless every sequence and page is where it belongs; no step may be in flight."""
        self._table.check_integrity()
        self._queues.check_integrity()
        self._steps.check_integrity()
