"""Tests the token budget of a step's chunks, of which prompts with prompt log-probabilities share a part."""

from __future__ import annotations

from decode_worker.schedule.chunk_budget import ChunkBudget
from engine.memory.estimates import SCORED_TOKENS
from engine.step.sequence import Sequence
from penstock.types import RequestId, SamplingParams


def sequence(num_output_tokens: int = 0, **sampling: int) -> Sequence:
    params = SamplingParams(max_tokens=9, **sampling)
    return Sequence(RequestId("r"), [5] * (1000 + num_output_tokens), 1000, params, b"")


def test_prompts_share_the_tokens_of_a_step() -> None:
    budget = ChunkBudget(300)
    assert [budget.take(sequence(), 200), budget.take(sequence(), 200), budget.take(sequence(), 200)] == [200, 100, 0]
    assert budget.is_spent
    assert ChunkBudget(-3).take(sequence(), 5) == 0


def test_scored_prompts_share_fewer() -> None:
    budget = ChunkBudget(10 * SCORED_TOKENS)
    scored = sequence(prompt_logprobs=0)
    assert budget.take(scored, SCORED_TOKENS - 8) == SCORED_TOKENS - 8
    assert budget.take(scored, 200) == 8
    assert budget.take(scored, 200) == 0
    assert not budget.is_spent
    assert budget.take(sequence(), 200) == 200
    assert budget.take(sequence(num_output_tokens=1, prompt_logprobs=0), 200) == 200, "its scores are out"
