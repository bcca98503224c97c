"""Decode scheduling: pages balance after every step, nobody starves, preemption keeps every token."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.run_queues import HANDICAP_REQUESTS
from decode_worker.scheduler import DecodeScheduler
from engine.page_pool import PagePool
from engine.prefix_cache import PrefixCache
from engine.row_table import RowTable
from engine.sequence import SampledToken, Sequence, StepOutput
from engine.step_plan import StepPlan
from penstock.config import DecodeConfig
from penstock.types import Lane, RequestId, SamplingParams

PAGE_SIZE = 4


def make_scheduler(num_pages: int, **config: float) -> tuple[DecodeScheduler, PagePool]:
    pool = PagePool(num_pages)
    defaults = {"max_batch_sequences": 4, "max_batch_tokens": 8, "watermark": 0.0}
    settings_ = DecodeConfig.model_validate(defaults | config)
    return DecodeScheduler(pool, PrefixCache(pool, PAGE_SIZE), PAGE_SIZE, settings_, RowTable(PAGE_SIZE)), pool


def make_sequence(name: str, num_tokens: int, seed: int = 0, lane: Lane = Lane.STANDARD) -> Sequence:
    tokens = random.Random(f"{name}{seed}").choices(range(1000), k=num_tokens)
    return Sequence(RequestId(name), tokens, num_tokens, SamplingParams(max_tokens=100), b"salt", lane=lane)


def next_token(sequence: Sequence) -> int:
    """Depends on the tokens alone, as a model's does."""
    return sum(sequence.token_ids) % 997


def run_step(scheduler: DecodeScheduler) -> StepPlan:
    work = scheduler.schedule()
    for scheduled in work:
        covered = scheduled.sequence.num_computed_tokens + scheduled.num_tokens
        assert len(scheduled.sequence.pages) * PAGE_SIZE >= covered
        assert 1 <= scheduled.num_tokens <= scheduled.sequence.num_uncomputed_tokens
    drawn = tuple(SampledToken(next_token(item.sequence)) if item.draws else None for item in work)
    scheduler.commit(work, StepOutput(drawn))
    return work


def start(scheduler: DecodeScheduler, sequence: Sequence) -> Sequence:
    scheduler.track(sequence)
    scheduler.compute_here(sequence)
    return sequence


def test_a_long_prompt_is_computed_in_chunks_beside_those_that_decode() -> None:
    scheduler, _ = make_scheduler(100)
    first = start(scheduler, make_sequence("first", 3))
    run_step(scheduler)
    assert first.num_output_tokens == 1
    second = start(scheduler, make_sequence("second", 20))
    steps = [{item.sequence.request_id: item.num_tokens for item in run_step(scheduler)} for _ in range(3)]
    assert steps == [{"first": 1, "second": 7}, {"first": 1, "second": 7}, {"first": 1, "second": 6}]
    assert (first.num_output_tokens, second.num_output_tokens) == (4, 1)


def test_the_youngest_is_preempted_and_loses_no_token() -> None:
    scheduler, pool = make_scheduler(6, max_batch_sequences=2)
    old, young = (start(scheduler, make_sequence(name, 8)) for name in ("old", "young"))
    while not scheduler.num_preemptions(young):
        run_step(scheduler)
        pool.check_integrity()
    emitted = list(young.token_ids)
    assert young.pages == []
    while old.num_output_tokens < 14:
        run_step(scheduler)
    assert scheduler.num_preemptions(old) == 0
    scheduler.forget(old)
    while young.num_output_tokens < 14:
        run_step(scheduler)
    assert young.token_ids[: len(emitted)] == emitted
    scheduler.forget(young)
    pool.check_integrity()
    assert pool.num_available == pool.num_pages


def test_bulk_makes_room_first_and_then_whoever_has_least_to_lose() -> None:
    scheduler, pool = make_scheduler(12, max_batch_sequences=8, max_batch_tokens=64)
    lanes = {"first": Lane.STANDARD, "short": Lane.STANDARD, "long": Lane.STANDARD, "bulk": Lane.BULK}
    lengths = {"first": 8, "short": 4, "long": 12, "bulk": 16}
    made = {name: start(scheduler, make_sequence(name, lengths[name], lane=lane)) for name, lane in lanes.items()}
    preempted: list[str] = []
    for _ in range(40):
        run_step(scheduler)
        pool.check_integrity()
        preempted += [name for name, one in made.items() if scheduler.num_preemptions(one) and name not in preempted]
    assert preempted[:2] == ["bulk", "short"]
    assert scheduler.num_preemptions(made["first"]) == 0


def test_interactive_requests_are_admitted_first() -> None:
    scheduler, _ = make_scheduler(40, max_batch_sequences=4, max_batch_tokens=4)
    for lane in (Lane.BULK, Lane.STANDARD, Lane.INTERACTIVE):
        start(scheduler, make_sequence(lane.value, 3, lane=lane))
    assert [item.sequence.request_id for item in run_step(scheduler)] == ["interactive", "standard"]


@settings(max_examples=60, deadline=None)
@given(lane=st.sampled_from(Lane), flood=st.lists(st.sampled_from(Lane), min_size=1, max_size=5))
def test_no_flood_keeps_a_request_waiting_for_ever(lane: Lane, flood: list[Lane]) -> None:
    """Of those that come after it, its handicap in requests goes first, and beside its own chunks a few more."""
    scheduler, _ = make_scheduler(8, max_batch_sequences=2, max_batch_tokens=4)
    waiting = start(scheduler, make_sequence("waiting", 5, lane=lane))
    number, later = 0, dict[Sequence, int]()
    while not waiting.num_output_tokens:
        while scheduler.num_waiting < 4:
            number += 1
            newcomer = make_sequence(f"n{number}", 3, lane=flood[number % len(flood)])
            later[start(scheduler, newcomer)] = number
        run_step(scheduler)
        for sequence in [one for one in later if one.num_output_tokens]:
            assert later.pop(sequence) <= HANDICAP_REQUESTS[lane] + 6
            scheduler.forget(sequence)
        assert number <= HANDICAP_REQUESTS[lane] + 10


def test_a_reservation_waits_for_pages_and_for_those_who_came_before() -> None:
    scheduler, pool = make_scheduler(4)
    holder = start(scheduler, make_sequence("holder", 12))
    run_step(scheduler)
    remote = make_sequence("remote", 8)
    scheduler.track(remote)
    assert scheduler.reserve(remote, 8) is None
    scheduler.forget(holder)
    granted = scheduler.reserve(remote, 8)
    assert granted is not None
    assert (granted.held, len(granted.fresh)) == ([], 2)
    pool.release(granted.fresh)


def test_a_reservation_names_the_pages_that_are_here_already() -> None:
    scheduler, _ = make_scheduler(20, max_batch_tokens=16)
    first = start(scheduler, make_sequence("same", 12))
    run_step(scheduler)
    again = Sequence(RequestId("again"), first.token_ids[:12], 12, SamplingParams(max_tokens=4), b"salt")
    scheduler.track(again)
    assert scheduler.peek_cached_tokens(again) == 8  # never the page of the last token: its logits are needed
    granted = scheduler.reserve(again, 12)
    assert granted is not None
    assert (granted.held, len(granted.fresh)) == (first.pages[:2], 1)


def test_another_salt_shares_nothing() -> None:
    scheduler, _ = make_scheduler(20, max_batch_tokens=16)
    first = start(scheduler, make_sequence("same", 12))
    run_step(scheduler)
    other = Sequence(RequestId("other"), list(first.token_ids), 12, SamplingParams(max_tokens=4), b"tenant")
    assert scheduler.peek_cached_tokens(other) == 0


def test_a_config_that_starves_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match="max_batch_tokens = 2 is below"):
        DecodeConfig(max_batch_tokens=2, max_batch_sequences=4)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_pages=st.integers(8, 24))
def test_any_history_balances_and_ends(data: st.DataObject, num_pages: int) -> None:
    """Random arrivals (here and from afar), cancellations and steps: every survivor gets exactly its tokens."""
    scheduler, pool = make_scheduler(num_pages, max_batch_sequences=3, max_batch_tokens=6)
    live: list[Sequence] = []
    landing: list[Sequence] = []
    for number in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["local", "remote", "land", "cancel", "step", "step", "step"]))
        if action in ("local", "remote") and len(live) < 6:
            length = data.draw(st.integers(1, 16))
            lane = data.draw(st.sampled_from(Lane))
            sequence = make_sequence(f"s{number % 3}", length, lane=lane)  # few names: prefixes repeat
            scheduler.track(sequence)
            live.append(sequence)
            if action == "local":
                scheduler.compute_here(sequence)
            elif granted := scheduler.reserve(sequence, length):
                sequence.pages = [*granted.held, *granted.fresh]
                landing.append(sequence)
            else:
                scheduler.compute_here(sequence)
        elif action == "land" and landing:
            sequence = landing.pop(data.draw(st.integers(0, len(landing) - 1)))
            length = len(sequence.token_ids)
            sequence.token_ids.append(next_token(sequence))
            scheduler.join(sequence, length)
        elif action == "cancel" and live:
            victim = live.pop(data.draw(st.integers(0, len(live) - 1)))
            landing = [sequence for sequence in landing if sequence is not victim]
            scheduler.forget(victim)
        else:
            run_step(scheduler)
        pool.check_integrity()
    for sequence in landing:
        scheduler.forget(sequence)
    # The first in rank gets on whatever the others hold; they leave in that order.
    for sequence in sorted((one for one in live if one not in landing), key=scheduler.rank):
        _run_until_it_has(scheduler, sequence, 4)
        expected = sequence.token_ids[: sequence.num_prompt_tokens]
        while len(expected) < len(sequence.token_ids):
            expected.append(sum(expected) % 997)
        assert sequence.token_ids == expected
        scheduler.forget(sequence)
    pool.check_integrity()
    assert pool.num_available == pool.num_pages


def _run_until_it_has(scheduler: DecodeScheduler, sequence: Sequence, num_tokens: int) -> None:
    for _ in range(400):
        if sequence.num_output_tokens >= num_tokens:
            return
        run_step(scheduler)
    pytest.fail(f"{sequence.request_id} starves: {sequence.num_output_tokens} tokens after 400 steps")
