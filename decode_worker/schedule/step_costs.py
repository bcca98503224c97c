"""Learns the cost of this worker's own steps from every step with a chunk and from some of the others. Pure.

A step that only decodes takes a fixed time, a time for each row, and one for each token of a row's context. Chunks of
prompts add another fixed time, a time for each of their tokens, and one for each pair of such a token and an earlier
token.

The two are learned apart. Where a target bounds steps, all steps with chunks take about that long, whatever they
compute, and one regression over all quantities would blame the rows for it.
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

    def __init__(self) -> None:
        self._decoding = LinearCost((_FIXED_S, _ROW_S, _CONTEXT_S))
        self._chunks = LinearCost((_CHUNKED_S, _TOKEN_S, _PAIR_S))  # what chunks add to a step that only decodes
        self._num_decode_steps = 0
        self.num_chunk_steps = 0  # steps with a chunk that were learned from
        self._row_contexts = 0.0  # mean context of a row in the newest step

    def skips(self, chunk_tokens: int) -> bool:
        """Counts a step. Returns whether to skip it, that is, not to call `on_step`."""
        if chunk_tokens:
            self.num_chunk_steps += 1
            return False
        self._num_decode_steps += 1
        return self._num_decode_steps % _DECODE_STRIDE != 1

    def learned_of(self, num_steps: int) -> range:
        """Counts consecutive decode steps like as many calls of `skips`. Returns which of them not to skip, counting
        from 0.
        """
        first, self._num_decode_steps = -self._num_decode_steps % _DECODE_STRIDE, self._num_decode_steps + num_steps
        return range(first, num_steps, _DECODE_STRIDE)

    def on_plan(self, plan: StepPlan, elapsed_s: float) -> None:
        """Counts a step, and learns from it unless it is skipped. Call it before the step is recorded."""
        num_rows = len(plan.rows)
        chunk_tokens = plan.num_tokens - num_rows
        if self.skips(chunk_tokens):
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

    def assume(self, token_s: float) -> None:
        """Starts from a peer's time per prompt token while no chunk has been computed here."""
        if self.num_chunk_steps or not 0 < token_s < math.inf:
            return
        self._chunks = LinearCost((_CHUNKED_S, token_s, _PAIR_S))

    def step_s(self, num_rows: int) -> float:
        """Returns the predicted time of a step that decodes `num_rows` sequences."""
        return self._decoding.predict((1.0, num_rows, num_rows * self._row_contexts))

    def rows_within(self, seconds: float, num_rows: int) -> int:
        """Returns how many more sequences can decode beside `num_rows` in a step that takes `seconds`."""
        _, row_s, context_s = self._decoding.coefficients
        left_s = seconds - self.step_s(num_rows)
        return int(min(max(0.0, left_s / max(row_s + context_s * self._row_contexts, 1e-9)), _MOST_ROWS))

    def chunk_speed(self, num_rows: int, step_tokens: int) -> ChunkSpeed:
        """Returns what chunks cost beside `num_rows` sequences if a step computes at most `step_tokens` of them."""
        return ChunkSpeed(step_tokens, self.step_s(num_rows), *self._chunks.coefficients)
