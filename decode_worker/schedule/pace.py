"""Measures how fast this worker computes: running means and totals over its steps. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.types import StepTotals

_SMOOTHING = 0.2  # weight of the newest measurement


class Pace:
    """Owns the measurements. A mean is zero until a step of its kind has been measured."""

    def __init__(self) -> None:
        self.step_s = 0.0  # time of a step in which each sequence gets one token
        self.chunk_tokens_per_s = 0.0  # speed of a step that contains chunks of prompts
        self.decode_steps = StepTotals()
        self.prefill_steps = StepTotals()

    def on_step(self, num_sequences: int, num_tokens: int, contexts: float, elapsed_s: float) -> None:
        if num_tokens == num_sequences:
            self.decode_steps = self.decode_steps.plus(num_tokens, contexts, elapsed_s)
            self.step_s = _smooth(self.step_s, elapsed_s)
        else:
            self.prefill_steps = self.prefill_steps.plus(num_tokens, contexts, elapsed_s)
            self.chunk_tokens_per_s = _smooth(self.chunk_tokens_per_s, num_tokens / max(elapsed_s, 1e-6))

    def on_speculation(self, num_sequences: int, num_sampled: int, elapsed_s: float) -> None:
        """Records a step that has sampled several tokens of some sequences.

        The totals leave it out, because it costs neither what one token per sequence costs nor what a chunk does.
        """
        self.step_s = _smooth(self.step_s, elapsed_s * num_sequences / num_sampled)

    def on_decode_steps(self, num_sequences: int, contexts: float, each_s: Sequence[float]) -> None:
        """Does the same as `on_step` for several steps of the same sequences, whose contexts grow by one token per
        step.
        """
        totals, step_s = self.decode_steps, self.step_s
        all_contexts, seconds = totals.contexts, totals.seconds
        for elapsed_s in each_s:
            all_contexts += contexts
            seconds += elapsed_s
            contexts += num_sequences
            step_s = _smooth(step_s, elapsed_s)
        num_steps = len(each_s)
        self.decode_steps = StepTotals(
            totals.steps + num_steps, totals.tokens + num_steps * num_sequences, all_contexts, seconds
        )
        self.step_s = step_s


def _smooth(mean: float, value: float) -> float:
    return mean + (value - mean) * (_SMOOTHING if mean else 1.0)
