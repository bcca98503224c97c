"""Decides how many bulk sequences a decode step may compute, from the predicted cost of steps. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from decode_worker.schedule.pace import Pace
from decode_worker.schedule.step_costs import StepCosts
from engine.step.sequence import Sequence
from penstock.scheduling.bulk_lane import BulkStepLimit
from penstock.types import Lane

_LEAST_STEP = 1.25  # times a step of one sequence: as long may a step of bulk alone be in any case
_SHARE_OF_STEP = 0.03  # by which bulk rows may lengthen a step of others; 0.02 is left for what is not predicted


@dataclass(frozen=True, slots=True)
class BulkLimits:
    """The most that a step computes of the bulk lane."""

    rows_beside: int = 0  # sequences that decode beside others
    rows_alone: int | None = None  # sequences in a step of their own; None: any number
    tokens_alone: int | None = None  # prompt tokens in such a step
    may_follow: bool = True  # whether such a step may be scheduled while another one is in flight


UNLIMITED_ALONE = BulkLimits()


class BulkPolicy:
    """Owns the limit on the length of bulk steps; `steps` and `pace` say what they cost."""

    def __init__(self, steps: StepCosts, pace: Pace) -> None:
        self._steps = steps
        self._pace = pace
        self._limit = BulkStepLimit()

    def on_token(self, sequence: Sequence, submitted_s: float, now_s: float) -> None:
        """Takes a token of a request. Only first tokens of other lanes count."""
        if sequence.num_output_tokens == 1 and sequence.lane is not Lane.BULK:
            self._limit.on_first_token(now_s - submitted_s, now_s)

    def on_step(self, elapsed_s: float, now_s: float) -> None:
        """Takes a step that has computed bulk sequences alone."""
        self._limit.on_step(elapsed_s, now_s)

    def sweep(self, now_s: float) -> float | None:
        """Returns when bulk sequences that had to pause may be computed again."""
        return self._limit.sweep(now_s)

    def limits(self, has_bulk: bool, num_others: int, now_s: float) -> BulkLimits:
        """Returns the limits of the next step, for which `num_others` sequences of other lanes run."""
        if not has_bulk:
            return UNLIMITED_ALONE
        steps, beside = self._steps, 0
        if num_others:
            beside = steps.rows_within((1.0 + _SHARE_OF_STEP) * steps.step_s(num_others), num_others)
        if not self._limit.may_begin(now_s):
            return BulkLimits(beside, 0, 0)
        longest_s = self._limit.step_s(now_s)
        if longest_s is None:
            return BulkLimits(beside)
        num_rows = max(1, steps.rows_within(max(longest_s, _LEAST_STEP * steps.step_s(1)), 0))
        num_tokens = self._pace.chunk_tokens_within(longest_s)
        return BulkLimits(beside, num_rows, num_tokens, may_follow=not self._limit.rests)
