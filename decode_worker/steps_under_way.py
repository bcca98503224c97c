"""Decode steps from the moment they are scheduled until their tokens are recorded, and what must wait for them. Pure.

While a step is under way it may still write the pages of everybody that it computes. One rule makes it safe to ask
anything of the scheduler meanwhile: pages that are given back while a step is under way are free only when it is over.
What a step draws for a sequence that has lost its pages meanwhile is dropped.

Who has a row is the scheduler's; how far the rows are in their texts changes here alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Seq
from typing import Generic

from decode_worker.sequence_pages import SequencePages
from engine.page_pool import PagePool
from engine.sequence import ScheduledSequence, Sequence
from engine.step_plan import LaunchedT, Rows, StepPlan
from penstock.types import PageId


class StepsUnderWay(Generic[LaunchedT]):
    """Owns their plans, and pages parked until they are over."""

    def __init__(self, pool: PagePool, pages: SequencePages, rows: Rows[LaunchedT], page_size: int) -> None:
        self._pool = pool
        self._pages = pages
        self._rows = rows
        self._page_size = page_size
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

    def record(self, work: Seq[ScheduledSequence], token_ids: Seq[int | None]) -> Collection[Sequence]:
        """See `DecodeScheduler.record`."""
        if not self._plans:
            assert not work, "a step that was not scheduled"
            return ()
        plan = self._plans.popleft()
        void = self._dropped.keys() & {item.sequence for item in work} if self._dropped else ()
        num_rows = len(plan.rows.items) if work is plan else 0
        if void:
            for item, token_id in zip(work[:num_rows], token_ids, strict=False):
                if item.sequence not in void:
                    self._record_one(item, token_id)
        else:
            self._record_rows(plan.rows.items[:num_rows], token_ids)
            for place in plan.rows.filled(self._page_size) if num_rows else ():
                self._pages.share_full(work[place].sequence)
        for item, token_id in zip(work[num_rows:], token_ids[num_rows:], strict=True):
            if item.sequence not in void:
                self._record_one(item, token_id)
        if work is not plan:
            self._rows.rewind()
        else:
            self._rows.settle(plan.step, [token or 0 for token in token_ids] if plan.chunks else token_ids)
        self._free_parked(plan.step if self._plans else self._num_steps)
        return void

    def _record_rows(self, items: list[ScheduledSequence], token_ids: Seq[int | None]) -> None:
        for item, token_id in zip(items, token_ids, strict=False):
            sequence = item.sequence
            sequence.num_computed_tokens += 1
            sequence.token_ids.append(token_id)  # type: ignore[arg-type]  # rows always draw

    def _record_one(self, item: ScheduledSequence, token_id: int | None) -> None:
        sequence = item.sequence
        sequence.num_computed_tokens += item.num_tokens
        self._pages.share_full(sequence)
        if token_id is not None:
            sequence.token_ids.append(token_id)

    def _free_parked(self, step: int) -> None:
        while self._parked and self._parked[0][0] <= step:
            self._pool.release(self._parked.popleft()[1])
        if self._dropped:
            self._dropped = {sequence: last for sequence, last in self._dropped.items() if last > step}

    def check_integrity(self) -> None:
        """Raises AssertionError where something waits. With no step under way."""
        assert not self._parked, "pages wait for a step that is over"
        assert not self._dropped
