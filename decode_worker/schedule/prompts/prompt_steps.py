"""Decides which chunks of prompts the prompt stream computes next, and records them. Pure.

The decode scheduler owns it. At most one step of the prompt stream is in flight, and it never runs ahead: the host
records a chunk before the next one, and before the first decode step that reads its pages. Sequences here are running,
in `RunQueues.apart`, until their prompt is computed; then they decode with the others.

Bulk prompts are not computed here: they remain chunks of decode steps, whose pace their policy sets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from collections.abc import Sequence as Seq

from decode_worker.schedule.chunk_budget import ChunkBudget
from decode_worker.schedule.run_queues import RunQueues, TrackedSequence
from decode_worker.schedule.sequence_pages import SequencePages
from decode_worker.schedule.sequence_room import SequenceRoom
from decode_worker.schedule.steps_in_flight import StepsInFlight
from engine.step.plan import StepPlan
from engine.step.sequence import ScheduledSequence, Sequence


class PromptSteps:
    """Plans the steps of one scheduler's prompt stream; the arguments are that scheduler's."""

    def __init__(
        self, queues: RunQueues, room: SequenceRoom, pages: SequencePages, steps: StepsInFlight, max_tokens: int
    ) -> None:
        """A step computes at most `max_tokens`."""
        self._queues = queues
        self._room = room
        self._pages = pages
        self._steps = steps
        self._max_tokens = max_tokens
        self._alone: deque[Sequence] = deque()  # sequences of a failed step, which are computed one by one
        self.preempted: list[Sequence] = []  # preempted for the newest step

    @property
    def in_flight(self) -> bool:
        """Returns whether a step of the prompt stream is in flight."""
        return self._steps.has_prompts

    def schedule(self) -> StepPlan:
        """Returns the next step: chunks of prompts in order of rank, those that have begun first.

        None may be in flight, but decode steps may. Preempts others only if there are none, because pages that a decode
        step in flight may write would not be free at once.
        """
        num_preempted = len(self._room.preempted)
        budget, chunks = ChunkBudget(self._max_tokens), []
        alone = self._next_alone()
        for entry in [alone] if alone is not None else tuple(self._queues.apart):
            if budget.is_spent:
                break
            if entry not in self._queues.apart:  # preempted for another one
                continue
            num_tokens = budget.take(entry.sequence, self._room.next_tokens(entry))
            if num_tokens and self._extend(entry, num_tokens):
                chunks.append(ScheduledSequence(entry.sequence, num_tokens))
        if alone is None and not self._room.is_owed_pages and len(self._room.preempted) == num_preempted:
            chunks += self._admit(budget)
        self.preempted = self._room.take_preempted()
        return self._steps.launch_prompts([chunk for chunk in chunks if chunk.sequence.pages])

    def _next_alone(self) -> TrackedSequence | None:
        """Returns the next sequence of a failed step that still waits for its next chunk."""
        while self._alone:
            sequence = self._alone.popleft()
            if sequence in self._queues and self._queues[sequence] in self._queues.apart:
                return self._queues[sequence]
        return None

    def _extend(self, entry: TrackedSequence, num_tokens: int) -> bool:
        """Allocates pages for the next `num_tokens`. Returns False if the sequence has to wait or was preempted."""
        if not self._steps:
            return self._room.extend(entry, num_tokens)
        chunk = ScheduledSequence(entry.sequence, num_tokens)
        if not self._room.has_pages(chunk):
            self._room.awaits_pages = True
            return False
        self._pages.extend(chunk)
        return True

    def _admit(self, budget: ChunkBudget) -> list[ScheduledSequence]:
        chunks: list[ScheduledSequence] = []
        num_owed = self._queues.num_rows_without_room  # a prompt that took these pages would be preempted for the rows
        while not budget.is_spent and self._queues.waiting:
            entry = self._queues.waiting[0]
            if not self._room.admit(entry, may_preempt=not self._steps, num_owed=num_owed):
                break
            if entry not in self._queues.apart:
                continue  # only its last token is left, which the next decode step computes
            num_tokens = budget.take(entry.sequence, self._room.num_tokens_within(entry))
            if not num_tokens:  # other prompts are scored in this step, or it needs more pages
                break
            chunks.append(ScheduledSequence(entry.sequence, num_tokens))
        return chunks

    def record(self, plan: StepPlan, token_ids: Seq[int | None]) -> Collection[Sequence]:
        """Ends the step in flight and appends its tokens, one or None for each chunk. Returns the sequences whose
        tokens are discarded.
        """
        discarded = self._steps.record_prompts(plan, token_ids)
        for item in plan:
            if item.sequence not in discarded and item.sequence.num_uncomputed_tokens == 1:
                self._queues.end_prompt(self._queues[item.sequence])
        return discarded

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """Ends a step that failed as a whole. Returns the sequence that caused it if there was only one; otherwise each
        is computed alone next.
        """
        discarded = self._steps.record_prompts(plan, ())
        left = [item.sequence for item in plan if item.sequence not in discarded]
        if len(plan) == 1:
            return left
        self._alone += left
        return []
