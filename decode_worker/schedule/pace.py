"""Measures how fast this worker computes: running means and totals over its steps. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.types import StepTotals

_SMOOTHING = 0.2  # weight of the newest measurement
_MARGIN = 0.9  # share of a target that a step is meant to take
_LEAST_CHUNK_TOKENS = 16
_LEAST_ADDED = 0.1  # share of a step's time that its chunks take at least


class Pace:
    """Owns the measurements. A mean is zero until a step of its kind has been measured."""

    def __init__(self) -> None:
        self.step_s = 0.0  # time of a step in which each sequence gets one token
        self.chunk_tokens_per_s = 0.0  # speed of a step that contains chunks of prompts
        self._added_tokens_per_s = 0.0  # tokens of chunks by the time that they add to a step
        self.decode_steps = StepTotals()
        self.prefill_steps = StepTotals()

    def chunk_tokens_within(self, itl_s: float | None, waited_s: float = 0.0) -> int | None:
        """Returns how many prompt tokens a step may compute next to decoding and still end within `itl_s`; None: no
        limit.

        `waited_s` is the time since the last token of the sequence that has waited longest. The result is at least a
        few, so that prompts progress even if decoding alone takes that long.
        """
        if itl_s is None or not self._added_tokens_per_s:
            return None
        left_s = _MARGIN * itl_s - waited_s - self.step_s
        return max(_LEAST_CHUNK_TOKENS, int(left_s * self._added_tokens_per_s))

    def on_step(self, num_sequences: int, num_tokens: int, contexts: float, elapsed_s: float) -> None:
        if num_tokens == num_sequences:
            self.decode_steps = self.decode_steps.plus(num_tokens, contexts, elapsed_s)
            self.step_s = _smooth(self.step_s, elapsed_s)
        else:
            self.on_prompts(num_tokens, contexts, elapsed_s)
            elapsed_s = max(elapsed_s, 1e-6)
            added_s = max(elapsed_s - self.step_s, _LEAST_ADDED * elapsed_s)
            self._added_tokens_per_s = _smooth(self._added_tokens_per_s, (num_tokens - num_sequences) / added_s)

    def on_prompts(self, num_tokens: int, contexts: float, elapsed_s: float) -> None:
        """Records a step with chunks of prompts; a step of the prompt stream has nothing else."""
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
