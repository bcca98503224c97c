"""Tests which sequences migrate, how many pages they reserve, when they pause, and what state they carry."""

from __future__ import annotations

import time
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.migrate import sequence_state
from decode_worker.migrate.migration_policy import (
    CopyProgress,
    MigrationCandidate,
    choose_sequences,
    num_tokens_to_reserve,
    should_pause,
)
from decode_worker.request import DecodeRequest, Delta, StageTimes
from engine.step.sequence import Sequence
from penstock.errors import InvalidInput
from penstock.types import RequestId, SamplingParams, WorkerId
from penstock.v1 import common_pb2, worker_pb2


def candidate(name: str, num_tokens: int, num_tokens_left: int) -> MigrationCandidate:
    return MigrationCandidate(RequestId(name), num_tokens, num_tokens_left)


def test_the_most_work_for_the_least_kv_migrates_first() -> None:
    long, short, ending = candidate("long", 1000, 100), candidate("short", 50, 100), candidate("ending", 50, 3)
    assert choose_sequences([long, short, ending], (), None) == [short, long]
    assert choose_sequences([long, short, ending], (), 1) == [short]
    assert choose_sequences([long, short, ending], {RequestId("ending")}, None) == [ending]


def test_a_sequence_with_few_tokens_left_stays() -> None:
    stays, goes = candidate("stays", 50, 16), candidate("goes", 50, 17)
    assert choose_sequences([stays, goes], (), None) == [goes]


@given(
    num_tokens=st.integers(1, 5000),
    num_tokens_left=st.integers(0, 5000),
    page_size=st.sampled_from([1, 4, 16, 64]),
)
def test_the_reservation_covers_current_tokens_and_at_most_those_left(
    num_tokens: int, num_tokens_left: int, page_size: int
) -> None:
    wanted = num_tokens_to_reserve(num_tokens, num_tokens_left, page_size)
    assert num_tokens <= wanted <= num_tokens + num_tokens_left
    assert wanted <= num_tokens * 17 / 16 + 2 * page_size


@given(page_size=st.sampled_from([1, 4, 16]), num_prompt=st.integers(1, 400), pages_a_step=st.floats(0.01, 3.0))
def test_every_copy_reaches_its_pause_within_its_reservation(
    page_size: int, num_prompt: int, pages_a_step: float
) -> None:
    """Pages land faster or slower than tokens are added."""
    num_computed, num_left = num_prompt, 1000
    reserved = -(-num_tokens_to_reserve(num_computed + 1, num_left, page_size) // page_size)
    landed = 0.0
    while True:
        num_full = num_computed // page_size
        landed = min(landed + pages_a_step, num_full)
        if should_pause(CopyProgress(num_full, 0, int(landed), reserved)):
            break
        num_computed += 1
    assert -(-num_computed // page_size) <= reserved


@pytest.mark.parametrize(
    ("progress", "pauses"),
    [
        # Nothing to copy before the pause.
        (CopyProgress(num_full=0, num_held=0, num_landed=0, num_reserved=3), True),
        (
            CopyProgress(num_full=1, num_held=0, num_landed=0, num_reserved=4),
            False,
        ),  # the target may not be connected yet
        (CopyProgress(num_full=10, num_held=0, num_landed=8, num_reserved=14), False),
        (CopyProgress(num_full=10, num_held=0, num_landed=9, num_reserved=14), True),
        (CopyProgress(num_full=10, num_held=9, num_landed=9, num_reserved=14), False),
        (CopyProgress(num_full=10, num_held=10, num_landed=10, num_reserved=14), True),
        (CopyProgress(num_full=10, num_held=0, num_landed=0, num_reserved=11), True),  # no room for another token
    ],
)
def test_a_sequence_pauses_when_little_is_left_to_copy_or_no_room_remains(progress: CopyProgress, pauses: bool) -> None:
    assert should_pause(progress) is pauses


SAMPLING = SamplingParams(
    max_tokens=50, temperature=0.5, top_k=3, repetition_penalty=1.25, logit_bias={5: 3.0}, seed=2**63, logprobs=2
)


class Unread:
    """Stands in for a router's stream that is never read."""

    def send(self, deltas: list[Delta]) -> None: ...


def make_request(now_s: float) -> DecodeRequest:
    sequence = Sequence(RequestId("r"), [1, 2, 3, 4], 2, SAMPLING, b"salt")
    times = StageTimes(
        now_s - 5.0, now_s - 4.5, now_s - 4.0, now_s - 3.75, queue_s=0.25, prefill_s=0.5, preempted_s=[now_s - 2.0]
    )
    return DecodeRequest(
        7,
        sequence,
        Unread(),
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


def test_a_state_rebuilds_the_same_sequence() -> None:
    now_s = time.monotonic()
    request = make_request(now_s)

    def timing_at(request: DecodeRequest, at_s: float) -> object:
        return request.timing(decode_worker=WorkerId("d"), cached_tokens=0, num_preemptions=0, now_s=at_s)

    timing = request.timing(decode_worker=WorkerId("d"), cached_tokens=0, num_preemptions=1, now_s=now_s)
    state = sequence_state.to_wire(request, timing, now_s)
    received = worker_pb2.SequenceState.FromString(state.SerializeToString())
    made = sequence_state.from_wire(received, Unread(), now_s + 100.0)  # the target's clock differs
    for field in ("request_id", "token_ids", "num_prompt_tokens", "sampling", "salt"):
        assert getattr(made.sequence, field) == getattr(request.sequence, field)
    assert made.deadline_s - (now_s + 100.0) == pytest.approx(9.0, abs=0.01)
    again = timing_at(made, now_s + 100.0)
    wanted = common_pb2.Timing()
    wanted.CopyFrom(timing)
    wanted.num_migrations = 3
    for field in ("queue_ms", "prefill_ms", "transfer_ms", "first_token_ms", "decode_ms", "migration_pause_ms"):
        assert getattr(again, field) == pytest.approx(getattr(wanted, field))
    for field in ("prefill_worker", "cached_tokens", "pages_moved", "num_preemptions", "num_migrations"):
        assert getattr(again, field) == getattr(wanted, field)
    assert list(again.preempted_ms) == pytest.approx([3000.0])  # counted from the submission


def test_a_later_state_carries_only_new_tokens() -> None:
    now_s = time.monotonic()
    request = make_request(now_s)
    timing = request.timing(decode_worker=WorkerId("d"), cached_tokens=0, num_preemptions=0, now_s=now_s)
    made = sequence_state.from_wire(sequence_state.to_wire(request, timing, now_s), Unread(), now_s)
    request.sequence.token_ids += [5, 6]
    later = sequence_state.to_wire(request, timing, now_s, num_known=4)
    assert list(later.token_ids) == [5, 6]
    sequence_state.extend(made, later, now_s)
    assert made.sequence.token_ids == [1, 2, 3, 4, 5, 6]
    with pytest.raises(InvalidInput, match=r"state.num_known: is 4, but 6 tokens are known"):
        sequence_state.extend(made, later, now_s)
