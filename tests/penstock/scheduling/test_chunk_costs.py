"""Tests the price of a prompt that is computed in chunks beside decoding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduling.chunk_costs import ChunkCosts, costs_of_chunks
from penstock.scheduling.prompt_harm import WITHIN_TARGET
from penstock.types import ChunkSpeed

SECONDS = st.floats(0.0, 1.0)
SPEEDS = st.builds(ChunkSpeed, st.integers(1, 4096), SECONDS, SECONDS, st.floats(0, 1e-2), st.floats(0, 1e-6))
PROMPTS = st.tuples(st.integers(1, 100_000), st.integers(0, 100_000), st.integers(0, 100_000), st.booleans())


@given(SPEEDS, PROMPTS, st.integers(0, 200), st.floats(0, 4), SECONDS)
def test_costs_are_those_of_the_steps_taken_one_by_one(
    speed: ChunkSpeed, prompt: tuple[int, int, int, bool], num_running: int, num_behind: float, target_s: float
) -> None:
    """The queue and the prompt fill the steps in turn; the step in which the prompt begins counts as its own."""
    num_tokens, num_before, num_queued, is_busy = prompt
    costs = costs_of_chunks(speed, *prompt)
    num_steps = -(-(num_queued + num_tokens) // speed.step_tokens)
    attention_s = speed.pair_s * (num_tokens * (num_before + num_tokens / 2) + num_queued * speed.step_tokens / 2)
    computing_s = (num_queued + num_tokens) * speed.token_s + attention_s
    in_flight_s = speed.step_s / 2 if is_busy else 0.0
    assert costs.total_s == pytest.approx(
        in_flight_s + num_steps * (speed.step_s + speed.chunked_s) + computing_s, rel=1e-9, abs=1e-12
    )
    assert 1 <= costs.num_steps <= num_steps
    assert costs.queue_s >= 0
    assert costs.busy_s >= costs.added_s >= 0
    harm_s = costs.harm_s(num_running, num_behind, target_s)
    assert harm_s <= num_running * costs.added_s * (1 + 1e-9) + num_behind * costs.busy_s
    assert harm_s >= (num_running * WITHIN_TARGET * costs.added_s + num_behind * costs.busy_s) * (1 - 1e-9)
    assert costs.harm_s(num_running, num_behind, 0.0) == pytest.approx(
        num_running * costs.added_s + num_behind * costs.busy_s
    )


@given(SPEEDS, PROMPTS, st.integers(0, 100_000), st.integers(0, 200), SECONDS)
def test_more_work_never_costs_less(
    speed: ChunkSpeed, prompt: tuple[int, int, int, bool], more: int, num_running: int, target_s: float
) -> None:
    num_tokens, num_before, num_queued, is_busy = prompt
    costs = costs_of_chunks(speed, *prompt)
    longer = costs_of_chunks(speed, num_tokens + more, num_before, num_queued, is_busy)
    later = costs_of_chunks(speed, num_tokens, num_before, num_queued + more, is_busy)
    assert longer.total_s >= costs.total_s * (1 - 1e-9)
    assert later.total_s >= costs.total_s * (1 - 1e-9)
    assert longer.harm_s(num_running, 1.0, target_s) >= costs.harm_s(num_running, 1.0, target_s) * (1 - 1e-9)


def test_a_delay_within_the_target_counts_less() -> None:
    costs = ChunkCosts(0.0, num_steps=8, step_s=0.007, added_s=8 * 0.032)
    assert costs.harm_s(20, 0.0, 0.05) == pytest.approx(20 * WITHIN_TARGET * costs.added_s)
    beyond_s = 8 * (0.039 - 0.02)
    within_s = costs.added_s - beyond_s
    assert costs.harm_s(20, 0.0, 0.02) == pytest.approx(20 * (beyond_s + WITHIN_TARGET * within_s))
    assert costs.harm_s(20, 0.0, 0.001) == pytest.approx(20 * costs.added_s)  # steps take that long anyway


@given(st.lists(st.tuples(SPEEDS, PROMPTS, st.integers(0, 200), SECONDS), min_size=1, max_size=8))
def test_columns_have_the_figures_of_their_workers(
    workers: list[tuple[ChunkSpeed, tuple[int, int, int, bool], int, float]],
) -> None:
    each = [costs_of_chunks(speed, *prompt) for speed, prompt, *_ in workers]
    names = ("step_tokens", "step_s", "chunked_s", "token_s", "pair_s")
    columns = ChunkSpeed(*(np.array([getattr(speed, name) for speed, *_ in workers]) for name in names))  # type: ignore[arg-type]
    figures = costs_of_chunks(
        columns, *(np.array(column) for column in zip(*(worker[1] for worker in workers), strict=True))
    )
    assert figures.total_s.tolist() == [costs.total_s for costs in each]
    num_running, target_s = (np.array([worker[place] for worker in workers]) for place in (2, 3))
    harm_s = figures.harm_s(num_running, 1.5, target_s, np.minimum, np.maximum)
    assert harm_s.tolist() == [
        costs.harm_s(running, 1.5, target) for costs, (_, _, running, target) in zip(each, workers, strict=True)
    ]
