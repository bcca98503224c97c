"""Tests how many prompt tokens a step computes beside decoding, so that it ends within a target."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.schedule.pace import Pace


def test_without_a_target_or_a_measurement_there_is_no_limit() -> None:
    pace = Pace()
    assert pace.chunk_tokens_within(0.05) is None
    pace.on_step(9, 209, 100.0, 0.08)
    assert pace.chunk_tokens_within(None) is None
    assert pace.chunk_tokens_within(0.05) is not None


def test_only_the_time_that_chunks_add_to_a_step_counts() -> None:
    pace = Pace()
    pace.on_step(8, 8, 100.0, 0.03)
    pace.on_step(9, 209, 100.0, 0.08)  # 200 tokens add 50 ms
    assert pace.chunk_tokens_within(0.05) == int((0.045 - 0.03) * 4000)
    assert pace.chunk_tokens_within(0.05, waited_s=0.01) == int((0.035 - 0.03) * 4000)
    assert pace.chunk_tokens_within(0.01) == 16  # prompts always progress


@given(
    decode_s=st.floats(1e-3, 0.02),
    token_s=st.floats(1e-5, 1e-3),
    chunked_s=st.floats(0, 0.005),
    noise=st.sampled_from([0.0, 0.1, 0.2]),
    scale=st.floats(2.0, 10.0),
    seed=st.integers(0, 99),
)
def test_steps_settle_at_nine_tenths_of_the_target(
    decode_s: float, token_s: float, chunked_s: float, noise: float, scale: float, seed: int
) -> None:
    """With noise, a fixed cost of chunks and whatever chunks before, the budget neither collapses nor grows."""
    target_s = scale * (decode_s + chunked_s + 20 * token_s)
    rng, pace = random.Random(seed), Pace()

    def run(num_tokens: int) -> float:
        """Measures a step of four sequences and a chunk with noise; returns its true time."""
        step_s = decode_s + (chunked_s + num_tokens * token_s if num_tokens else 0.0)
        num_sequences = 4 + (num_tokens > 0)
        pace.on_step(num_sequences, num_sequences + num_tokens, 100.0, step_s * (1 + noise * rng.random()))
        return step_s

    for _ in range(20):
        run(0)
        run(rng.randint(1, 2000))
    steps_s = [run(pace.chunk_tokens_within(target_s) or 0) for _ in range(60)][30:]
    mean_s = sum(steps_s) / len(steps_s)
    assert max(steps_s) <= 1.05 * target_s
    assert mean_s == pytest.approx(0.9 * target_s, rel=0.05) if not noise else mean_s > 0.5 * target_s
