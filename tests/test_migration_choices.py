"""Which sequences move, how much room they get, when they stand still; and what travels besides their pages."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker import sequence_state
from decode_worker.migration import Candidate, CopyProgress, choose, room_wanted, should_stop
from decode_worker.request import DecodeRequest, StageTimes
from engine.sequence import Sequence
from penstock.errors import InvalidInput
from penstock.types import RequestId, SamplingParams, WorkerId
from penstock.v1 import worker_pb2


def candidate(name: str, num_tokens: int, num_tokens_left: int) -> Candidate:
    return Candidate(RequestId(name), num_tokens, num_tokens_left)


def test_most_work_for_the_least_kv_moves_first() -> None:
    long, short, ending = candidate("long", 1000, 100), candidate("short", 50, 100), candidate("ending", 50, 3)
    assert choose([long, short, ending], (), None) == [short, long]
    assert choose([long, short, ending], (), 1) == [short]
    assert choose([long, short, ending], {RequestId("ending")}, None) == [ending]


@given(
    num_tokens=st.integers(1, 5000),
    num_tokens_left=st.integers(0, 5000),
    page_size=st.sampled_from([1, 4, 16, 64]),
)
def test_room_is_never_short_of_what_is_there_nor_more_than_can_come(
    num_tokens: int, num_tokens_left: int, page_size: int
) -> None:
    wanted = room_wanted(num_tokens, num_tokens_left, page_size)
    assert num_tokens <= wanted <= num_tokens + num_tokens_left
    assert wanted <= num_tokens * 17 / 16 + 2 * page_size


@given(page_size=st.sampled_from([1, 4, 16]), num_prompt=st.integers(1, 400), pages_a_step=st.floats(0.01, 3.0))
def test_every_copy_comes_to_its_end_and_fits(page_size: int, num_prompt: int, pages_a_step: float) -> None:
    """Whether pages land faster or slower than tokens come."""
    num_computed, num_left = num_prompt, 1000
    reserved = -(-room_wanted(num_computed + 1, num_left, page_size) // page_size)
    landed = 0.0
    while True:
        num_full = num_computed // page_size
        landed = min(landed + pages_a_step, num_full)
        if should_stop(CopyProgress(num_full, 0, int(landed), reserved)):
            break
        num_computed += 1
    assert -(-num_computed // page_size) <= reserved


@pytest.mark.parametrize(
    ("progress", "stops"),
    [
        (CopyProgress(num_full=0, num_held=0, num_landed=0, num_reserved=3), True),  # nothing to copy ahead
        (CopyProgress(num_full=1, num_held=0, num_landed=0, num_reserved=4), False),  # not connected yet, maybe
        (CopyProgress(num_full=10, num_held=0, num_landed=8, num_reserved=14), False),
        (CopyProgress(num_full=10, num_held=0, num_landed=9, num_reserved=14), True),
        (CopyProgress(num_full=10, num_held=9, num_landed=9, num_reserved=14), False),
        (CopyProgress(num_full=10, num_held=10, num_landed=10, num_reserved=14), True),
        (CopyProgress(num_full=10, num_held=0, num_landed=0, num_reserved=11), True),  # no room to go on
    ],
)
def test_when_a_sequence_stands_still(progress: CopyProgress, stops: bool) -> None:
    assert should_stop(progress) is stops


SAMPLING = SamplingParams(
    max_tokens=50, temperature=0.5, top_k=3, repetition_penalty=1.25, logit_bias={5: 3.0}, seed=2**63, logprobs=2
)


def a_request(now_s: float) -> DecodeRequest:
    sequence = Sequence(RequestId("r"), [1, 2, 3, 4], 2, SAMPLING, b"salt")
    times = StageTimes(now_s - 5.0, now_s - 4.5, now_s - 4.0, now_s - 3.75, queue_s=0.25, prefill_s=0.5)
    return DecodeRequest(
        7,
        sequence,
        lambda deltas: None,
        deque(),
        deadline_s=now_s + 9.0,
        times=times,
        prefilled_by=WorkerId("p"),
        cached_tokens=1,
        pages_moved=3,
        num_preemptions=1,
        num_migrations=2,
        migration_pause_s=0.125,
    )


def test_a_state_makes_the_same_sequence_again() -> None:
    now_s = time.monotonic()
    request = a_request(now_s)

    def timing_at(one: DecodeRequest, at_s: float) -> object:
        return one.timing(decode_worker=WorkerId("d"), cached_tokens=0, num_preemptions=0, now_s=at_s)

    timing = request.timing(decode_worker=WorkerId("d"), cached_tokens=0, num_preemptions=1, now_s=now_s)
    state = sequence_state.to_wire(request, timing, now_s)
    told = worker_pb2.SequenceState.FromString(state.SerializeToString())
    made = sequence_state.from_wire(told, lambda deltas: None, now_s + 100.0)  # another clock
    for field in ("request_id", "token_ids", "num_prompt_tokens", "sampling", "salt"):
        assert getattr(made.sequence, field) == getattr(request.sequence, field)
    assert made.deadline_s - (now_s + 100.0) == pytest.approx(9.0, abs=0.01)
    again = timing_at(made, now_s + 100.0)
    wanted = replace(timing, num_migrations=3)
    for field in ("queue_s", "prefill_s", "transfer_s", "first_token_s", "decode_s", "migration_pause_s"):
        assert getattr(again, field) == pytest.approx(getattr(wanted, field))
    for field in ("prefill_worker", "cached_tokens", "pages_moved", "num_preemptions", "num_migrations"):
        assert getattr(again, field) == getattr(wanted, field)


def test_a_later_state_tells_only_what_is_new() -> None:
    now_s = time.monotonic()
    request = a_request(now_s)
    timing = request.timing(decode_worker=WorkerId("d"), cached_tokens=0, num_preemptions=0, now_s=now_s)
    made = sequence_state.from_wire(sequence_state.to_wire(request, timing, now_s), lambda deltas: None, now_s)
    request.sequence.token_ids += [5, 6]
    later = sequence_state.to_wire(request, timing, now_s, num_told=4)
    assert list(later.token_ids) == [5, 6]
    sequence_state.extend(made, later, now_s)
    assert made.sequence.token_ids == [1, 2, 3, 4, 5, 6]
    with pytest.raises(InvalidInput, match=r"state.num_told: is 4, but 6 tokens are known"):
        sequence_state.extend(made, later, now_s)
