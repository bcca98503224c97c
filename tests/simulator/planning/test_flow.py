"""Tests that the flow model queues requests as workers do, by hand in small cases and by invariants in all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.costs.step_costs import DecodeCosts, PrefillCosts
from simulator.planning.flow import DecodeFlow, Patience, prefill_times, prompt_s, queue_prompts
from simulator.planning.workload import PlannedRequest

PREFILL = PrefillCosts(step_s=0.0, token_s=0.001, context_s=0.0)
DECODE = DecodeCosts(step_s=0.01, sequence_s=0.0, kv_token_s=0.0, chunk=PREFILL, token_s=0.001)


def make_request(arrival_s: float, num_input: int = 100, num_output: int = 11, reusable: float = 0.0) -> PlannedRequest:
    return PlannedRequest(arrival_s, num_input, num_output, reusable)


def make_flow(num_workers: int = 1, kv_tokens: int = 10_000, max_batch: int = 8, chunk: int = 0) -> DecodeFlow:
    return DecodeFlow(DECODE, num_workers, kv_tokens, max_batch, chunk)


def test_prompts_wait_for_the_first_free_worker() -> None:
    requests = [make_request(0.0), make_request(0.0), make_request(0.05)]
    times_s = prefill_times(requests, 0.0, PREFILL, 1024)
    assert queue_prompts(requests, times_s, 1) == pytest.approx([0.1, 0.2, 0.3])
    assert queue_prompts(requests, times_s, 2) == pytest.approx([0.1, 0.1, 0.2])


def test_cached_tokens_are_not_computed_except_for_the_last_token() -> None:
    assert prompt_s(100, 60, PREFILL, 1024) == pytest.approx(0.04)
    assert prompt_s(100, 100, PREFILL, 1024) == pytest.approx(0.001)
    attending = PrefillCosts(step_s=0.0, token_s=0.0, context_s=1e-3)
    assert prompt_s(100, 60, attending, 1024) == pytest.approx(1e-3 * (40 * 60 + 40 * 20)), "over cached tokens too"


def test_a_batch_shares_its_steps() -> None:
    requests = [make_request(0.0), make_request(0.0, num_output=21)]
    times = make_flow().run(requests, [0.0, 0.0])
    assert times is not None
    # Only 1 ms for each token of the batch grows with it.
    assert times.tpot_s == pytest.approx([0.012, (10 * 0.012 + 10 * 0.011) / 20])
    assert times.peak_batch == 2


@pytest.mark.parametrize(("kv_tokens", "max_batch"), [(150, 8), (10_000, 1)])
def test_sequences_wait_for_room(kv_tokens: int, max_batch: int) -> None:
    requests = [make_request(0.0), make_request(0.0)]
    times = make_flow(kv_tokens=kv_tokens, max_batch=max_batch).run(requests, [0.0, 0.0])
    assert times is not None
    assert times.peak_batch == 1
    assert times.ttft_s == pytest.approx([0.0, 10 * 0.011])


def test_colocated_prompts_delay_tokens_and_wait_for_them() -> None:
    requests = [make_request(0.0, num_input=1, num_output=101), make_request(0.1, num_input=100, num_output=1)]
    times = make_flow(chunk=50).run(requests, [0.0, 0.1])
    alone = make_flow(chunk=50).run(requests[:1], [0.0])
    assert times is not None
    assert alone is not None
    assert times.ttft_s[1] == pytest.approx(2 * (0.011 + 50 * 0.001), rel=0.01), "two chunks beside a token each"
    assert times.tpot_s[0] == pytest.approx(alone.tpot_s[0] + 100 * 0.001 / 100, rel=0.01)


def test_a_run_that_cannot_meet_its_target_ends_early() -> None:
    requests = [make_request(0.0) for _ in range(20)]
    flow, ready_s = make_flow(max_batch=1), [0.0] * 20
    limits_s = [0.5] * 20
    times = flow.run(requests, ready_s)
    assert times is not None
    num_late = sum(ttft > 0.5 for ttft in times.ttft_s)
    assert flow.run(requests, ready_s, patience=Patience(limits_s, 1.0, num_late)) is not None
    assert flow.run(requests, ready_s, patience=Patience(limits_s, 1.0, num_late - 1)) is None
    assert flow.run(requests, ready_s, patience=Patience([1e9] * 20, 0.001, 19)) is None, "tokens too slow"


traffic = st.lists(
    st.tuples(st.floats(0, 5), st.integers(1, 300), st.integers(1, 50)), min_size=1, max_size=40
)  # fmt: skip


@given(traffic, st.integers(1, 4), st.sampled_from([0, 16, 64]))
def test_every_request_is_served(rows: list[tuple[float, int, int]], num_workers: int, chunk: int) -> None:
    requests = [make_request(arrival_s, *lengths) for arrival_s, *lengths in sorted(rows)]
    ready_s = [request.arrival_s for request in requests]
    times = make_flow(num_workers, kv_tokens=700, max_batch=4, chunk=chunk).run(requests, ready_s)
    assert times is not None
    for request, ttft_s, tpot_s in zip(requests, times.ttft_s, times.tpot_s, strict=True):
        assert ttft_s >= -1e-9
        assert tpot_s == 0.0 if request.num_output_tokens == 1 else tpot_s >= 0.011 - 1e-6
    assert times.peak_batch <= 4
    assert 0.0 <= times.utilization <= 1.0 + 1e-9
