"""Decides whether a prompt joins a prefill step or waits for the next one. Pure.

All prompts of a step get their first tokens when the step ends. A prompt that joins delays those that the step
completes by its own tokens. If it begins the next step instead, all other prompts wait for that step's fixed time.
"""

from __future__ import annotations

from penstock.scheduling.linear_cost import ThreeTermCost

# Orders of magnitude for a GPU, in seconds: a step, a token, and a pair of a token and an earlier one.
_PRIOR = (5e-3, 5e-5, 1e-9)


class StepEnds:
    """Owns the learned cost of a worker's steps."""

    def __init__(self) -> None:
        self._cost = ThreeTermCost(_PRIOR)

    def on_step(self, num_tokens: int, num_contexts: float, elapsed_s: float) -> None:
        """Learns from a step; `num_contexts` are the pairs of one of its tokens and an earlier one."""
        self._cost.observe((1.0, num_tokens, num_contexts), elapsed_s)

    def ends_before(self, num_tokens: int, num_before: int, num_complete: int, num_others: int) -> bool:
        """Returns whether a step should end before a chunk of `num_tokens` that follow `num_before` of its prompt.

        The step completes `num_complete` prompts without it; `num_others` is the number of all other prompts here,
        with that of the chunk.
        """
        fixed_s, token_s, pair_s = self._cost.coefficients
        chunk_s = num_tokens * (token_s + (num_before + num_tokens / 2) * pair_s)
        return num_complete * chunk_s > num_others * fixed_s
