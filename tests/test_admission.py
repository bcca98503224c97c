"""The router's admission as pure decisions: nobody starves, every request leaves once, refusals hint."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.admission_config import AdmissionConfig, BulkLane, InteractiveLane, LaneConfig, TenantLimits
from penstock.errors import DeadlineExceeded, Overloaded
from penstock.types import Lane
from router.capacity import FleetState, Outstanding
from router.verdicts import Dispatched, Queued, Reason, Refused, Used
from tests.admission_asks import FLEET, PATIENT, admission, ask, fill

# Order.


def test_a_request_with_room_goes_at_once_and_waits_for_nothing():
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


def test_lanes_share_by_weight_when_all_have_work():
    config = AdmissionConfig(
        interactive=InteractiveLane(max_queue=500), standard=LaneConfig(max_queue=500), bulk=BulkLane(max_queue=500)
    )
    made = admission(config.model_copy(update={"overload": PATIENT.overload}))
    out = fill(made)
    lane_of = {}
    for key in range(1200):
        lane_of[key] = list(Lane)[key % 3]
        assert made.offer(ask(key, lane_of[key]), 0.0) == Queued(key)
    served = dict.fromkeys(Lane, 0)
    for _ in range(210):
        made.end(out.pop(0), Used(50), 0.0)
        for answer in made.poll(0.0):
            out.append(answer.key)
            served[lane_of[answer.key]] += 1
    assert [round(served[lane] / 10) for lane in Lane] == [16, 4, 1]


CROWDED = PATIENT.model_copy(
    update={lane.value: PATIENT.lane(lane).model_copy(update={"max_queue": 2, "max_wait_s": 900.0}) for lane in Lane}
)


@pytest.mark.parametrize("victim_lane", list(Lane))
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_whoever_is_queued_is_served_within_a_bound_whatever_others_send(victim_lane, data):
    """Others keep every queue full of what delays the victim most: urgent requests, other tenants, other lanes."""
    made = admission(CROWDED)
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    out = fill(made, lane=victim_lane)
    rival_lanes = [victim_lane, *data.draw(st.lists(st.sampled_from(list(Lane)), max_size=3))]
    rival_tenants = data.draw(st.lists(st.sampled_from(["", "a", "b"]), min_size=1, max_size=3))
    urgent_s = data.draw(st.sampled_from([5.0, 50.0, 1e6]))
    weights = {lane: CROWDED.lane(lane).weight for lane in Lane}
    cheapest, dearest = 100.0 + 2.0, 110.0 + 2.0 * 2
    turns_of_lanes = sum(weights.values()) / weights[victim_lane] * dearest / cheapest + len(Lane)
    turns_of_tenants = 3 * (dearest / cheapest + 1)
    patience = 450  # half of the longest wait: one second a turn
    bound = int(patience + (2 + 1) * turns_of_lanes * turns_of_tenants)
    assert made.offer(ask(0, victim_lane), 0.0) == Queued(0)
    key = 0
    for turn in range(1, bound):
        now_s = float(turn)
        for _ in range(3):
            key += 1
            lane, tenant = rng.choice(rival_lanes), rng.choice(rival_tenants)
            size = {"prompt": rng.randint(100, 110), "max_tokens": rng.randint(1, 2)}
            answer = made.offer(ask(key, lane, tenant, at=now_s, timeout=urgent_s, **size), now_s)
            assert not isinstance(answer, Dispatched)
        made.end(out.pop(rng.randrange(len(out))), Used(rng.randint(1, 2)), now_s)
        answers = made.poll(now_s)
        out += [one.key for one in answers if isinstance(one, Dispatched)]
        if victim := [one for one in answers if one.key == 0]:
            assert victim == [Dispatched(0, 50, waited_s=now_s)]
            return
    pytest.fail(f"not served within {bound} turns")


# Every request leaves once.


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_each_admitted_request_leaves_exactly_once_and_all_counts_return_to_zero(data):
    limits = TenantLimits(tokens_per_s=200.0, burst_tokens=5000, max_inflight_tokens=900)
    config = AdmissionConfig(
        interactive=InteractiveLane(max_queue=4, max_wait_s=3.0),
        standard=LaneConfig(max_queue=4, max_wait_s=6.0),
        bulk=BulkLane(max_queue=4, max_wait_s=12.0),
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
        one = ask(
            key,
            data.draw(st.sampled_from(list(Lane))),
            data.draw(st.sampled_from(["", "a"])),
            prompt=data.draw(st.integers(1, 500)),
            at=now_s,
            timeout=data.draw(st.sampled_from([0.5, 5.0, 100.0])),
            n=data.draw(st.integers(1, 3)),
        )
        answer = made.offer(one, now_s)
        if not isinstance(answer, Refused):
            (out if isinstance(answer, Dispatched) else waiting).add(key)
        action = data.draw(st.sampled_from(["none", "start", "end", "lose", "cancel"]))
        if action == "start" and out:
            made.start(data.draw(st.sampled_from(sorted(out))))
        elif action == "cancel" and waiting:
            key = data.draw(st.sampled_from(sorted(waiting)))
            waiting.remove(key)
            made.end(key, None, now_s)
        elif action in ("end", "lose") and out:
            key = data.draw(st.sampled_from(sorted(out)))
            out.remove(key)
            made.end(key, Used(30) if action == "end" else None, now_s)
        take(made.poll(now_s))
        assert made.num_waiting == len(waiting)
        assert made.num_inside == len(waiting) + len(out)
        assert made.out.num_requests == len(out)
    while waiting or out:
        now_s += 1.0
        for key in sorted(out):
            made.end(key, None, now_s)
        out.clear()
        take(made.poll(now_s))
    assert made.num_inside == made.num_waiting == 0
    assert made.out == Outstanding()
    assert made.inflight_tokens("a") == made.inflight_tokens("") == 0
    assert made.next_poll_s() is None
    assert all(made._lanes[lane].cost == 0.0 for lane in Lane)


# Refusal before work is done.


def test_a_deadline_that_cannot_be_met_is_refused_at_once():
    fleet = replace(FLEET, prefill_tokens_per_s=1000.0, queued_prefill_tokens=8000)
    made = admission(fleet=fleet)
    assert isinstance(made.offer(ask(0, timeout=5.0), 0.0), Dispatched)  # nothing is out: it is tried
    refused = made.offer(ask(1, timeout=5.0), 0.0)
    assert isinstance(refused, Refused)
    assert refused.reason is Reason.DEADLINE
    assert refused.retry_after_s >= 3.0
    error = refused.error()
    assert isinstance(error, DeadlineExceeded)
    assert "has 5 s left and needs about 8 s" in error.message
    assert error.retry_after_s == refused.retry_after_s
    assert isinstance(made.offer(ask(2, timeout=9.0), 0.0), Dispatched)


def backlogged(config=PATIENT, per_turn_s=0.5, **settings):
    """A queue that is seen to drain by one request in each turn."""
    made = admission(config)
    out = fill(made, max_tokens=1)
    for key in range(4):
        assert made.offer(ask(key, max_tokens=1), 0.0) == Queued(key)
    now_s = 0.0
    for key in range(100, 120):
        now_s += per_turn_s
        made.end(out.pop(0), Used(1), now_s)
        out += [answer.key for answer in made.poll(now_s)]
        assert made.offer(ask(key, max_tokens=1, at=now_s, **settings), now_s) == Queued(key)
    return made, now_s


def test_a_wait_past_the_deadline_is_foreseen_and_refused_with_a_hint():
    made, now_s = backlogged()
    refused = made.offer(ask(1, max_tokens=1, at=now_s, timeout=0.4), now_s)
    assert (type(refused), refused.reason) == (Refused, Reason.DEADLINE)
    assert refused.retry_after_s > 0
    # Four wait and one leaves each half second: two seconds, and this one's own turn.
    assert isinstance(made.offer(ask(2, max_tokens=1, at=now_s, timeout=4.0), now_s), Queued)


def test_an_urgent_request_is_judged_by_those_that_would_go_before_it():
    made, now_s = backlogged()
    assert isinstance(made.offer(ask(1, max_tokens=1, at=now_s, timeout=1.0), now_s), Queued)


def test_a_wait_longer_than_the_lane_allows_is_refused_with_a_hint():
    lane = LaneConfig(max_queue=50, max_wait_s=4.0, shed_from=0.99)
    made, now_s = backlogged(PATIENT.model_copy(update={"standard": lane}))
    answers = [made.offer(ask(key, max_tokens=1, at=now_s), now_s) for key in range(1000, 1006)]
    assert answers[0] == Queued(1000)
    refused = answers[-1]
    assert (refused.reason, isinstance(refused.error(), Overloaded)) == (Reason.WAIT, True)
    assert 0.5 < refused.retry_after_s < 10.0


def test_a_full_queue_refuses_with_a_hint_and_hints_are_spread():
    made = admission()
    fill(made)
    for key in range(8):
        assert made.offer(ask(key), 0.0) == Queued(key)
    refused = [made.offer(ask(key), 0.0) for key in range(100, 150)]
    assert {one.reason for one in refused} == {Reason.QUEUE_FULL}
    assert len({one.retry_after_s for one in refused}) == 50
    assert isinstance(refused[0].error(), Overloaded)


def test_whoever_waits_too_long_leaves_the_queue_with_a_hint():
    made = admission()
    fill(made)
    made.offer(ask(1, timeout=3.0), 0.0)
    made.offer(ask(2), 0.0)
    assert made.next_poll_s() == 3.0
    (refused,) = made.poll(3.0)
    assert (refused.key, refused.reason) == (1, Reason.DEADLINE)
    (refused,) = made.poll(made.next_poll_s())
    assert (refused.key, refused.reason) == (2, Reason.WAIT)
    assert refused.retry_after_s > 0


def test_without_any_measurement_nobody_is_refused_for_time():
    made = admission(fleet=FleetState(num_decode=1))
    assert isinstance(made.offer(ask(1, max_tokens=4096, timeout=0.1), 0.0), Dispatched)
