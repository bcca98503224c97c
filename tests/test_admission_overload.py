"""What may go out to the workers, and what the router does when that is too much: steps, shedding, shorter answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.admission_config import AdmissionConfig, OverloadConfig
from penstock.types import Lane
from router.capacity import FleetState, Outstanding, has_room
from router.overload import Level, Overload, fleet_pressure, shed_probability
from router.verdicts import Dispatched, Refused
from tests.admission_asks import FLEET, admission, ask, fill

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
