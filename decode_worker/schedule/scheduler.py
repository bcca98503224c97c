"""Decides which sequences a decode step computes: admission, continuous batching, preemption, page reservation. Pure.

Decoding sequences have a row in a table (`engine.step.row_table`), and a step that only changes tokens takes a few
vector operations; only sequences that join, leave or need a page are handled one by one. `run_queues` decides which
sequences have a row, `steps_in_flight` how far each row is, and `sequence_pages` which pages it has.

A step is in flight from `schedule` until it is recorded. Meanwhile any method may be called: requests come and end,
pages land, sequences pause (`steps_in_flight` makes that safe). One more step may be scheduled ahead if all tokens that
it needs can stay on the device.

Every running sequence gets its next token first; the rest of the step's token budget goes to chunks of prompts that are
computed here. `sequence_room` decides which sequences fit, and preempts some for others.

Bulk sequences are held back while others run or wait, except as many as hardly lengthen a step (`bulk_policy`) and, in
one step of `BulkTurns`, as many as a step of their own computes. If others lack pages or a place, bulk is preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import cast

import numpy as np

from decode_worker.schedule.bulk_policy import UNLIMITED_ALONE, BulkLimits
from decode_worker.schedule.chunk_budget import ChunkBudget
from decode_worker.schedule.prompts.prompt_steps import PromptSteps
from decode_worker.schedule.proposals import StepProposals
from decode_worker.schedule.run_ahead import assign_rows_ahead
from decode_worker.schedule.run_queues import BulkUse, RunQueues
from decode_worker.schedule.sequence_pages import SequencePages
from decode_worker.schedule.sequence_room import Reservation, SequenceRoom
from decode_worker.schedule.steps_in_flight import StepsInFlight
from engine.cache.page_pool import PagePool
from engine.cache.prefix_cache import PrefixCache
from engine.step.plan import StepPlan
from engine.step.row_table import RowTable
from engine.step.sequence import SampledToken, ScheduledSequence, Sequence, StepOutput
from engine.step.speculation.speculator import Speculator
from penstock.config import DecodeConfig
from penstock.errors import InternalError
from penstock.metrics.worker_metrics import WorkerMetrics
from penstock.scheduling.bulk_lane import BulkTurns


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
        *,
        has_prompt_stream: bool = False,
    ) -> None:
        """`rows` must be empty. Only this scheduler uses `rows` and `speculator`; without a speculator nothing is
        proposed. With a prompt stream, prompts that are not bulk are computed in its steps (`prompts`).
        """
        self._pool = pool
        self._page_size = page_size
        self._config = config
        self._pages = SequencePages(pool, cache, page_size, rows, config.max_batch_tokens)
        self._table = rows
        self._queues = RunQueues(rows, keeps_apart=has_prompt_stream)
        self._steps = StepsInFlight(pool, self._pages, rows)
        self._room = SequenceRoom(pool, page_size, self._queues, self._pages, self._steps, config)
        self._proposals = StepProposals(self._queues, rows, speculator, config.max_batch_tokens)
        self.prompts = PromptSteps(self._queues, self._room, self._pages, self._steps, config.max_batch_tokens)
        self._turns = BulkTurns()
        self._is_shared = False  # whether the newest step leaves bulk sequences out for others
        self.preempted: list[Sequence] = []  # preempted for the newest step of `schedule`

    @property
    def metrics(self) -> WorkerMetrics:
        return self._room.metrics

    @property
    def num_running(self) -> int:
        return len(self._queues.running)

    @property
    def num_running_others(self) -> int:
        """The number of running sequences that are not bulk."""
        return self._queues.num_running_others

    @property
    def has_bulk(self) -> bool:
        """Returns whether bulk sequences run or wait to be computed here."""
        return self._queues.has_bulk

    @property
    def is_decoding(self) -> bool:
        """Returns whether a sequence that is not bulk and has tokens may get another one in the next step."""
        num_others = self._queues.num_running_others
        rowless = [entry.sequence for entry in self._queues.rowless if not entry.is_bulk]
        if num_others and (self._steps or len(rowless) + len(self._queues.apart) < num_others):
            return True
        return any(sequence.num_uncomputed_tokens == 1 or sequence.is_fast_forwarding for sequence in rowless)

    @property
    def num_waiting(self) -> int:
        return len(self._queues.waiting) + len(self._queues.waiting_bulk)

    @property
    def num_uncomputed_tokens(self) -> int:
        """The number of tokens of prompts and preempted sequences that this worker has yet to compute."""
        return self._queues.num_uncomputed_tokens

    @property
    def bulk_use(self) -> BulkUse:
        """Returns what the bulk sequences hold and have yet to compute."""
        return self._queues.bulk_use

    @property
    def num_uncomputed_tokens_of_others(self) -> int:
        """The part of `num_uncomputed_tokens` that is not bulk."""
        return self._queues.num_uncomputed_tokens_of_others

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

    def rank(self, sequence: Sequence) -> tuple[bool, float, int]:
        """Returns a tracked sequence's rank; lower goes first, and all bulk goes last."""
        entry = self._queues[sequence]
        return entry.is_bulk, *entry.rank

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
        """Returns whether it decodes: it runs, and all its tokens but the last have KV here."""
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
            self._proposals.forget(sequence)

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
        """Returns pages for a prompt that is computed elsewhere; see `SequenceRoom.reserve`."""
        return self._room.reserve(sequence, num_tokens, num_landing, num_unneeded)

    def keep_whole(self, sequence: Sequence, *, keeps: bool) -> None:
        """Sets whether a sequence keeps even the pages that none of its later tokens reads."""
        self._pages.keep_whole(sequence, keeps=keeps)

    # Steps.

    def schedule(self, max_chunk_tokens: int | None = None, bulk: BulkLimits = UNLIMITED_ALONE) -> StepPlan:
        """Returns the next step: each running sequence's next token, then chunks of prompts within the token budget.

        The chunks have at most `max_chunk_tokens` tokens in total. `bulk` limits bulk sequences. No step may be in
        flight.
        """
        assert not self._steps, "a step is in flight"
        self._room.awaits_bulk = self._room.awaits_pages = self._room.is_owed_pages = False
        num_bulk = self._queues.has_bulk
        is_shared = self._queues.has_others and not self._turns.is_due
        plan = self._schedule(max_chunk_tokens, bulk, is_shared)
        if not plan and num_bulk and is_shared:  # the others wait for pages or places, which bulk may free
            is_shared = False
            plan = self._schedule(max_chunk_tokens, bulk, is_shared)
        self._is_shared = is_shared
        if num_bulk:
            self._turns.on_step(was_turn=not is_shared)
        self.preempted = self._room.take_preempted()
        return plan

    def _schedule(self, max_chunk_tokens: int | None, bulk: BulkLimits, is_shared: bool) -> StepPlan:
        num_preempted = len(self._room.preempted)
        self._choose_bulk(bulk, is_shared)
        proposed = self._proposals.propose()
        self._queues.assign_rows(
            [
                entry
                for entry in self._queues.rowless
                if entry.sequence.num_uncomputed_tokens == 1 and entry.sequence not in proposed
            ]
        )
        # First one token each (decode), then chunks, so that a long prompt does not delay running streams.
        without_room = self._table.without_room()
        if self._pages.has_room(without_room):
            self._pages.extend_rows(without_room)
        else:
            for entry in self._queues.by_rank(without_room):
                if entry.sequence in self._table:  # not preempted for an earlier sequence
                    self._room.extend(entry, 1)
        verified = self._schedule_verified(proposed)
        num_verified = sum(item.num_positions for item in verified)
        budget = self._chunk_budget(max_chunk_tokens, 0 if is_shared else bulk.tokens_alone, num_verified)
        chunks = [*verified, *self._schedule_chunks(budget, proposed)]
        # A preemption may have taken the pages of a sequence that was scheduled earlier in this same step.
        chunks = [chunk for chunk in chunks if chunk.sequence.pages]
        if (
            len(self._room.preempted) == num_preempted
        ):  # otherwise a sequence was just preempted and must not return at once
            chunks += self._admit_waiting(budget)
            chunks = [chunk for chunk in chunks if chunk.sequence.pages]
        return self._launch(chunks)

    def _launch(self, chunks: list[ScheduledSequence]) -> StepPlan:
        return self._steps.launch(chunks, self._proposals.wants_states(chunks))

    def _choose_bulk(self, bulk: BulkLimits, is_shared: bool) -> None:
        """Holds back the running bulk sequences beyond what the next step computes of them, and releases the others,
        in order of rank.
        """
        num_left = bulk.rows_beside if is_shared else bulk.rows_alone
        for entry in self._queues.running_bulk():
            if num_left == 0 or (is_shared and entry.sequence.num_uncomputed_tokens > 1):
                self._queues.hold_back(entry)
            else:
                self._queues.release(entry)
                num_left = None if num_left is None else num_left - 1

    def schedule_ahead(
        self, max_chunk_tokens: int | None = None, bulk: BulkLimits = UNLIMITED_ALONE
    ) -> StepPlan | None:
        """Returns the step after the one in flight, before that has sampled its tokens: one more token for every
        sequence that decodes or gets its first token in it, and chunks of prompts as in `schedule`.

        Returns None if it has to wait because there are too few pages, sampling depends on the text, or bulk sequences
        are to be held back, released or preempted. Never preempts.
        """
        if (
            len(self._steps) != 1
            or self._room.awaits_pages
            or self._room.is_owed_pages
            or self._steps.newest.speculates
            or self._proposals.pays_after(self._steps.newest.step)
        ):
            return None
        has_bulk, is_shared = self._queues.has_bulk, self._queues.has_others
        if has_bulk and not self._may_run_ahead(bulk, is_shared):
            return None
        prompts = assign_rows_ahead(self._queues, self._steps)
        without_room = self._table.without_room()
        if prompts is None or self._table.needs_text():
            return None
        budget = self._chunk_budget(max_chunk_tokens, 0 if is_shared else bulk.tokens_alone)
        chunks = []
        for prompt in prompts:
            num_left = self._room.next_tokens(self._queues[prompt.sequence], prompt.fixed_start)
            if num_tokens := budget.take(prompt.sequence, num_left):
                chunks.append(replace(prompt, num_tokens=num_tokens))
        samples_by_text = any(chunk.is_sampled and chunk.sequence.sampling_needs_text for chunk in chunks)
        if samples_by_text or self._first_waiting_needs_text() or not self._pages.has_room(without_room, chunks):
            return None
        self._pages.extend_rows(without_room)
        for chunk in chunks:
            self._pages.extend(chunk)
        plan = self._launch([*chunks, *self._admit_waiting(budget, is_ahead=True)])
        if plan and has_bulk:
            self._turns.on_step(was_turn=not is_shared)
        return plan or None

    def _may_run_ahead(self, bulk: BulkLimits, is_shared: bool) -> bool:
        """Returns whether the step after the one in flight may compute the same bulk sequences."""
        if is_shared != self._is_shared or self._room.awaits_bulk or (is_shared and self._turns.is_due):
            return False
        if self._queues.waiting and self._queues.num_running_bulk:
            return False
        if not is_shared and not bulk.may_follow:
            return False
        num_active = self._queues.num_running_bulk - len(self._queues.held)
        return is_shared or not self._queues.held or (bulk.rows_alone is not None and num_active >= bulk.rows_alone)

    def _first_waiting_needs_text(self) -> bool:
        """Returns whether the first waiting sequence could be admitted but its sampling depends on its text, so that
        its step cannot be scheduled ahead.
        """
        waiting = self._queues.waiting_for_chunks or self._queues.waiting_bulk
        return bool(waiting) and not self._room.is_full and waiting[0].sequence.sampling_needs_text

    def _chunk_budget(
        self, max_chunk_tokens: int | None, max_bulk_tokens: int | None, num_verified: int = 0
    ) -> ChunkBudget:
        budget = self._config.max_batch_tokens - len(self._table) - num_verified
        return ChunkBudget(budget if max_chunk_tokens is None else min(budget, max_chunk_tokens), max_bulk_tokens)

    def _schedule_chunks(self, budget: ChunkBudget, proposed: Collection[Sequence]) -> list[ScheduledSequence]:
        chunks: list[ScheduledSequence] = []
        # Streaming sequences with tokens forced by their grammars go before prompts.
        for entry in sorted(self._queues.rowless, key=lambda entry: not entry.sequence.is_fast_forwarding):
            if budget.is_spent:
                break
            if entry.sequence in proposed or entry not in self._queues.running:
                continue
            num_tokens = budget.take(entry.sequence, self._room.next_tokens(entry))
            if num_tokens and self._room.extend(entry, num_tokens):
                chunks.append(ScheduledSequence(entry.sequence, num_tokens))
        return chunks

    def _admit_waiting(self, budget: ChunkBudget, is_ahead: bool = False) -> list[ScheduledSequence]:
        chunks: list[ScheduledSequence] = []
        num_preempted = len(self._room.preempted)
        while not budget.is_spent:
            may_admit_bulk = budget.has_bulk_tokens and len(self._room.preempted) == num_preempted
            waiting = self._queues.waiting_for_chunks or (self._queues.waiting_bulk if may_admit_bulk else ())
            if not waiting:
                break
            entry = waiting[0]
            if is_ahead and entry.sequence.sampling_needs_text:
                break
            if not self._room.admit(entry, may_preempt=not is_ahead):
                break
            num_tokens = budget.take(entry.sequence, self._room.num_tokens_within(entry))
            if not num_tokens:  # admitted, but other prompts are scored in this step or it needs more pages
                break
            chunks.append(ScheduledSequence(entry.sequence, num_tokens))
        return chunks

    # Speculation.

    def _schedule_verified(self, proposed: Mapping[Sequence, tuple[int, ...]]) -> list[ScheduledSequence]:
        """Returns the sequences with as many of their proposed tokens as free pages allow, since nothing is preempted
        for a proposal.
        """
        chunks: list[ScheduledSequence] = []
        for entry in self._queues.by_rank(proposed):
            sequence = entry.sequence
            if not sequence.pages or not self._room.extend(entry, 1):
                continue
            num_spare = max(0, self._pool.num_available - self._room.watermark_pages)
            room = (len(sequence.pages) + num_spare) * self._page_size - len(sequence.token_ids)
            whole = ScheduledSequence(sequence, 1, proposed=proposed[sequence][: max(0, room)])
            chunk = whole if self._pages.has_room((), [whole]) else ScheduledSequence(sequence, 1)
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
        queues = self._queues
        if plan.chunks or queues.rowless or queues.held or self.preempted or (queues.has_bulk and queues.has_others):
            return 1
        rows = plan.rows
        num_steps = min(limit, int((rows.members.last_R - rows.positions_R).min()) + 1)
        if awaits_pages or self.num_waiting:
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

        An eviction chooses among the pages that are cached by then. So if pages have to be evicted, the steps end
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

        Returns the sequences whose tokens are discarded. Also ends the step of the prompt stream.
        """
        if plan.is_apart:
            return self.prompts.record(plan, chunk_tokens)
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
