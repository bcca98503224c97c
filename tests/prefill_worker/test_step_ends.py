"""Tests when prefill steps end early: by learned costs, against the sum of all prompts' delays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_worker.step_ends import StepEnds
from tests.support.suite.examples import examples


def learned(fixed_s: float, token_s: float, pair_s: float) -> StepEnds:
    ends = StepEnds()
    for tokens, pairs in ((64, 2e3), (512, 1e5), (2048, 2e6), (700, 9e6)) * 20:
        ends.on_step(tokens, pairs, fixed_s + token_s * tokens + pair_s * pairs)
    return ends


@given(
    fixed_s=st.floats(1e-3, 5e-2),
    token_s=st.floats(1e-5, 1e-3),
    pair_s=st.floats(1e-10, 1e-8),
    num_tokens=st.integers(1, 2048),
    num_before=st.integers(0, 20_000),
    num_complete=st.integers(1, 16),
    num_others=st.integers(1, 200),
)
@examples(75)
def test_a_step_ends_early_if_that_lowers_the_sum_of_all_first_tokens(
    fixed_s: float,
    token_s: float,
    pair_s: float,
    num_tokens: int,
    num_before: int,
    num_complete: int,
    num_others: int,
) -> None:
    chunk_s = num_tokens * token_s + (num_tokens * num_before + num_tokens**2 / 2) * pair_s
    gained_s, lost_s = num_complete * chunk_s, num_others * fixed_s
    if gained_s != pytest.approx(lost_s, rel=0.1):  # learned costs are not exact
        ends = learned(fixed_s, token_s, pair_s)
        assert ends.ends_before(num_tokens, num_before, num_complete, num_others) == (gained_s > lost_s)


@given(num_tokens=st.integers(1, 2048), num_complete=st.integers(0, 16), num_others=st.integers(1, 200))
@examples(50)
def test_more_prompts_that_are_complete_or_fewer_that_wait_never_lengthen_a_step(
    num_tokens: int, num_complete: int, num_others: int
) -> None:
    ends = learned(0.008, 65e-6, 2e-9)
    if ends.ends_before(num_tokens, 0, num_complete, num_others):
        assert ends.ends_before(num_tokens, 0, num_complete + 1, num_others)
        assert ends.ends_before(num_tokens, 0, num_complete, num_others - 1)
    assert not ends.ends_before(num_tokens, 0, 0, num_others)
