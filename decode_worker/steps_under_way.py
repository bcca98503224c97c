"""Decode steps from the moment they are scheduled until their tokens are recorded, and what must wait for them. Pure.

While a step is under way it may still write the pages of everybody that it computes. One rule makes it safe to ask
anything of the scheduler meanwhile: pages that are given back while a step is under way are free only when it is over.
What a step draws for a sequence that has lost its pages meanwhile is dropped.

Who has a row is the scheduler's; how far the rows are in their texts changes here alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from typing import Generic

from decode_worker.sequence_pages import SequencePages
from engine.page_pool import PagePool
from engine.sequence import ScheduledSequence, Sequence
from engine.step_plan import LaunchedT, Rows, RowTokens, StepPlan
from penstock.types import PageId


class StepsUnderWay(Generic[LaunchedT]):
    """Owns their plans, and pages parked until they are over."""

    def __init__(self, pool: PagePool, pages: SequencePages, rows: Rows[LaunchedT]) -> None:
        self._pool = pool
        self._pages = pages
        self._rows = rows
        self._plans: deque[StepPlan[LaunchedT]] = deque()
        self._num_steps = 0
        self._dropped: dict[Sequence, int] = {}  # lost their pages: what steps up to this one draw for them is void
        self._parked: deque[tuple[int, list[PageId]]] = deque()  # to be free when that step is over

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def can_be_followed(self) -> bool:
        """Whether there is one, and the next may be scheduled before its tokens are known."""
        return len(self._plans) == 1

    @property
    def newest(self) -> StepPlan[LaunchedT]:
        """With at least one under way."""
        return self._plans[-1]

    def places(self, sequences: Collection[Sequence]) -> dict[Sequence, int]:
        """Where those of them that the newest step computes, and not in vain, stand in its plan."""
        if not sequences:
            return {}
        wanted = set(sequences) - self._dropped.keys()
        return {item.sequence: place for place, item in enumerate(self.newest) if item.sequence in wanted}

    def computes(self, sequence: Sequence) -> bool:
        return any(item.sequence is sequence for plan in self._plans for item in plan)

    def launch(self, chunks: list[ScheduledSequence]) -> StepPlan[LaunchedT]:
        """The next step: a token for each row, and these. Empty, it is not under way."""
        self._num_steps += 1
        plan = StepPlan(self._rows.launch(self._num_steps), chunks)
        if plan:
            self._plans.append(plan)
        return plan

    def cancel_ahead(self) -> None:
        """The oldest has failed: the one after it, if there is one, is not computed."""
        if len(self._plans) > 1:
            self._plans.pop()
            self._rows.rewind()

    def give_back(self, sequence: Sequence) -> None:
        """The pages of a sequence that holds them no more: to the pool, once no step can write them."""
        if not self._plans:
            self._pool.release(sequence.pages)
            return
        self._dropped[sequence] = self._num_steps
        if sequence.pages:
            self._parked.append((self._num_steps, sequence.pages))

    def record(self, plan: StepPlan[LaunchedT], drawn: RowTokens, others: Seq[int | None]) -> Collection[Sequence]:
        """See `DecodeScheduler.record`."""
        if not plan:
            return ()
        oldest = self._plans.popleft()
        assert oldest is plan, "steps are recorded in order"
        void = self._void_of(plan)
        self._record_each(plan.chunks, others, void)
        self._pages.share_filled(self._rows.record(plan.rows, drawn, others, void))
        self._free_parked(plan.step if self._plans else self._num_steps)
        return void

    def record_some(self, work: Seq[ScheduledSequence], token_ids: Seq[int | None]) -> Collection[Sequence]:
        """See `DecodeScheduler.record_some`."""
        self._plans.popleft()
        void = self._void_of(work)
        self._record_each(work, token_ids, void)
        self._rows.rewind()
        self._free_parked(self._num_steps)
        return void

    def _void_of(self, work: Iterable[ScheduledSequence]) -> Collection[Sequence]:
        return self._dropped.keys() & {item.sequence for item in work} if self._dropped else ()

    def _record_each(
        self, work: Seq[ScheduledSequence], token_ids: Seq[int | None], void: Collection[Sequence]
    ) -> None:
        for item, token_id in zip(work, token_ids, strict=True):
            sequence = item.sequence
            if sequence in void:
                continue
            sequence.num_computed_tokens += item.num_tokens
            self._pages.share_full(sequence)
            if token_id is not None:
                sequence.token_ids.append(token_id)
                if sequence.num_uncomputed_tokens == 1:
                    sequence.num_computed = None  # it may have its row already

    def _free_parked(self, step: int) -> None:
        while self._parked and self._parked[0][0] <= step:
            self._pool.release(self._parked.popleft()[1])
        if self._dropped:
            self._dropped = {sequence: last for sequence, last in self._dropped.items() if last > step}

    def check_integrity(self) -> None:
        """Raises AssertionError where something waits. With no step under way."""
        assert not self._parked, "pages wait for a step that is over"
        assert not self._dropped
