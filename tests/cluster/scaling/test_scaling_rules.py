"""Tests the autoscaler's limits one by one: stale data, the machines' room, minimums, and which pool may give a
worker."""

from __future__ import annotations

import pytest

from cluster.scaling.autoscaler_policy import AutoscalerPolicy
from cluster.scaling.signals import Flip, PoolBounds, Resize, ScalingRecord
from penstock.types import Role
from tests.cluster.scaling.test_autoscaler import BOUNDS, CONFIG, World, world


def record(fleet: World, role: Role = Role.PREFILL) -> ScalingRecord:
    assert fleet.last is not None
    return next(each for each in fleet.last.records if each.role is role)


def flips(fleet: World) -> list[Flip]:
    return [change for _, change in fleet.changes if isinstance(change, Flip)]


def test_a_stale_report_stops_every_decision_and_one_within_the_limit_does_not() -> None:
    fleet = world(flips=False)
    fleet.run(8, 2600, 8)
    grown = fleet.sizes[Role.PREFILL]
    fleet.age_s = CONFIG.stale_s + 0.1
    fleet.run(40, 9000, 400)
    assert fleet.sizes[Role.PREFILL] == grown
    assert record(fleet).verdict == "missing"
    assert f"has not reported for {fleet.age_s:.0f} s" in record(fleet).reason
    fleet.age_s = CONFIG.stale_s
    fleet.run(40, 9000, 400)
    assert fleet.sizes[Role.PREFILL] > grown


def test_a_pool_grows_to_the_machines_room_and_says_so() -> None:
    fleet = world(flips=False)
    fleet.fitting = 4
    fleet.run(60, 9000, 8)
    assert fleet.sizes[Role.PREFILL] == 4
    assert record(fleet).verdict == "hold"
    assert "the machines hold 4 workers of this pool" in record(fleet).reason
    fleet.fitting = 1  # a node has gone, but running workers are not stopped for it
    fleet.run(20, 9000, 8)
    assert fleet.sizes[Role.PREFILL] == 4
    fleet.fitting = None
    fleet.run(60, 9000, 8)
    assert fleet.sizes[Role.PREFILL] > 4


@pytest.mark.parametrize("lowest", [1, 2, 3])
def test_a_pool_never_shrinks_below_its_minimum(lowest: int) -> None:
    bounds = {**BOUNDS, Role.PREFILL: PoolBounds(lowest, 10)}
    fleet = World(AutoscalerPolicy(CONFIG.model_copy(update={"flips": False}), bounds, 64))
    fleet.sizes[Role.PREFILL] = 8
    fleet.run(900, 0, 0)
    assert fleet.sizes[Role.PREFILL] == lowest
    assert all(change.replicas >= 1 for _, change in fleet.changes if isinstance(change, Resize))


@pytest.mark.parametrize(("lowest", "gives"), [(3, True), (4, False)])
def test_a_pool_at_its_minimum_gives_no_worker(lowest: int, gives: bool) -> None:
    bounds = {Role.PREFILL: PoolBounds(1, 10), Role.DECODE: PoolBounds(lowest, 10)}
    fleet = World(AutoscalerPolicy(CONFIG, bounds, 64), {Role.PREFILL: 2, Role.DECODE: 4})
    fleet.run(8, 2600, 4)
    assert (Flip(Role.DECODE, Role.PREFILL) in flips(fleet)) is gives


def test_the_last_worker_of_a_pool_never_flips() -> None:
    bounds = {Role.PREFILL: PoolBounds(0, 10), Role.DECODE: PoolBounds(1, 10)}
    for num_prefill in (1, 2):
        fleet = World(AutoscalerPolicy(CONFIG, bounds, 64), {Role.PREFILL: num_prefill, Role.DECODE: 1})
        fleet.run(12, 0, 300)
        assert flips(fleet) == [Flip(Role.PREFILL, Role.DECODE)] * (num_prefill - 1)


def test_a_pool_gives_a_worker_only_after_a_lasting_surplus() -> None:
    scaler = AutoscalerPolicy(CONFIG.model_copy(update={"flip_after_s": 40.0}), BOUNDS, 64)
    fleet = World(scaler, {Role.PREFILL: 2, Role.DECODE: 4})
    fleet.unplaceable, fleet.starting = "no node has GPU: 1", 6  # growing is impossible, so only a flip remains
    fleet.run(36, 2600, 4)
    assert flips(fleet) == []
    fleet.run(20, 2600, 4)
    assert flips(fleet) == [Flip(Role.DECODE, Role.PREFILL)]


@pytest.mark.parametrize("is_changing", [False, True])
def test_a_pool_that_is_changing_gives_no_worker(is_changing: bool) -> None:
    """A surplus does not count while the number of workers is about to change."""
    fleet = World(AutoscalerPolicy(CONFIG, BOUNDS, 64), {Role.PREFILL: 2, Role.DECODE: 4})
    fleet.starting, fleet.starting_role = int(is_changing), Role.DECODE
    fleet.run(8, 2600, 4)
    assert (Flip(Role.DECODE, Role.PREFILL) in flips(fleet)) is not is_changing


def test_the_time_without_reports_does_not_count_as_traffic() -> None:
    """The first observation after a gap only starts the counting."""
    fleet = world()
    fleet.run(20, 1800, 8)
    assert record(fleet).verdict != "missing"
    fleet.tick(1800, 8, has_demand=False)
    fleet.tick(1800, 8)
    assert (record(fleet).verdict, record(fleet).reason.partition(":")[0]) == ("missing", "first observation")
    fleet.tick(1800, 8)
    assert record(fleet).verdict != "missing"


def test_a_large_pool_grows_by_a_share_of_its_size_and_by_more_if_it_grew_lately() -> None:
    bounds = {role: PoolBounds(1, 100) for role in Role}
    fleet = World(AutoscalerPolicy(CONFIG.model_copy(update={"flips": False}), bounds, 64))
    fleet.sizes[Role.PREFILL] = 40
    fleet.run(60, 37_000, 8)
    (first,) = [change.replicas for _, change in fleet.changes if isinstance(change, Resize)]
    assert record(fleet).wanted < first == 44, "a tenth more, though fewer would do"
    fleet.changes.clear()
    fleet.run(60, 42_000, 8)
    (second,) = [change.replicas for _, change in fleet.changes if isinstance(change, Resize)]
    assert record(fleet).wanted < second == 55, "a quarter more"


def test_the_machines_room_is_no_reason_if_it_suffices() -> None:
    def first_growth(fitting: int | None) -> ScalingRecord:
        fleet = world(flips=False)
        fleet.fitting = fitting
        while not fleet.changes:
            fleet.tick(3300, 8)
        return record(fleet)

    unlimited = first_growth(None)
    assert first_growth(unlimited.wanted) == unlimited
    assert "the machines hold" in first_growth(unlimited.wanted - 1).reason


def test_a_pool_whose_need_is_unknown_keeps_its_bounds() -> None:
    fleet = World(AutoscalerPolicy(CONFIG, BOUNDS, 64), {Role.PREFILL: 12, Role.DECODE: 2})
    for _ in range(2):  # prompts wait, and no worker has computed one
        fleet.tick(0, 0, waiting=3)
    assert "no worker has computed a prompt yet" in record(fleet).reason
    assert fleet.sizes[Role.PREFILL] == 10


def test_cached_prompts_may_wait_longer() -> None:
    slacks_s = []
    for cached in (0.0, 0.5):
        fleet = world(flips=False)
        fleet.cached = cached
        fleet.run(60, 1800, 8)
        slacks_s.append(record(fleet).figures["slack_s"])
    assert slacks_s[1] > slacks_s[0]
