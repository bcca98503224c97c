"""Tests that bulk sequences yield to others at a decode worker, lose no token by it, and get their turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.schedule.bulk_policy import UNLIMITED_ALONE, BulkLimits, BulkPolicy
from decode_worker.schedule.pace import Pace
from decode_worker.schedule.scheduler import DecodeScheduler
from decode_worker.schedule.step_costs import StepCosts, StepWork
from engine.step.plan import StepPlan
from engine.step.sequence import SampledToken, Sequence, StepOutput
from penstock.scheduling.bulk_lane import STEPS_PER_TURN, BulkStepLimit
from penstock.types import Lane
from tests.decode_worker.schedule.test_scheduler import make_scheduler, make_sequence, next_token, start
from tests.support.suite.examples import examples


def bulk_sequence(scheduler: DecodeScheduler, name: str, num_tokens: int) -> Sequence:
    return start(scheduler, make_sequence(name, num_tokens, lane=Lane.BULK))


def run_step(scheduler: DecodeScheduler, limits: BulkLimits = UNLIMITED_ALONE) -> StepPlan:
    plan = scheduler.schedule(None, limits)
    commit(scheduler, plan)
    scheduler.check_integrity()
    return plan


def commit(scheduler: DecodeScheduler, plan: StepPlan) -> None:
    sampled = tuple(SampledToken(next_token(item.sequence)) if item.is_sampled else None for item in plan)
    scheduler.commit(plan, StepOutput(sampled))


def lanes_of(plan: StepPlan) -> set[Lane]:
    return {item.sequence.lane for item in plan}


def test_bulk_decodes_only_while_no_other_sequence_does() -> None:
    scheduler, _ = make_scheduler(40)
    bulk = bulk_sequence(scheduler, "bulk", 4)
    run_step(scheduler)
    other = start(scheduler, make_sequence("other", 4))
    for _ in range(5):
        assert [item.sequence for item in run_step(scheduler)] == [other]
    assert bulk.num_output_tokens == 1
    scheduler.forget(other)
    assert [item.sequence for item in run_step(scheduler)] == [bulk]


def test_as_many_bulk_sequences_decode_beside_others_as_the_limit_says() -> None:
    scheduler, _ = make_scheduler(40)
    first, second = (bulk_sequence(scheduler, name, 2) for name in ("first", "second"))
    run_step(scheduler)
    other = start(scheduler, make_sequence("other", 4))
    limits = BulkLimits(rows_beside=1)
    assert {item.sequence for item in run_step(scheduler, limits)} == {first, other}
    assert {item.sequence for item in run_step(scheduler, BulkLimits(rows_beside=2))} == {first, second, other}
    assert {item.sequence for item in run_step(scheduler, limits)} == {first, other}


def test_a_step_of_bulk_alone_is_as_short_as_the_limits_say() -> None:
    scheduler, _ = make_scheduler(40)
    limits = BulkLimits(rows_alone=1, tokens_alone=3)
    for name in ("first", "second"):
        bulk_sequence(scheduler, name, 8)
    for _ in range(12):
        plan = run_step(scheduler, limits)
        assert len(plan.rows) <= 1
        assert sum(chunk.num_tokens for chunk in plan.chunks) <= 3


def test_a_pause_follows_steps_that_are_long_beside_first_tokens() -> None:
    limit = BulkStepLimit()
    limit.on_step(0.010, 1.0)
    assert not limit.rests, "no other request is known"
    limit.on_first_token(0.100, 1.0)
    limit.on_step(0.004, 2.0)
    assert not limit.rests
    assert limit.may_begin(2.0), "2 ms, half of the step, are 2 % of the first token"
    limit.on_step(0.010, 3.0)
    assert limit.rests
    assert not limit.may_begin(3.0)
    pause_s = not_none(limit.sweep(3.0)) - 3.0
    assert 0.010 / (0.010 + pause_s) * 0.005 == pytest.approx(0.02 * 0.100), "its probability times half of the step"
    limit.on_step(10.0, 4.0)
    assert not limit.may_begin(4.0)
    assert limit.sweep(4.0) == 4.0 + 40.0
    limit.on_step(0.010, 2000.0)
    assert not limit.rests, "first tokens of long ago do not count"


def test_a_pause_that_ends_between_a_step_and_the_sweep_is_not_forgotten() -> None:
    """Otherwise the step loop would wait for the next message, if there is none forever."""
    limit = BulkStepLimit()
    limit.on_first_token(0.100, 1.0)
    limit.on_step(0.010, 2.0)
    assert limit.sweep(2.0) is None, "no step was to begin"
    assert not limit.may_begin(2.0)
    ends_s = not_none(limit.sweep(2.001))
    assert limit.sweep(ends_s + 0.001) == ends_s
    assert limit.sweep(ends_s + 0.002) is None, "once is enough"
    assert limit.may_begin(ends_s)


def not_none(moment_s: float | None) -> float:
    assert moment_s is not None
    return moment_s


def test_bulk_rests_after_its_own_steps_and_no_step_is_scheduled_ahead() -> None:
    scheduler, _ = make_scheduler(40)
    policy = BulkPolicy(StepCosts(), Pace())
    bulk = bulk_sequence(scheduler, "bulk", 4)
    other = make_sequence("earlier", 4)
    other.token_ids.append(1)
    policy.on_token(other, 0.9, 1.0)
    policy.on_step(0.1, 2.0)
    resting = policy.limits(True, 0, 2.0)
    assert not scheduler.schedule(None, resting)
    rested_s = policy.sweep(2.0)
    assert rested_s is not None
    limits = policy.limits(True, 0, rested_s)
    plan = scheduler.schedule(None, limits)
    assert [item.sequence for item in plan] == [bulk]
    assert scheduler.schedule_ahead(None, limits) is None
    commit(scheduler, plan)
    assert policy.sweep(rested_s) is None
    other = start(scheduler, make_sequence("other", 4))
    assert [item.sequence for item in scheduler.schedule(None, resting)] == [other], "others never rest"


def test_others_take_the_pages_and_places_of_bulk_as_soon_as_they_need_them() -> None:
    scheduler, pool = make_scheduler(8, max_batch_sequences=2, max_batch_tokens=64)
    held = [bulk_sequence(scheduler, name, 8) for name in ("first", "second")]
    assert scheduler.bulk_use.num_pages == 0
    run_step(scheduler)
    assert scheduler.bulk_use.num_pages == sum(len(sequence.pages) for sequence in held) > 0
    other = start(scheduler, make_sequence("other", 28))
    assert [item.sequence for item in run_step(scheduler)] == [other]
    assert scheduler.preempted == [held[1], held[0]]
    assert scheduler.bulk_use.num_pages == 0
    pool.check_integrity()


def test_a_reservation_takes_the_pages_of_bulk() -> None:
    scheduler, pool = make_scheduler(6, max_batch_tokens=64)
    bulk = bulk_sequence(scheduler, "bulk", 16)
    run_step(scheduler)
    remote = make_sequence("remote", 12)
    scheduler.track(remote)
    plan = scheduler.schedule()  # a step in flight may still write the pages
    assert scheduler.reserve(remote, 12) is None
    assert scheduler.schedule_ahead() is None
    commit(scheduler, plan)
    granted = scheduler.reserve(remote, 12)
    assert granted is not None
    pool.release(granted.fresh)
    run_step(scheduler)
    assert scheduler.preempted == [bulk]


def test_bulk_takes_nothing_for_others_that_it_cannot_help() -> None:
    scheduler, _ = make_scheduler(8, max_batch_tokens=64)
    bulk_sequence(scheduler, "bulk", 4)
    run_step(scheduler)
    holder = start(scheduler, make_sequence("holder", 16))
    run_step(scheduler)
    start(scheduler, make_sequence("large", 28))
    assert [item.sequence for item in run_step(scheduler)] == [holder]
    assert scheduler.preempted == []


def test_bulk_gets_a_turn_beside_others() -> None:
    scheduler, _ = make_scheduler(800)
    other = start(scheduler, make_sequence("other", 1))
    run_step(scheduler)
    bulk = bulk_sequence(scheduler, "bulk", 4)
    turns = [number for number in range(2 * STEPS_PER_TURN) if Lane.BULK in lanes_of(run_step(scheduler))]
    assert turns == [STEPS_PER_TURN * turn - 1 for turn in (1, 2)]
    assert bulk.num_output_tokens == 2
    assert other.num_output_tokens == 2 * STEPS_PER_TURN + 1


def test_a_bulk_request_in_a_step_in_flight_keeps_its_token_if_it_is_held_back_then() -> None:
    scheduler, _ = make_scheduler(40)
    bulk = bulk_sequence(scheduler, "bulk", 4)
    run_step(scheduler)
    plan = scheduler.schedule()
    other = start(scheduler, make_sequence("other", 4))
    assert scheduler.schedule_ahead() is None  # bulk is held back first
    commit(scheduler, plan)
    assert bulk.num_output_tokens == 2
    assert [item.sequence for item in run_step(scheduler)] == [other]


@examples(60)
@given(data=st.data(), num_pages=st.integers(8, 24))
def test_others_run_as_if_there_were_no_bulk(data: st.DataObject, num_pages: int) -> None:
    """In every history without a turn, each step computes the same of the others, and all end with exactly their
    tokens, bulk as well.
    """
    mixed, pool = make_scheduler(num_pages, max_batch_sequences=3, max_batch_tokens=6)
    alone, _ = make_scheduler(num_pages, max_batch_sequences=3, max_batch_tokens=6)
    others: list[tuple[Sequence, Sequence]] = []
    bulk: list[Sequence] = []
    for number in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["other", "bulk", "end", "pause", "step", "step", "step"]))
        length = data.draw(st.integers(1, 16))
        if action == "other" and len(others) < 4:
            tokens = [start(each, make_sequence(f"o{number}", length)) for each in (mixed, alone)]
            others.append((tokens[0], tokens[1]))
        elif action == "bulk" and len(bulk) < 4:
            bulk.append(bulk_sequence(mixed, f"b{number}", length))
        elif action == "end" and others:
            ended, twin = others.pop(data.draw(st.integers(0, len(others) - 1)))
            mixed.forget(ended)
            alone.forget(twin)
        elif action == "pause" and (running := [each for each in bulk if mixed.is_running(each)]):
            mixed.pause(running[0])
            mixed.check_integrity()
            mixed.resume(running[0])
        else:
            computed = {item.sequence.request_id: item.num_tokens for item in run_step(alone)}
            plan = run_step(mixed)
            of_others = [item for item in plan if item.sequence.lane is not Lane.BULK]
            assert {item.sequence.request_id: item.num_tokens for item in of_others} == computed
            assert not (of_others and Lane.BULK in lanes_of(plan))
        pool.check_integrity()
    for sequence, _ in others:
        mixed.forget(sequence)
    for sequence in bulk:
        for _ in range(400):
            if sequence.num_output_tokens >= 4:
                break
            run_step(mixed)
        else:
            pytest.fail(f"{sequence.request_id} starves")
        expected = sequence.token_ids[: sequence.num_prompt_tokens]
        while len(expected) < len(sequence.token_ids):
            expected.append(next_token_after(expected))
        assert sequence.token_ids == expected
        mixed.forget(sequence)
    pool.check_integrity()
    assert pool.num_available == pool.num_pages


def next_token_after(token_ids: list[int]) -> int:
    return sum(token_ids) % 997


def learned(row_s: float) -> StepCosts:
    """Returns the costs of steps that take 10 ms and `row_s` for each row."""
    costs = StepCosts()
    for number in range(400):
        rows = 1 + number % 8
        costs.on_step(StepWork(0, 0.0, rows, 0.0), 0.01 + rows * row_s)
    return costs


@pytest.mark.parametrize(("row_s", "least", "most"), [(1e-3, 0, 0), (1e-4, 2, 4)])
def test_only_rows_that_hardly_lengthen_a_step_decode_beside_others(row_s: float, least: int, most: int) -> None:
    limits = BulkPolicy(learned(row_s), Pace()).limits(True, 2, now_s=0.0)
    assert least <= limits.rows_beside <= most
    assert limits.rows_alone is None  # no other request has been seen


def test_steps_of_bulk_are_short_against_the_first_tokens_of_others() -> None:
    policy, other, bulk = (
        BulkPolicy(learned(1e-3), Pace()),
        make_sequence("other", 4),
        make_sequence("b", 4, lane=Lane.BULK),
    )
    for sequence in (other, bulk):
        sequence.token_ids.append(1)
    policy.on_token(bulk, 0.0, 99.0)
    assert policy.limits(True, 0, now_s=99.0).rows_alone is None
    policy.on_token(other, 99.0, 99.15)
    limits = policy.limits(True, 0, now_s=100.0)
    assert limits.rows_alone is not None
    assert 3 <= limits.rows_alone <= 6  # 15 ms
    assert policy.limits(True, 0, now_s=1000.0).rows_alone is None
