"""Reports how long each step took, how many proposed tokens it accepted, and its hidden states, to everything that
learns from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from decode_worker.drafting.draft_head import DraftHead
from decode_worker.drafting.load_draft import Draft
from decode_worker.events import DecodeEvents
from decode_worker.prefill.prefill_attempts import PrefillAttempts
from decode_worker.schedule.pace import Pace
from engine.step.hidden_states import HiddenStates
from engine.step.plan import StepPlan
from engine.step.sequence import ScheduledSequence, Sequence
from engine.step.speculation.speculator import Speculator


class StepMeasurements:
    """Feeds the worker's pace, the prefill placement, the speculator and the metrics of the process."""

    def __init__(
        self,
        pace: Pace,
        prefills: PrefillAttempts,
        speculator: Speculator | None,
        draft: Draft | None,
        events: DecodeEvents,
    ) -> None:
        self._pace = pace
        self._prefills = prefills
        self._speculator = speculator
        self._head = draft if isinstance(draft, DraftHead) else None
        self._events = events

    def on_step(self, plan: StepPlan, elapsed_s: float, num_further: int, *, is_beside_prompts: bool) -> None:
        """Takes a step that is not yet recorded; `num_further` of its tokens are accepted proposals. See
        `StepCosts.on_plan` for `is_beside_prompts`.
        """
        if plan.speculates:
            self._pace.on_speculation(len(plan), len(plan) + num_further, elapsed_s)
        else:
            self.on_recomputed(plan, elapsed_s)
            self._prefills.steps.on_plan(plan, elapsed_s, is_beside_prompts=is_beside_prompts)
        self._events.on_step(len(plan), plan.num_tokens, elapsed_s)

    def on_finished(self, plan: StepPlan, elapsed_s: float, num_further: int) -> None:
        """Takes the same step once its tokens are delivered; `elapsed_s` includes that."""
        if plan.is_apart:
            return
        if self._speculator is not None and (not plan.chunks or all(chunk.num_tokens == 1 for chunk in plan.chunks)):
            num_proposed = plan.num_tokens - len(plan)
            self._speculator.on_step(len(plan), num_proposed, num_further, elapsed_s, plan.taps)

    def on_hidden_states(
        self, plan: StepPlan, hidden: Mapping[int, HiddenStates], sequences: Collection[Sequence]
    ) -> None:
        """Takes the hidden states of a step, by place, once its tokens are appended; `sequences` are those that go
        on."""
        if self._head is None:
            return
        for place, states in hidden.items():
            if (sequence := plan[place].sequence) in sequences:
                self._head.observe(sequence, states)

    def on_recomputed(self, plan: StepPlan, elapsed_s: float) -> None:
        """Takes a step that was recomputed. Its duration is not typical of ordinary steps, but counts for the pace."""
        if plan.is_apart:
            self._pace.on_prompts(plan.num_tokens, plan.num_contexts, elapsed_s)
        else:
            self._pace.on_step(len(plan), plan.num_tokens, plan.num_contexts, elapsed_s)

    def on_verified(self, scheduled: ScheduledSequence, num_accepted: int) -> None:
        """Takes how many of a sequence's proposed tokens were accepted."""
        if self._speculator is not None and (num_proposed := len(scheduled.proposed)):
            kind = self._speculator.on_verified(scheduled.sequence, num_proposed, num_accepted)
            self._events.on_verified(kind, scheduled.sequence.lane, num_proposed, num_accepted)
