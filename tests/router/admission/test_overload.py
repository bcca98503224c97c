"""Tests what may be dispatched, and how the router reacts to overload: levels, shedding, shortened answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.config.admission import AdmissionConfig, OverloadConfig
from penstock.types import Lane
from router.admission.capacity import FleetState, Outstanding, has_room
from router.admission.interface import Dispatched, Refused
from router.admission.overload_policy import OverloadLevel, OverloadPolicy, fleet_pressure, shed_probability
from tests.support.router.admission_requests import FLEET, admission, ask, fill

# Capacity.


def test_dispatches_fill_the_slots_plus_headroom():
    made = admission()
    assert len(fill(made)) == 6
    assert len(fill(admission(fleet=replace(FLEET, slots=100)))) == 125


def test_unknown_figures_limit_nothing():
    out = Outstanding(num_requests=500, num_sequences=500, num_prefilling=500, prefilling_tokens=10**6)
    config = AdmissionConfig()
    assert has_room(None, out, 1, 100, 1.0, config)
    assert has_room(FleetState(num_decode=1), out, 1, 100, 1.0, config)
    assert not has_room(FleetState(num_decode=1, slots=4), out, 1, 100, 1.0, config)
    assert not has_room(FleetState(num_decode=1, prefill_tokens_per_s=1000.0), out, 1, 100, 1.0, config)
    assert not has_room(FleetState(num_decode=1, kv_tokens=2000, free_kv_tokens=50), out, 1, 100, 1.0, config)


def test_a_window_bounds_the_pages_of_long_prompts():
    out = Outstanding(num_requests=4, num_sequences=4, num_prefilling=2, prefilling_tokens=9000)
    windowed = FleetState(num_decode=1, kv_tokens=2000, free_kv_tokens=800, max_held_tokens=100)
    assert has_room(windowed, out, 1, 5000, 1.0, AdmissionConfig())
    assert not has_room(replace(windowed, max_held_tokens=0), out, 1, 5000, 1.0, AdmissionConfig())
    assert not has_room(replace(windowed, free_kv_tokens=350), out, 1, 5000, 1.0, AdmissionConfig(max_page_use=0.95))


def test_cached_prompts_take_less_of_the_prefill_queue():
    out = Outstanding(num_requests=8, num_sequences=8, num_prefilling=8, prefilling_tokens=4000)
    fleet = FleetState(num_decode=2, num_prefill=2, prefill_tokens_per_s=2000.0)
    assert not has_room(fleet, out, 1, 100, 1.0, AdmissionConfig())
    assert has_room(fleet, out, 1, 100, 0.1, AdmissionConfig())


def test_a_lone_request_is_always_dispatched():
    full = FleetState(num_decode=1, slots=1, kv_tokens=100, free_kv_tokens=0)
    assert has_room(full, Outstanding(), 64, 10_000, 1.0, AdmissionConfig())


# Overload.


def level_after(overload, saturation, seconds, start_s):
    for tick in range(int(seconds * 10)):
        overload.observe(saturation, start_s + tick / 10)
    return overload.level


def test_overload_rises_with_saturation_and_falls_level_by_level():
    overload = OverloadPolicy(OverloadConfig(shed=True, max_tokens=256))
    assert level_after(overload, 0.5, 5, 0) is OverloadLevel.NORMAL
    assert level_after(overload, 0.7, 5, 5) is OverloadLevel.SHORTEN
    assert level_after(overload, 1.2, 5, 10) is OverloadLevel.REFUSE
    assert level_after(overload, 0.85, 20, 15) is OverloadLevel.REFUSE  # not yet a margin below its threshold
    assert level_after(overload, 0.0, 4.5, 35) is OverloadLevel.PAUSE_BULK
    assert level_after(overload, 0.0, 20, 39.5) is OverloadLevel.NORMAL


def test_a_disabled_level_is_never_reached():
    assert level_after(OverloadPolicy(OverloadConfig()), 2.0, 60, 0) is OverloadLevel.NORMAL
    assert level_after(OverloadPolicy(OverloadConfig(max_tokens=256)), 2.0, 60, 0) is OverloadLevel.SHORTEN
    shedding = OverloadPolicy(OverloadConfig(shed=True))
    assert level_after(shedding, 0.7, 60, 0) is OverloadLevel.NORMAL
    assert level_after(shedding, 0.85, 60, 60) is OverloadLevel.PAUSE_BULK
    assert level_after(shedding, 0.0, 10, 120) is OverloadLevel.NORMAL


def test_missing_data_does_not_count_as_calm():
    overload = OverloadPolicy(OverloadConfig(shed=True))
    level_after(overload, 1.5, 5, 0)
    assert level_after(overload, None, 60, 5) is OverloadLevel.REFUSE
    made = admission()
    made.on_fleet(replace(FLEET, slots=4, num_waiting=100), 0.0)
    made.on_fleet(replace(FLEET, slots=4, num_waiting=100), 5.0)
    before = made.saturation
    made.on_fleet(None, 60.0)
    assert made.saturation == before > 1.0


def test_fleet_pressure_is_the_worst_known_signal():
    config = AdmissionConfig()
    assert fleet_pressure(FleetState(num_decode=1), config) is None
    assert fleet_pressure(FleetState(num_decode=1, kv_tokens=100, free_kv_tokens=50), config) == 0.0
    assert fleet_pressure(FleetState(num_decode=1, kv_tokens=100, free_kv_tokens=0), config) == pytest.approx(0.75)
    waiting = FleetState(num_decode=1, slots=10, num_waiting=40, kv_tokens=100, free_kv_tokens=50)
    assert fleet_pressure(waiting, config) == pytest.approx(1.0)


def test_shedding_starts_gently_and_ends_with_every_request():
    values = [shed_probability(saturation, 0.5) for saturation in (0.0, 0.5, 0.6, 0.8, 1.0, 1.5)]
    assert values[:2] == [0.0, 0.0]
    assert values[2] < 0.01
    assert values[3] == pytest.approx(0.216)
    assert values[4:] == [1.0, 1.0]


def overloaded(level):
    made = admission(AdmissionConfig(overload=OverloadConfig(shed=True, hold_s=1e6)))
    fill(made)
    made._overload.level = level
    return made


def test_overload_levels_refuse_bulk_first_and_interactive_last():
    for level, refused_lanes in (
        (OverloadLevel.SHORTEN, set()),
        (OverloadLevel.PAUSE_BULK, {Lane.BULK}),
        (OverloadLevel.REFUSE, {Lane.BULK, Lane.STANDARD}),
    ):
        made = overloaded(level)
        answers = {lane: made.offer(ask(number, lane), 0.0) for number, lane in enumerate(Lane)}
        assert {lane for lane, answer in answers.items() if isinstance(answer, Refused)} == refused_lanes
        assert all(answer.retry_after_s > 0 for answer in answers.values() if isinstance(answer, Refused))


def test_shortened_answers_report_their_grant():
    made = admission(AdmissionConfig(overload=OverloadConfig(hold_s=1e6, max_tokens=30)))
    made._overload.level = OverloadLevel.SHORTEN
    assert made.offer(ask(1), 0.0) == Dispatched(1, max_tokens=30)
    assert made.offer(ask(2, max_tokens=10), 0.0) == Dispatched(2, max_tokens=10)
