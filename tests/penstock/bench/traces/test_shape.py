"""Tests with random records that scaling keeps order, sharing, and the cover of each prompt."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.traces.record import TraceRecord, cover, to_runs
from penstock.bench.traces.shape import in_order, scale_lengths, scale_rate, split_longer
from penstock.errors import InvalidInput


@st.composite
def records(draw: st.DrawFn) -> TraceRecord:
    block_tokens = draw(st.integers(1, 600))
    num_input = draw(st.integers(1, 5000))
    num_blocks = -(-num_input // block_tokens)
    runs = draw(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 20)), max_size=4))
    return TraceRecord(
        arrival_s=draw(st.floats(0, 1e4)),
        num_input_tokens=num_input,
        num_output_tokens=draw(st.integers(1, 2000)),
        block_runs=cover(runs, num_blocks, 1 << 30),
        block_tokens=block_tokens,
    )


@given(st.lists(records(), max_size=8), st.floats(0.001, 4), st.floats(0.001, 4))
def test_scaled_lengths_keep_every_block(found: list[TraceRecord], inputs: float, outputs: float) -> None:
    for before, after in zip(found, scale_lengths(found, inputs, outputs), strict=True):
        assert after.block_runs == before.block_runs  # the record's own invariant holds for the new lengths
        assert after.num_output_tokens == max(1, round(before.num_output_tokens * outputs))


@given(st.lists(st.integers(0, 50)))
def test_runs_hold_the_same_ids(ids: list[int]) -> None:
    runs = to_runs(ids)
    assert [first + offset for first, count in runs for offset in range(count)] == ids
    assert all(a[0] + a[1] != b[0] for a, b in pairwise(runs))


@given(st.lists(records(), max_size=8), st.integers(1, 6000))
def test_requests_that_do_not_fit_are_counted(found: list[TraceRecord], max_tokens: int) -> None:
    kept, num_dropped = split_longer(found, max_tokens)
    assert len(kept) + num_dropped == len(found)
    assert all(record.num_tokens <= max_tokens for record in kept)
    assert not kept or kept[0].arrival_s == 0.0


@given(st.lists(records(), max_size=8), st.floats(0.01, 100))
def test_a_faster_trace_has_the_same_order(found: list[TraceRecord], factor: float) -> None:
    ordered = in_order(found)
    faster = scale_rate(ordered, factor)
    assert [record.arrival_s for record in faster] == sorted(record.arrival_s for record in faster)
    assert not faster or faster[-1].arrival_s == pytest.approx(ordered[-1].arrival_s / factor)


def test_factors_must_be_above_zero() -> None:
    with pytest.raises(InvalidInput, match="input factor: is 0; give a number above 0"):
        scale_lengths([], 0.0)
    with pytest.raises(InvalidInput, match="rate factor: is -1; give a number above 0"):
        scale_rate([], -1.0)
