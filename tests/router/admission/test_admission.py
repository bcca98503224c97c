"""Tests admission as pure decisions: requests wait, none starves, each leaves once, and refusals carry hints."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.admission import (
    AdmissionConfig,
    BulkLane,
    InteractiveLane,
    LaneConfig,
    OverloadConfig,
    TenantLimits,
)
from penstock.errors import DeadlineExceeded, Overloaded
from penstock.types import Lane
from router.admission.capacity import FleetState, Outstanding
from router.admission.interface import Dispatched, Queued, RefusalReason, Refused, RequestUsage
from router.admission.lane_queue import LaneQueue, QueueEntry, QueueUse
from tests.support.router.admission_requests import FLEET, PATIENT, admission, ask, fill
from tests.support.suite.examples import examples

# Order.


def test_a_request_is_dispatched_at_once_while_there_is_room():
    made = admission()
    assert made.offer(ask(1), 0.0) == Dispatched(1, max_tokens=50)
    assert made.next_poll_s() is None


def test_within_a_lane_the_earliest_deadline_goes_first():
    made = admission()
    out = fill(made)
    for key, timeout in ((1, 30.0), (2, 10.0), (3, 20.0)):
        assert made.offer(ask(key, timeout=timeout), 0.0) == Queued(key)
    for now_s, expected in ((1.0, 2), (2.0, 3), (3.0, 1)):
        made.end(out.pop(), None, now_s)
        assert [answer.key for answer in made.poll(now_s)] == [expected]


def test_lanes_with_queued_requests_share_by_weight():
    made = admission(AdmissionConfig())
    out = fill(made)
    lane_of = {}
    for key in range(1200):
        lane_of[key] = list(Lane)[key % 3]
        assert made.offer(ask(key, lane_of[key]), 0.0) == Queued(key)
    served = dict.fromkeys(Lane, 0)
    for _ in range(210):
        made.end(out.pop(0), RequestUsage(50), 0.0)
        for answer in made.poll(0.0):
            out.append(answer.key)
            served[lane_of[answer.key]] += 1
    assert [round(served[lane] / 10) for lane in Lane] == [16, 4, 1]


SHORT_QUEUES = PATIENT.model_copy(
    update={lane.value: PATIENT.lane(lane).model_copy(update={"max_queue": 2, "target_wait_s": 900.0}) for lane in Lane}
)


@pytest.mark.parametrize("victim_lane", list(Lane))
@examples(15)
@given(data=st.data())
def test_a_queued_request_is_served_within_a_bound_under_any_load(victim_lane, data):
    """Keeps every queue full of what delays the victim most: urgent requests, other tenants, other lanes."""
    made = admission(SHORT_QUEUES)
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    out = fill(made, lane=victim_lane)
    other_lanes = [victim_lane, *data.draw(st.lists(st.sampled_from(list(Lane)), max_size=3))]
    other_tenants = data.draw(st.lists(st.sampled_from(["", "a", "b"]), min_size=1, max_size=3))
    urgent_s = data.draw(st.sampled_from([5.0, 50.0, 1e6]))
    weights = {lane: SHORT_QUEUES.lane(lane).weight for lane in Lane}
    cheapest, costliest = 100.0 + 2.0, 110.0 + 2.0 * 2
    turns_of_lanes = sum(weights.values()) / weights[victim_lane] * costliest / cheapest + len(Lane)
    turns_of_tenants = 3 * (costliest / cheapest + 1)
    patience = 450  # half of the longest wait, at one second a turn
    bound = int(patience + (2 + 1) * turns_of_lanes * turns_of_tenants)
    assert made.offer(ask(0, victim_lane), 0.0) == Queued(0)
    key = 0
    for turn in range(1, bound):
        now_s = float(turn)
        for _ in range(3):
            key += 1
            lane, tenant = rng.choice(other_lanes), rng.choice(other_tenants)
            size = {"prompt": rng.randint(100, 110), "max_tokens": rng.randint(1, 2)}
            answer = made.offer(ask(key, lane, tenant, at=now_s, timeout=urgent_s, **size), now_s)
            if isinstance(answer, Dispatched):  # beside bulk, which leaves room for others
                assert lane is not Lane.BULK
                assert victim_lane is Lane.BULK
                out.append(answer.key)
        made.end(out.pop(rng.randrange(len(out))), RequestUsage(rng.randint(1, 2)), now_s)
        answers = made.poll(now_s)
        out += [answer.key for answer in answers if isinstance(answer, Dispatched)]
        if victim := [answer for answer in answers if answer.key == 0]:
            assert victim == [Dispatched(0, 50, waited_s=now_s)]
            return
    pytest.fail(f"not served within {bound} turns")


# Every request leaves once.


@examples(50)
@given(data=st.data())
def test_each_admitted_request_leaves_exactly_once_and_all_counts_return_to_zero(data):
    limits = TenantLimits(tokens_per_s=200.0, burst_tokens=5000, max_inflight_tokens=900)
    config = AdmissionConfig(
        interactive=InteractiveLane(max_queue=4, target_wait_s=3.0),
        standard=LaneConfig(max_queue=4, target_wait_s=6.0),
        bulk=BulkLane(max_queue=4, target_wait_s=12.0),
        overload=OverloadConfig(shed=data.draw(st.booleans()), max_tokens=data.draw(st.sampled_from([None, 9]))),
    )
    made = admission(config, limits_of=lambda tenant: limits if tenant else TenantLimits())
    waiting, out, left, now_s = set(), set(), set(), 0.0

    def take(answers):
        for answer in answers:
            assert answer.key in waiting
            waiting.remove(answer.key)
            (out if isinstance(answer, Dispatched) else left).add(answer.key)

    for key in range(data.draw(st.integers(5, 60))):
        now_s += data.draw(st.floats(0.0, 1.0))
        request = ask(
            key,
            data.draw(st.sampled_from(list(Lane))),
            data.draw(st.sampled_from(["", "a"])),
            prompt=data.draw(st.integers(1, 500)),
            at=now_s,
            timeout=data.draw(st.sampled_from([0.5, 5.0, 100.0])),
            n=data.draw(st.integers(1, 3)),
            open_ended=data.draw(st.booleans()),
        )
        answer = made.offer(request, now_s)
        if not isinstance(answer, Refused):
            (out if isinstance(answer, Dispatched) else waiting).add(key)
        action = data.draw(st.sampled_from(["none", "start", "grow", "end", "lose", "cancel"]))
        if action == "grow" and out:
            made.grow(data.draw(st.sampled_from(sorted(out))), data.draw(st.integers(0, 10_000)))
        elif action == "start" and out:
            made.start(data.draw(st.sampled_from(sorted(out))))
        elif action == "cancel" and waiting:
            key = data.draw(st.sampled_from(sorted(waiting)))
            waiting.remove(key)
            made.end(key, None, now_s)
        elif action in ("end", "lose") and out:
            key = data.draw(st.sampled_from(sorted(out)))
            out.remove(key)
            made.end(key, RequestUsage(30) if action == "end" else None, now_s)
        take(made.poll(now_s))
        assert made.num_waiting == len(waiting)
        assert made.num_inside == len(waiting) + len(out)
        assert made.outstanding.num_requests == len(out)
    while waiting or out:
        now_s += 1.0
        for key in sorted(out):
            made.end(key, None, now_s)
        out.clear()
        take(made.poll(now_s))
    assert made.num_inside == made.num_waiting == 0
    assert made.outstanding == Outstanding()
    assert made.inflight_tokens("a") == made.inflight_tokens("") == 0
    assert made.next_poll_s() is None
    assert all(made._lanes[lane].cost == made.queue_bytes(lane) == 0 for lane in Lane)
    assert made.waiting_tokens == 0


# Waiting.


def test_prompts_of_bulk_keep_no_other_waiting():
    made = admission(AdmissionConfig(), replace(FLEET, slots=40, prefill_tokens_per_s=2000.0))
    for key in range(20):
        assert isinstance(made.offer(ask(key, Lane.BULK, prompt=1024), 0.0), Dispatched)
    assert isinstance(made.offer(ask(20, Lane.INTERACTIVE, prompt=1024), 0.0), Dispatched)


FULL_OF_BULK = FleetState(num_decode=1, slots=4, num_waiting=8, kv_tokens=2000, free_kv_tokens=0, num_bulk=12)


def full_of_bulk(num_waiting=2):
    """Returns a policy whose bulk requests hold every place and page, and `num_waiting` others that wait."""
    made = admission()
    fill(made, first_key=30_000, lane=Lane.BULK)
    for key in range(num_waiting):
        assert isinstance(made.offer(ask(key, Lane.BULK), 0.0), Queued)
    made.on_fleet(replace(FULL_OF_BULK, bulk_kv_tokens=2000), 0.0)
    assert not made.poll(0.0)
    return made


@pytest.mark.parametrize("lane", [Lane.INTERACTIVE, Lane.STANDARD])
def test_places_and_pages_of_bulk_keep_no_other_waiting(lane):
    made = full_of_bulk()
    assert made.saturation == 0.0
    sent = fill(made, lane=lane)
    assert sent == fill(admission(fleet=replace(FULL_OF_BULK, num_bulk=0, num_waiting=0, free_kv_tokens=2000)))
    for key in range(20_000, 20_200):  # also when it is the turn of bulk, which has no room
        assert made.offer(ask(key, lane), 1.0) == Queued(key)
        made.end(sent.pop(0), RequestUsage(50), 1.0)
        [answer] = made.poll(1.0)
        assert answer == Dispatched(key, 50, waited_s=1.0)
        sent.append(key)
    assert made.num_waiting_in(Lane.BULK) == 2


def test_bulk_of_other_routers_keeps_no_other_waiting():
    fleet = replace(FULL_OF_BULK, bulk_kv_tokens=2000, peer_sequences=12, peer_bulk_sequences=12)
    assert fill(admission(fleet=fleet)) == fill(full_of_bulk(0))
    assert len(fill(admission(fleet=fleet), lane=Lane.BULK)) == 2  # the fewest for a worker


@pytest.mark.parametrize("lane", list(Lane))
def test_a_burst_of_any_lane_is_queued_whole_and_not_shortened(lane):
    made = admission(AdmissionConfig(), replace(FLEET, prefill_tokens_per_s=2000.0))
    out, waiting, now_s = [], set(range(2000)), 0.0
    for key in range(2000):
        answer = made.offer(ask(key, lane, prompt=1024, max_tokens=300, timeout=1e4), 0.0)
        assert not isinstance(answer, Refused)
        if isinstance(answer, Dispatched):
            out.append(answer)
            waiting.remove(key)
    while waiting:
        now_s += 2.0  # each request takes a while, so the last ones wait for a quarter of an hour
        for _ in range(len(out)):
            answer = out.pop(0)
            assert answer.max_tokens == 300
            made.end(answer.key, RequestUsage(300), now_s)
        for answer in made.poll(now_s):
            assert isinstance(answer, Dispatched)
            waiting.remove(answer.key)
            out.append(answer)
        newcomer = ask(10_000 + int(now_s), lane, prompt=1024, max_tokens=300, at=now_s, timeout=1e4)
        assert isinstance(made.offer(newcomer, now_s), Queued) or not waiting
        made.end(newcomer.key, None, now_s)  # its client leaves
    assert now_s > 600.0


def test_clients_that_leave_early_delay_no_other():
    """200 clients take one token and leave, beside five that stay."""
    made = admission(AdmissionConfig(), replace(FLEET, prefill_tokens_per_s=2000.0))
    stay, now_s, served = set(range(0, 205, 41)), 0.0, {}
    answers = [made.offer(ask(key, prompt=512, max_tokens=300, timeout=600.0), 0.0) for key in range(205)]
    assert not any(isinstance(answer, Refused) for answer in answers)
    out = [answer for answer in answers if isinstance(answer, Dispatched)]
    while len(served) < len(stay):
        now_s += 0.5
        for answer in out:
            if answer.key in stay:
                served[answer.key] = answer.max_tokens
            made.start(answer.key)
            made.end(answer.key, RequestUsage(300) if answer.key in stay else RequestUsage(1, whole=False), now_s)
        out = made.poll(now_s)
        assert all(isinstance(answer, Dispatched) for answer in out)
    assert set(served.values()) == {300}
    assert made.level == 0


def test_queued_requests_wait_for_the_successor_of_a_lost_worker():
    """Requests are not dispatched while no worker takes them, and are not held back after that."""
    for comes_back in (True, False):
        made = admission()
        fill(made)
        assert isinstance(made.offer(ask(1), 0.0), Queued)
        made.on_fleet(None, 10.0)
        made.on_fleet(None, 11.0)
        assert made.poll(12.0) == []
        assert made.next_poll_s() == 40.0
        if comes_back:
            made.on_fleet(replace(FLEET, slots=64), 20.0)
            assert [answer.key for answer in made.poll(20.0)] == [1]
            assert made.next_poll_s() is None
        else:
            assert made.poll(39.0) == []
            assert [answer.key for answer in made.poll(40.0)] == [1]
            made.on_fleet(None, 41.0)
            assert isinstance(made.offer(ask(2, tenant="a"), 41.0), Dispatched)
            assert made.next_poll_s() is None


def test_the_queue_is_bounded_in_requests_and_bytes():
    lane = LaneConfig(max_queue=4, max_queue_bytes=1 << 20)
    made = admission(AdmissionConfig(standard=lane))
    fill(made)
    assert isinstance(made.offer(ask(1, prompt=100_000), 0.0), Queued)  # larger than the bound, but alone in the queue
    refused = made.offer(ask(2, prompt=1), 0.0)
    assert (refused.reason, "is full: it holds 8 MiB" in refused.message) == (RefusalReason.QUEUE_FULL, True)
    made.end(1, None, 0.0)
    assert made.queue_bytes(Lane.STANDARD) == 0
    assert all(isinstance(made.offer(ask(key), 0.0), Queued) for key in range(3, 7))
    assert made.offer(ask(7), 0.0).reason is RefusalReason.QUEUE_FULL
    assert isinstance(made.offer(ask(8, Lane.BULK), 0.0), Queued)  # each lane has its own bound


def test_one_tenant_can_fill_half_of_a_queue():
    made = admission(AdmissionConfig(standard=LaneConfig(max_queue=8)))
    fill(made)
    assert all(isinstance(made.offer(ask(key, tenant="a"), 0.0), Queued) for key in range(4))
    refused = made.offer(ask(4, tenant="a"), 0.0)
    assert (refused.reason, "this tenant's part of" in refused.message) == (RefusalReason.QUEUE_FULL, True)
    assert all(isinstance(made.offer(ask(key, tenant="b"), 0.0), Queued) for key in range(10, 14))


def test_a_retry_hint_is_the_time_in_which_the_queue_halves():
    config = AdmissionConfig(standard=LaneConfig(max_queue=100))
    made, now_s = backlogged(config, per_turn_s=4.0)
    for key in range(1000, 1000 + 100 - made.num_waiting):
        assert isinstance(made.offer(ask(key, max_tokens=1, at=now_s), now_s), Queued)
    refused = made.offer(ask(5000, max_tokens=1, at=now_s), now_s)
    assert refused.reason is RefusalReason.QUEUE_FULL
    assert 0.7 * 200.0 <= refused.retry_after_s <= 1.3 * 1.5 * 200.0  # fifty requests, one in four seconds


@settings(deadline=None)
@given(data=st.data())
def test_the_cost_before_a_newcomer_is_its_tenants_earlier_requests(data):
    queue, waiting = LaneQueue(), []
    for key in range(data.draw(st.integers(1, 30))):
        if waiting and data.draw(st.booleans()):
            queue.remove(waiting.pop(data.draw(st.integers(0, len(waiting) - 1))))
        tenant, due_s = data.draw(st.sampled_from("ab")), float(data.draw(st.integers(0, 5)))
        entry = QueueEntry(key, tenant, due_s, 1e6, data.draw(st.integers(1, 9)), 1, 7)
        queue.push(entry)
        waiting.append(entry)
    for tenant in "abc":
        own = [entry for entry in waiting if entry.tenant == tenant]
        assert queue.use_of(tenant).prompt_tokens == 7 * len(own)
        assert queue.cost_before(tenant, 3.0, 1.0) == sum(entry.cost for entry in own if entry.due_s <= 3.0)
    for entry in waiting:
        queue.remove(entry)
    assert queue.total == QueueUse()


# Refusal before any work.


def test_a_deadline_that_cannot_be_met_is_refused_at_once():
    fleet = replace(FLEET, prefill_tokens_per_s=1000.0, queued_prefill_tokens=8000)
    made = admission(fleet=fleet)
    # Nothing is outstanding, so the request is tried.
    assert isinstance(made.offer(ask(0, timeout=5.0), 0.0), Dispatched)
    refused = made.offer(ask(1, timeout=5.0), 0.0)
    assert isinstance(refused, Refused)
    assert refused.reason is RefusalReason.DEADLINE
    assert refused.retry_after_s >= 3.0
    error = refused.error()
    assert isinstance(error, DeadlineExceeded)
    assert "has 5 s left until its deadline and needs about 8 s" in error.message
    assert error.retry_after_s == refused.retry_after_s
    assert isinstance(made.offer(ask(2, timeout=9.0), 0.0), Dispatched)


SHED = PATIENT.model_copy(update={"overload": OverloadConfig(shed=True)})


def backlogged(config=PATIENT, per_turn_s=0.5, **settings):
    """Builds a queue whose measured drain rate is one request per turn."""
    made = admission(config)
    out = fill(made, max_tokens=1)
    for key in range(4):
        assert made.offer(ask(key, max_tokens=1), 0.0) == Queued(key)
    now_s = 0.0
    for key in range(100, 120):
        now_s += per_turn_s
        made.end(out.pop(0), RequestUsage(1), now_s)
        out += [answer.key for answer in made.poll(now_s)]
        assert made.offer(ask(key, max_tokens=1, at=now_s, **settings), now_s) == Queued(key)
    return made, now_s


def test_a_predicted_wait_past_the_deadline_is_refused_with_a_hint():
    made, now_s = backlogged(SHED)
    refused = made.offer(ask(1, max_tokens=1, at=now_s, timeout=0.4), now_s)
    assert (type(refused), refused.reason) == (Refused, RefusalReason.DEADLINE)
    assert refused.retry_after_s > 0
    # Four requests wait and one leaves each half second: two seconds, plus this request's own turn.
    assert isinstance(made.offer(ask(2, max_tokens=1, at=now_s, timeout=4.0), now_s), Queued)


def test_by_default_a_deadline_is_refused_only_if_half_of_the_predicted_wait_misses_it():
    made, now_s = backlogged()
    urgent = {"max_tokens": 1, "at": now_s, "tenant": "other"}  # behind its share, half, of the queue
    assert isinstance(made.offer(ask(1, timeout=1.0, **urgent), now_s), Queued)
    made.end(1, None, now_s)
    refused = made.offer(ask(2, timeout=0.05, **urgent), now_s)
    assert refused.reason is RefusalReason.DEADLINE
    assert refused.retry_after_s > 0


def test_a_slow_first_completion_refuses_no_deadline():
    """When the first of many simultaneous requests ends, the rate so far predicts that all others are late."""
    made = admission(AdmissionConfig(), replace(FLEET, slots=64))
    out = fill(made)
    for key in range(200):
        assert isinstance(made.offer(ask(key, timeout=120.0), 0.0), Queued)
    made.end(out.pop(), RequestUsage(50), 20.0)
    made.poll(20.0)
    assert isinstance(made.offer(ask(300, at=20.0, timeout=120.0), 20.0), Queued)


def test_an_urgent_request_counts_only_the_requests_ahead_of_it():
    made, now_s = backlogged(SHED)
    assert isinstance(made.offer(ask(1, max_tokens=1, at=now_s, timeout=1.0), now_s), Queued)


def test_with_shedding_a_wait_beyond_the_lanes_target_is_refused_with_a_hint():
    lane = LaneConfig(max_queue=50, target_wait_s=4.0, shed_from=0.99)
    made, now_s = backlogged(SHED.model_copy(update={"standard": lane}))
    answers = [made.offer(ask(key, max_tokens=1, at=now_s), now_s) for key in range(1000, 1006)]
    assert answers[0] == Queued(1000)
    refused = answers[-1]
    assert (refused.reason, isinstance(refused.error(), Overloaded)) == (RefusalReason.WAIT, True)
    assert 0.5 < refused.retry_after_s < 10.0


def test_a_full_queue_refuses_with_jittered_hints():
    made = admission()
    fill(made)
    for key in range(8):
        assert made.offer(ask(key), 0.0) == Queued(key)
    refused = [made.offer(ask(key), 0.0) for key in range(100, 150)]
    assert {refusal.reason for refusal in refused} == {RefusalReason.QUEUE_FULL}
    assert len({refusal.retry_after_s for refusal in refused}) == 50
    assert isinstance(refused[0].error(), Overloaded)


def test_a_request_waits_until_its_deadline():
    made = admission()
    fill(made)
    made.offer(ask(1, timeout=1e5), 0.0)
    assert made.next_poll_s() == 1e5
    assert made.poll(1e5 - 1.0) == []
    (refused,) = made.poll(1e5)
    assert (refused.key, refused.reason) == (1, RefusalReason.DEADLINE)
    assert refused.retry_after_s > 0


def test_with_shedding_a_request_that_waits_too_long_leaves_the_queue_with_a_hint():
    made = admission(SHED)
    fill(made)
    made.offer(ask(1, timeout=3.0), 0.0)
    made.offer(ask(2), 0.0)
    assert made.next_poll_s() == 3.0
    (refused,) = made.poll(3.0)
    assert (refused.key, refused.reason) == (1, RefusalReason.DEADLINE)
    (refused,) = made.poll(made.next_poll_s())
    assert (refused.key, refused.reason) == (2, RefusalReason.WAIT)
    assert refused.retry_after_s > 0


def test_without_measurements_no_request_is_refused_for_its_deadline():
    made = admission(fleet=FleetState(num_decode=1))
    assert isinstance(made.offer(ask(1, max_tokens=4096, timeout=0.1), 0.0), Dispatched)
