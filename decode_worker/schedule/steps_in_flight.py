"""Owns decode steps from the moment they are scheduled until their tokens are recorded. Pure.

A step in flight may still write the pages of every sequence that it computes. One rule makes any call of the scheduler
safe meanwhile: pages returned while a step is in flight become free only when it is over. Tokens that a step samples
for a sequence that has since lost its pages or got other tokens are discarded.

A step of the prompt stream may be in flight beside the decode steps. It writes only pages of its own sequences, so only
these wait for its end.

The scheduler decides which sequences have a row; only this module changes how far rows are in their texts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq

import numpy as np

from decode_worker.schedule.sequence_pages import SequencePages
from engine.cache.page_pool import PagePool
from engine.step.plan import StepPlan
from engine.step.row_table import RowTable
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.errors import InternalError
from penstock.types import PageId


class StepsInFlight:
    """Owns the plans of the steps, and the pages parked until these are over."""

    def __init__(self, pool: PagePool, pages: SequencePages, rows: RowTable) -> None:
        self._pool = pool
        self._pages = pages
        self._rows = rows
        self._no_rows = rows.launch(0)  # of steps of the prompt stream; the table is still empty
        self._plans: deque[StepPlan] = deque()
        self._num_steps = 0
        self._dropped: dict[
            Sequence, int
        ] = {}  # sequences that lost their pages or changed: tokens up to this step are void
        # Pages that are free once that step is over, and those whose windowed parts are.
        self._parked: deque[tuple[int, list[PageId], list[PageId]]] = deque()
        self._prompts: StepPlan | None = None  # the step of the prompt stream
        self._prompts_dropped: set[Sequence] = set()  # its sequences that have lost their pages
        self._prompts_parked: list[PageId] = []  # pages that are free once it is over
        self._prompts_parked_parts: list[PageId] = []  # those whose windowed parts are

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def newest(self) -> StepPlan:
        """The last scheduled step; at least one must be in flight."""
        return self._plans[-1]

    def places(self, sequences: Collection[Sequence]) -> dict[Sequence, int]:
        """Returns the places in the newest plan of sequences whose tokens will not be discarded."""
        if not sequences:
            return {}
        wanted = set(sequences) - self._dropped.keys()
        return {item.sequence: place for place, item in enumerate(self.newest) if item.sequence in wanted}

    def computes(self, sequence: Sequence) -> bool:
        return self._decodes(sequence) or self._prefills(sequence)

    def _decodes(self, sequence: Sequence) -> bool:
        return any(item.sequence is sequence for plan in self._plans for item in plan)

    def _prefills(self, sequence: Sequence) -> bool:
        return self._prompts is not None and any(item.sequence is sequence for item in self._prompts)

    def launch(self, chunks: list[ScheduledSequence], taps: bool = True) -> StepPlan:
        """Returns the next step: one token for each row, and `chunks`; see `StepPlan` for `taps`. An empty step does
        not count as in flight."""
        self._num_steps += 1
        plan = StepPlan(self._rows.launch(self._num_steps), chunks, taps)
        if plan:
            self._plans.append(plan)
        return plan

    def cancel_ahead(self) -> None:
        """Cancels the step scheduled after the oldest one, if there is one, because the oldest has failed."""
        if len(self._plans) > 1:
            self._plans.pop()
            self._rows.rewind()

    def supersede(self, sequence: Sequence) -> None:
        """Discards what the steps in flight sample for the sequence, because its text has changed."""
        if self._decodes(sequence):
            self._dropped[sequence] = self._num_steps

    def discarded(self, plan: StepPlan) -> Collection[Sequence]:
        """Returns the sequences of a step in flight whose tokens will be discarded, as far as is known now."""
        return self._discarded(plan)

    def give_back(self, sequence: Sequence) -> None:
        """Returns the sequence's pages to the pool once no step can still write them."""
        if self._prefills(sequence):
            self._prompts_dropped.add(sequence)
            self._prompts_parked += sequence.held_pages
            self._prompts_parked_parts += sequence.windowed_pages
            return
        if self._plans:
            self._dropped[sequence] = self._num_steps
        self._give_back(sequence.held_pages, sequence.windowed_pages)

    def _give_back(self, pages: list[PageId], windowed: list[PageId]) -> None:
        if not self._plans:
            self._pool.release(pages, windowed)
        elif pages or windowed:
            self._parked.append((self._num_steps, pages, windowed))

    def drop_behind(self, sequences: Iterable[Sequence]) -> None:
        """Returns pages of running sequences that are behind the window of every layer to the pool, and the windowed
        parts of others.
        """
        for sequence in sequences:
            self._give_back(self._pages.drop_behind(sequence), self._pages.strip_behind(sequence))

    def record(
        self, plan: StepPlan, tokens_R: Seq[int] | np.ndarray, chunk_tokens: Seq[int | None]
    ) -> Collection[Sequence]:
        """Ends the oldest step; see `DecodeScheduler.record`."""
        if not plan:
            return ()
        if self._plans.popleft() is not plan:  # otherwise pages that a later step writes would be returned
            raise InternalError("steps were recorded in a different order than they were scheduled")
        discarded = self._discarded(plan)
        self._record_each(plan.chunks, chunk_tokens, discarded)
        filled = self._rows.record(plan.rows, tokens_R, chunk_tokens, discarded)
        self._pages.share_filled(filled)
        self.drop_behind(filled)
        self._free_parked(plan.step if self._plans else self._num_steps)
        return discarded

    def record_some(self, work: Seq[ScheduledSequence], token_ids: Seq[int | None]) -> Collection[Sequence]:
        """Ends a step that failed in part; see `DecodeScheduler.record_some`."""
        self._plans.popleft()
        discarded = self._discarded(work)
        self._record_each(work, token_ids, discarded)
        self._rows.rewind()
        self._free_parked(self._num_steps)
        return discarded

    # The prompt stream.

    @property
    def has_prompts(self) -> bool:
        """Returns whether the prompt stream has a step in flight."""
        return self._prompts is not None

    @property
    def awaits_prompts(self) -> bool:
        """Returns whether pages become free when the step of the prompt stream is over."""
        return bool(self._prompts_parked)

    def launch_prompts(self, chunks: list[ScheduledSequence]) -> StepPlan:
        """Returns the next step of the prompt stream, which must have none in flight. An empty one does not count."""
        assert self._prompts is None, "a step of the prompt stream is in flight"
        plan = StepPlan(self._no_rows, chunks, is_apart=True)
        if plan:
            self._prompts = plan
        return plan

    def record_prompts(self, plan: StepPlan, token_ids: Seq[int | None]) -> Collection[Sequence]:
        """Ends the step of the prompt stream and appends its tokens. Returns the sequences whose tokens are discarded.

        A step that failed records no tokens: `token_ids` is empty.
        """
        if plan is not self._prompts:
            raise InternalError("a step of the prompt stream was recorded that is not in flight")
        self._prompts = None
        discarded, self._prompts_dropped = self._prompts_dropped, set()
        parked, self._prompts_parked = self._prompts_parked, []
        parts, self._prompts_parked_parts = self._prompts_parked_parts, []
        self._pool.release(parked, parts)
        if token_ids:
            self._record_each(plan.chunks, token_ids, discarded)
        return discarded

    def _discarded(self, work: Iterable[ScheduledSequence]) -> Collection[Sequence]:
        return self._dropped.keys() & {item.sequence for item in work} if self._dropped else ()

    def _record_each(
        self, work: Seq[ScheduledSequence], token_ids: Seq[int | None], discarded: Collection[Sequence]
    ) -> None:
        for item, token_id in zip(work, token_ids, strict=True):
            sequence = item.sequence
            if sequence in discarded:
                continue
            sequence.num_computed_tokens += item.num_tokens
            self._pages.share_full(sequence)
            if token_id is not None:
                sequence.token_ids.append(token_id)
                if sequence.num_uncomputed_tokens == 1:
                    sequence.start_decoding()  # it may already have its row
        self.drop_behind(item.sequence for item in work if item.sequence not in discarded)

    def _free_parked(self, step: int) -> None:
        while self._parked and self._parked[0][0] <= step:
            _, pages, windowed = self._parked.popleft()
            self._pool.release(pages, windowed)
        if self._dropped:
            self._dropped = {sequence: last for sequence, last in self._dropped.items() if last > step}

    def check_integrity(self) -> None:
        """Raises AssertionError if pages or sequences wait for a step; none may be in flight."""
        assert not self._parked, "pages wait for a step that is over"
        assert not self._dropped
        assert self._prompts is None, "the prompt stream has a step in flight"
        assert not self._prompts_parked
        assert not self._prompts_dropped
