"""Learns the cost of this worker's own steps from every step with a chunk and from some of the others. Pure.

A step that only decodes takes a fixed time, a time for each row, and one for each token of a row's context. Chunks of
prompts add another fixed time, a time for each of their tokens, and one for each pair of such a token and an earlier
token.

The two are learned apart. Where a target bounds steps, all steps with chunks take about that long, whatever they
compute, and one regression over all quantities would blame the rows for it.

Steps of the prompt stream are learned apart again, and so is the factor by which they slow down the decode steps beside
them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.step.plan import StepPlan
from penstock.scheduling.linear_cost import LinearCost
from penstock.types import ChunkSpeed

# Orders of magnitude for a small model on a few cores; a GPU's costs are learned within a few steps.
_FIXED_S, _CHUNKED_S, _TOKEN_S, _PAIR_S, _ROW_S, _CONTEXT_S = 2e-3, 1e-3, 3e-4, 1e-8, 1e-4, 1e-8
_LEAST_ADDED = 0.1  # share of a step's time that its chunks add at least
_MOST_ROWS = 1 << 20
_SLOWDOWN_WEIGHT = 0.1  # of the newest decode step beside a prompt
_MOST_SLOWDOWN = 20.0  # of one such step, so that a pause of the machine does not count as one
_DECODE_STRIDE = 8  # learns from every 8th step without a chunk: they are alike, and learning takes 50 us


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one step."""

    chunk_tokens: int  # prompt tokens
    chunk_pairs: float  # pairs of one of these tokens and an earlier one
    num_rows: int  # sequences that get one token each
    row_contexts: float  # their context tokens in total

    @property
    def decode_quantities(self) -> tuple[float, ...]:
        return 1.0, self.num_rows, self.row_contexts

    @property
    def chunk_quantities(self) -> tuple[float, ...]:
        return 1.0, self.chunk_tokens, self.chunk_pairs


class StepCosts:
    """Owns the model of one worker's steps."""

    def __init__(self, prompt_sm_share: float = 0) -> None:
        """`prompt_sm_share`: see `DecodeConfig`. Decode steps beside a prompt are assumed to have the other SMs alone
        until some are measured.
        """
        self._has_prompt_stream = prompt_sm_share > 0
        self._slowdown = 1 / (1 - prompt_sm_share)  # of decode steps beside a step of the prompt stream
        self._prompt_steps = LinearCost((_CHUNKED_S, _TOKEN_S, _PAIR_S))
        self._decoding = LinearCost((_FIXED_S, _ROW_S, _CONTEXT_S))
        self._chunks = LinearCost((_CHUNKED_S, _TOKEN_S, _PAIR_S))  # what chunks add to a step that only decodes
        self._num_decode_steps = 0
        self.num_chunk_steps = 0  # steps with a chunk that were learned from
        self._row_contexts = 0.0  # mean context of a row in the newest step

    def count_step(self, chunk_tokens: int) -> bool:
        """Counts a step. Returns whether to learn from it, that is, to call `on_step`."""
        if chunk_tokens:
            self.num_chunk_steps += 1
            return True
        self._num_decode_steps += 1
        return self._num_decode_steps % _DECODE_STRIDE == 1

    def count_decode_steps(self, num_steps: int) -> range:
        """Counts consecutive steps without chunks. Returns the numbers of those to learn from, counting from 0."""
        first, self._num_decode_steps = -self._num_decode_steps % _DECODE_STRIDE, self._num_decode_steps + num_steps
        return range(first, num_steps, _DECODE_STRIDE)

    def on_plan(self, plan: StepPlan, elapsed_s: float, *, is_beside_prompts: bool = False) -> None:
        """Counts a step, and learns from it if `count_step` says so. Call it before the step is recorded.

        `is_beside_prompts` says that the prompt stream computes too, which slows down a decode step.
        """
        num_rows = len(plan.rows)
        if plan.is_apart:
            self.on_prompt_step(plan.num_tokens, plan.num_contexts, elapsed_s)
            return
        if is_beside_prompts:
            if not plan.chunks:
                self.on_beside(num_rows, elapsed_s)
            return
        chunk_tokens = plan.num_tokens - num_rows
        if not self.count_step(chunk_tokens):
            return
        pairs = sum(chunk.num_contexts for chunk in plan.chunks)
        self.on_step(StepWork(chunk_tokens, pairs, num_rows, plan.rows.num_contexts), elapsed_s)

    def on_step(self, work: StepWork, elapsed_s: float) -> None:
        """Learns from a step."""
        if work.num_rows:
            self._row_contexts = work.row_contexts / work.num_rows
        if not work.chunk_tokens:
            self._decoding.observe(work.decode_quantities, elapsed_s)
            return
        added_s = elapsed_s - self._decoding.predict(work.decode_quantities)
        self._chunks.observe(work.chunk_quantities, max(added_s, _LEAST_ADDED * elapsed_s))

    def on_prompt_step(self, num_tokens: int, num_pairs: float, elapsed_s: float) -> None:
        """Learns from a step of the prompt stream."""
        self.num_chunk_steps += 1
        self._prompt_steps.observe((1.0, num_tokens, num_pairs), elapsed_s)

    def on_beside(self, num_rows: int, elapsed_s: float) -> None:
        """Learns from a step that decoded beside a step of the prompt stream."""
        slowdown = max(1.0, elapsed_s / max(self.step_s(num_rows), 1e-6))
        self._slowdown += _SLOWDOWN_WEIGHT * (min(slowdown, _MOST_SLOWDOWN) - self._slowdown)

    def assume(self, token_s: float) -> None:
        """Starts from a peer's time per prompt token while no chunk has been computed here."""
        if self.num_chunk_steps or not 0 < token_s < math.inf:
            return
        self._chunks = LinearCost((_CHUNKED_S, token_s, _PAIR_S))
        self._prompt_steps = LinearCost((_CHUNKED_S, token_s, _PAIR_S))

    def step_s(self, num_rows: int) -> float:
        """Returns the predicted time of a step that decodes `num_rows` sequences."""
        return self._decoding.predict((1.0, num_rows, num_rows * self._row_contexts))

    def rows_within(self, seconds: float, num_rows: int) -> int:
        """Returns how many more sequences can decode beside `num_rows` in a step that takes `seconds`."""
        _, row_s, context_s = self._decoding.coefficients
        left_s = seconds - self.step_s(num_rows)
        return int(min(max(0.0, left_s / max(row_s + context_s * self._row_contexts, 1e-9)), _MOST_ROWS))

    def chunk_speed(self, num_rows: int, step_tokens: int) -> ChunkSpeed:
        """Returns what chunks cost beside `num_rows` sequences if a step computes at most `step_tokens` of them.

        The prompt stream is described as if each decode step contained the tokens that the stream computes meanwhile,
        and took longer by the measured slowdown.
        """
        if self._has_prompt_stream:
            fixed_s, token_s, pair_s = self._prompt_steps.coefficients
            token_s, step_s = max(token_s + fixed_s / step_tokens, 1e-9), self.step_s(num_rows)
            num_beside = max(1, round(step_s * self._slowdown / token_s))
            return ChunkSpeed(num_beside, step_s, 0.0, token_s * (1 - 1 / self._slowdown), pair_s)
        return ChunkSpeed(step_tokens, self.step_s(num_rows), *self._chunks.coefficients)
