"""The router's admission as pure decisions: nobody starves, tenants share, every request leaves once, refusals hint."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.admission_config import (
    AdmissionConfig,
    BulkLane,
    InteractiveLane,
    LaneConfig,
    OverloadConfig,
    TenantLimits,
)
from penstock.errors import DeadlineExceeded, InvalidInput, Overloaded
from penstock.types import Lane
from router.admission import Admission
from router.budgets import TokenBucket
from router.capacity import FleetState, Outstanding, has_room
from router.fairness import FairCounters
from router.overload import Level, Overload, fleet_pressure, shed_probability
from router.verdicts import Ask, Dispatched, Queued, Reason, Refused, Used

FLEET = FleetState(num_decode=1, num_prefill=1, slots=4)
PATIENT = AdmissionConfig(
    interactive=InteractiveLane(max_queue=8, max_wait_s=8000.0, shed_from=0.99),
    standard=LaneConfig(max_queue=8, max_wait_s=8000.0, shed_from=0.99),
    bulk=BulkLane(max_queue=8, max_wait_s=8000.0, shed_from=0.99),
    overload=OverloadConfig(shorten_at=5.0, pause_bulk_at=5.0, refuse_at=5.0),
)


def ask(key, lane=Lane.STANDARD, tenant="", *, prompt=100, max_tokens=50, at=0.0, timeout=1e6, n=1):
    return Ask(key, lane, tenant, prompt, max_tokens, at, at + timeout, n)


def admission(config=PATIENT, fleet=FLEET, limits_of=None, seed=1):
    made = Admission(config, random.Random(seed), limits_of=limits_of)
    made.on_fleet(fleet, 0.0)
    return made


def fill(made, now_s=0.0, first_key=10_000, **settings):
    """Requests until one has to wait; their keys."""
    keys = []
    while isinstance(made.offer(ask(first_key + len(keys), at=now_s, **settings), now_s), Dispatched):
        keys.append(first_key + len(keys))
    made.end(first_key + len(keys), None, now_s)
    return keys


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


# Fairness.


@settings(max_examples=60, deadline=None)
@given(
    weights=st.tuples(st.sampled_from([1.0, 2.0, 5.0]), st.sampled_from([1.0, 3.0])),
    prompts=st.tuples(st.integers(1, 400), st.integers(1, 400)),
    outputs=st.tuples(st.integers(1, 50), st.integers(1, 50)),
    seed=st.integers(0, 1000),
)
def test_two_tenants_that_always_have_work_are_served_alike_by_weight(weights, prompts, outputs, seed):
    """Whatever their requests look like, and though what they will use is only guessed when they are sent."""
    limits = {"a": TenantLimits(weight=weights[0]), "b": TenantLimits(weight=weights[1])}
    made = admission(limits_of=lambda tenant: limits.get(tenant, TenantLimits()))
    rng = random.Random(seed)
    size = {"a": (prompts[0], outputs[0]), "b": (prompts[1], outputs[1])}
    out = [(key, "") for key in fill(made)]
    service, waiting = {"a": 0.0, "b": 0.0}, {"a": 0, "b": 0}
    tenant_of = {}
    key = 0
    for turn in range(200):
        for tenant in ("a", "b"):
            while waiting[tenant] < 3:
                key += 1
                tenant_of[key] = tenant
                assert made.offer(ask(key, tenant=tenant, prompt=size[tenant][0]), turn) == Queued(key)
                waiting[tenant] += 1
        ended, tenant = out.pop(rng.randrange(len(out)))
        made.end(ended, Used(size[tenant][1] if tenant else 50), turn)
        for answer in made.poll(turn):
            tenant = tenant_of[answer.key]
            waiting[tenant] -= 1
            out.append((answer.key, tenant))
            service[tenant] += (size[tenant][0] + 2.0 * size[tenant][1]) / limits[tenant].weight
        dearest = max((size[one][0] + 2.0 * 50) / limits[one].weight for one in ("a", "b"))
        unsettled = sum(2.0 * 50 / limits[one].weight for _, one in out if one)
        assert abs(service["a"] - service["b"]) <= 2 * dearest + unsettled


def test_one_that_comes_back_is_lifted_to_the_least_of_those_that_stayed():
    counters = FairCounters[str]()
    for tenant in ("stayed", "busy"):
        counters.activate(tenant)
    for _ in range(10):
        counters.serve("stayed", 10.0)
        counters.serve("busy", 20.0)
    counters.activate("back")
    assert counters["back"] == counters["stayed"] == 100.0


def test_a_refund_of_what_nobody_competed_for_puts_nobody_ahead():
    counters = FairCounters[str]()
    counters.serve("alone", 1000.0)
    counters.activate("alone")
    counters.activate("new")
    counters.settle("alone", -900.0, contended=False)
    counters.settle("alone", -900.0, contended=False)
    assert counters["alone"] >= 0.0 == counters["new"] - counters["new"]
    counters.settle("alone", -50.0, contended=True)
    assert counters["alone"] < counters["new"]


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


# Tenants.


def test_a_token_rate_is_kept_and_settled_by_what_was_used():
    limits = TenantLimits(tokens_per_s=100.0, burst_tokens=300)
    made = admission(limits_of=lambda tenant: limits)
    assert isinstance(made.offer(ask(1, tenant="a"), 0.0), Dispatched)
    assert isinstance(made.offer(ask(2, tenant="a"), 0.0), Dispatched)
    refused = made.offer(ask(3, tenant="a"), 0.0)
    assert refused.reason is Reason.TOKEN_RATE
    assert 1.5 <= refused.retry_after_s <= 1.5 * 1.5
    assert isinstance(made.offer(ask(4, tenant="b"), 0.0), Dispatched)
    made.end(1, Used(0), 0.0)  # 50 tokens of output were expected
    made.end(2, Used(0), 0.0)
    assert made.offer(ask(5, tenant="a"), 0.0).retry_after_s <= 0.75
    assert isinstance(made.offer(ask(6, tenant="a"), 1.0), Dispatched)


def test_a_debt_is_paid_before_more_is_taken():
    bucket = TokenBucket(10.0, 100.0, 0.0)
    bucket.take(100.0, 0.0)
    bucket.take(50.0, 0.0)
    assert bucket.wait_s(10.0, 0.0) == 6.0
    assert bucket.wait_s(10.0, 6.0) == 0.0
    assert bucket.wait_s(500.0, 15.0) == 0.0  # more than a burst: when it is full


def test_a_tenant_has_no_more_requests_than_it_may():
    made = admission(limits_of=lambda tenant: TenantLimits(max_requests=1 if tenant else None))
    assert isinstance(made.offer(ask(1, tenant="a"), 0.0), Dispatched)
    refused = made.offer(ask(2, tenant="a"), 0.0)
    assert (refused.reason, isinstance(refused.error(), Overloaded)) == (Reason.TENANT_REQUESTS, True)
    assert isinstance(made.offer(ask(3), 0.0), Dispatched)
    made.end(1, None, 0.0)
    assert isinstance(made.offer(ask(4, tenant="a"), 0.0), Dispatched)


def test_a_tenant_over_its_quota_waits_while_others_go():
    limits = {"a": TenantLimits(max_inflight_tokens=200)}
    made = admission(limits_of=lambda tenant: limits.get(tenant, TenantLimits()))
    assert isinstance(made.offer(ask(1, tenant="a"), 0.0), Dispatched)
    assert made.offer(ask(2, tenant="a"), 0.0) == Queued(2)
    assert made.poll(0.0) == []
    assert isinstance(made.offer(ask(3, tenant="b"), 0.0), Dispatched)
    made.end(1, Used(50), 1.0)
    assert [answer.key for answer in made.poll(1.0)] == [2]


def test_what_can_never_fit_a_quota_is_refused_as_the_callers_mistake():
    made = admission(limits_of=lambda tenant: TenantLimits(max_inflight_tokens=120))
    refused = made.offer(ask(1), 0.0)
    assert isinstance(refused.error(), InvalidInput)
    assert "150 tokens, over this tenant's 120" in refused.error().message


# Capacity.


def test_no_more_goes_out_than_the_slots_and_some_on_their_way():
    made = admission()
    assert len(fill(made)) == 6
    assert len(fill(admission(fleet=replace(FLEET, slots=100)))) == 125


def test_what_is_not_known_limits_nothing():
    out = Outstanding(num_requests=500, num_sequences=500, num_prefilling=500, prefilling_tokens=10**6)
    config = AdmissionConfig()
    assert has_room(None, out, 1, 100, 1.0, config)
    assert has_room(FleetState(num_decode=1), out, 1, 100, 1.0, config)
    assert not has_room(FleetState(num_decode=1, slots=4), out, 1, 100, 1.0, config)
    assert not has_room(FleetState(num_decode=1, prefill_tokens_per_s=1000.0), out, 1, 100, 1.0, config)
    assert not has_room(FleetState(num_decode=1, kv_tokens=2000, free_kv_tokens=50), out, 1, 100, 1.0, config)


def test_prompts_that_caches_hold_take_less_of_the_prefill_queue():
    out = Outstanding(num_requests=8, num_sequences=8, num_prefilling=8, prefilling_tokens=4000)
    fleet = FleetState(num_decode=2, num_prefill=2, prefill_tokens_per_s=2000.0)
    assert not has_room(fleet, out, 1, 100, 1.0, AdmissionConfig())
    assert has_room(fleet, out, 1, 100, 0.1, AdmissionConfig())


def test_a_request_that_is_alone_always_goes():
    full = FleetState(num_decode=1, slots=1, kv_tokens=100, free_kv_tokens=0)
    assert has_room(full, Outstanding(), 64, 10_000, 1.0, AdmissionConfig())


# Overload.


def level_after(overload, saturation, seconds, start_s):
    for tick in range(int(seconds * 10)):
        overload.observe(saturation, start_s + tick / 10)
    return overload.level


def test_overload_rises_with_saturation_and_falls_step_by_step():
    overload = Overload(OverloadConfig())
    assert level_after(overload, 0.5, 5, 0) is Level.NORMAL
    assert level_after(overload, 0.7, 5, 5) is Level.SHORTEN
    assert level_after(overload, 1.2, 5, 10) is Level.REFUSE
    assert level_after(overload, 0.85, 20, 15) is Level.REFUSE  # not a margin below its beginning
    assert level_after(overload, 0.0, 4.5, 35) is Level.PAUSE_BULK
    assert level_after(overload, 0.0, 20, 39.5) is Level.NORMAL


def test_no_data_is_not_calm():
    overload = Overload(OverloadConfig())
    level_after(overload, 1.5, 5, 0)
    assert level_after(overload, None, 60, 5) is Level.REFUSE
    made = admission()
    made.on_fleet(replace(FLEET, slots=4, num_waiting=100), 0.0)
    made.on_fleet(replace(FLEET, slots=4, num_waiting=100), 5.0)
    before = made.saturation
    made.on_fleet(None, 60.0)
    assert made.saturation == before > 1.0


def test_pressure_of_the_workers_comes_from_the_worst_that_is_known():
    config = AdmissionConfig()
    assert fleet_pressure(FleetState(num_decode=1), config) is None
    assert fleet_pressure(FleetState(num_decode=1, kv_tokens=100, free_kv_tokens=50), config) == 0.0
    assert fleet_pressure(FleetState(num_decode=1, kv_tokens=100, free_kv_tokens=0), config) == pytest.approx(0.75)
    waiting = FleetState(num_decode=1, slots=10, num_waiting=40, kv_tokens=100, free_kv_tokens=50)
    assert fleet_pressure(waiting, config) == pytest.approx(1.0)


def test_shedding_begins_gently_and_ends_with_everyone():
    values = [shed_probability(saturation, 0.5) for saturation in (0.0, 0.5, 0.6, 0.8, 1.0, 1.5)]
    assert values[:2] == [0.0, 0.0]
    assert values[2] < 0.01
    assert values[3] == pytest.approx(0.216)
    assert values[4:] == [1.0, 1.0]


def overloaded(level):
    made = admission(AdmissionConfig(overload=OverloadConfig(hold_s=1e6)))
    fill(made)
    made._overload.level = level
    return made


def test_the_steps_of_overload_refuse_bulk_first_and_interactive_last():
    for level, refused_lanes in (
        (Level.SHORTEN, set()),
        (Level.PAUSE_BULK, {Lane.BULK}),
        (Level.REFUSE, {Lane.BULK, Lane.STANDARD}),
    ):
        made = overloaded(level)
        answers = {lane: made.offer(ask(number, lane), 0.0) for number, lane in enumerate(Lane)}
        assert {lane for lane, answer in answers.items() if isinstance(answer, Refused)} == refused_lanes
        assert all(answer.retry_after_s > 0 for answer in answers.values() if isinstance(answer, Refused))


def test_answers_are_shortened_and_the_grant_says_so():
    made = admission(AdmissionConfig(overload=OverloadConfig(hold_s=1e6, max_tokens=30)))
    made._overload.level = Level.SHORTEN
    assert made.offer(ask(1), 0.0) == Dispatched(1, max_tokens=30)
    assert made.offer(ask(2, max_tokens=10), 0.0) == Dispatched(2, max_tokens=10)
