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

from penstock.scheduling.linear_cost import LinearCost

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


@dataclass(frozen=True, slots=True)
class ChunkCosts:
    """The predicted costs of computing a part of a prompt next to the current decoding, in seconds."""

    total_s: float  # time until its last token is computed, including the chunks queued before it
    added_s: float  # time by which its chunks delay each decoding sequence
    num_steps: int  # steps that compute its chunks
    step_s: float  # time of a step without them

    @property
    def busy_s(self) -> float:
        """The time of the steps that compute its chunks, for which the prompts behind it wait."""
        return self.num_steps * self.step_s + self.added_s

    def beyond_s(self, target_s: float) -> float:
        """Returns the part of `added_s` that makes steps longer than `target_s`."""
        return min(self.added_s, max(0.0, self.num_steps * (self.step_s - target_s) + self.added_s))


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

    def chunks(self, num_tokens: int, num_before: int, num_queued: int, num_rows: int, step_tokens: int) -> ChunkCosts:
        """Predicts the cost of computing `num_tokens` that follow `num_before` tokens of the same prompt.

        `num_queued` tokens of other prompts are computed first, `num_rows` sequences decode at the same time, and a
        step computes at most `step_tokens` prompt tokens.
        """
        pairs = num_tokens * (num_before + num_tokens / 2)
        first, last = num_queued // step_tokens, -(-(num_queued + num_tokens) // step_tokens)
        num_steps = max(1, last)
        chunked_s, token_s, pair_s = self._chunks.coefficients
        own_s = num_tokens * token_s + pairs * pair_s
        queued_s = num_queued * token_s + num_queued * step_tokens / 2 * pair_s
        step_s, num_own = self.step_s(num_rows), max(1, last - first)
        waiting_s = step_s / 2 if num_rows or num_queued else 0.0  # for the step in flight
        total_s = waiting_s + num_steps * (step_s + chunked_s) + queued_s + own_s
        return ChunkCosts(total_s, num_own * chunked_s + own_s, num_own, step_s)
