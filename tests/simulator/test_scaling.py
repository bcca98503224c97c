"""The real autoscaler over pools that change in virtual time, beside autoscaling by queue lengths."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.autoscale.__main__ import BOUNDS, SLO, SPEC, autoscaler, run
from benchmarks.autoscale.baselines import PolicyResult, QueueScaler, QueueTargets, choose, over_all, ratios
from benchmarks.autoscale.coarse_fleet import CoarseFleet
from benchmarks.autoscale.elastic import DetailedDeployment, ElasticFleet
from benchmarks.autoscale.foresight import Foresight, join, offered, plan
from penstock.config.autoscaler import BalanceConfig
from penstock.types import Role
from simulator.request import TraceRequest
from simulator.traces import SharedPrefixMix, vary_rate
from tests.support.balanced_fleet import BalancedFleet

QUICK = replace(SPEC, num_prefill=2, num_decode=2)


def traffic() -> list[TraceRequest]:
    mix = SharedPrefixMix(num_requests=700, requests_per_s=1.0, num_systems=100, output_tokens=60)
    return vary_rate(mix.make(0), 500.0, 0.6)


def test_it_meets_its_attainment_with_fewer_workers_than_queue_lengths_take() -> None:
    ours = run("planned", traffic(), 60.0, autoscaler(60.0), QUICK)
    queues = run("queues", traffic(), 60.0, QueueScaler(QueueTargets(1.0, 12.0), BOUNDS), QUICK)
    assert queues.num_missed == 0
    assert ours.num_missed <= 0.01 * ours.num_requests  # `attainment` is 0.99
    assert ours.num_changes <= queues.num_changes
    assert ours.worker_hours < queues.worker_hours


def test_the_coarse_picture_is_that_of_the_full_one() -> None:
    every_step, scaler = QUICK, QueueTargets(1.0, 4.0, 30.0)
    full, coarse = (
        run("queues", traffic()[:250], 20.0, QueueScaler(scaler, BOUNDS), every_step, make)
        for make in (DetailedDeployment, CoarseFleet)
    )
    assert full.num_changes > 2
    assert abs(full.num_missed - coarse.num_missed) <= 0.02 * full.num_requests
    assert abs(full.worker_hours - coarse.worker_hours) < 0.15 * full.worker_hours
    assert abs(full.ttft_p99_s - coarse.ttft_p99_s) < 0.25 * full.ttft_p99_s
    assert abs(full.tpot_p99_s - coarse.tpot_p99_s) < 0.15 * full.tpot_p99_s


def test_pools_change_without_a_request_lost_and_alike_each_time() -> None:
    first, again = (
        ElasticFleet(QUICK, 0, QueueScaler(QueueTargets(1.0, 2.0, 30.0), BOUNDS), SLO, 10.0) for _ in range(2)
    )
    outcomes = [fleet.run(traffic()[:300]) for fleet in (first, again)]
    assert all(one.is_complete and not one.num_wrong_tokens for one in outcomes[0])
    assert first.num_changes > 5
    assert [one.end_s for one in outcomes[0]] == [one.end_s for one in outcomes[1]]


def test_a_rate_that_swings_keeps_its_requests_and_their_order() -> None:
    even = SharedPrefixMix(num_requests=400, requests_per_s=1.0).make(0)
    swung = vary_rate(even, 200.0, 0.8)
    assert [one.arrival_s for one in swung] == sorted(one.arrival_s for one in swung)
    first, last = (sum(low <= one.arrival_s % 200.0 < low + 50.0 for one in swung) for low in (0.0, 75.0))
    assert last > 2 * first


def test_who_knows_the_trace_serves_all_of_it_with_the_changes_it_may_make() -> None:
    requests = traffic()
    sizes = plan(offered(requests, QUICK, SLO), QUICK, SLO, dict.fromkeys(Role, 0.8))
    knows = run("foresight", requests, 60.0, Foresight(sizes, BOUNDS, 60.0, 4), QUICK, CoarseFleet)
    ours = run("planned", requests, 60.0, autoscaler(60.0), QUICK, CoarseFleet)
    assert knows.num_changes <= 6  # two more where the sizes that it begins with are others
    assert knows.num_missed <= ours.num_missed
    assert knows.worker_hours < ours.worker_hours


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(0, 10))
def test_joined_sizes_lack_nothing_and_change_no_more_than_allowed(sizes: list[int], num_changes: int) -> None:
    joined = join(sizes, num_changes)
    assert len(joined) == len(sizes)
    assert all(one >= wanted for one, wanted in zip(joined, sizes, strict=True))
    assert sum(one != other for one, other in pairwise(joined)) <= num_changes
    if num_changes >= len(sizes):
        assert joined == sizes


def test_a_worker_that_comes_takes_sequences_over_from_a_full_one() -> None:
    """All of the traffic is there before the second worker is."""
    requests = [TraceRequest(number, 0.1 * number, 4000, 6000, (number,), 4000) for number in range(60)]
    spec, slowest = replace(QUICK, num_decode=1), []
    for fleet in (CoarseFleet(spec), evened := BalancedFleet(spec, BalanceConfig())):
        outcomes = [fleet.submit(one) for one in requests]
        fleet.sim.at(120.0, lambda fleet=fleet: fleet.add_worker("decode-1", Role.DECODE))  # type: ignore[misc]
        fleet.run()
        assert all(one.is_complete and one.num_tokens == 6000 for one in outcomes)
        slowest.append(max(one.tpot_s for one in outcomes))
    assert evened.num_migrated > 0
    assert slowest[1] < 0.9 * slowest[0]


def test_baselines_are_chosen_by_the_documented_rules() -> None:
    def result(name: str, missed: int, hours: float, changes: int = 8) -> PolicyResult:
        return PolicyResult(name, 1000, missed, hours, changes, 1.0, 0.05, 100.0)

    baselines = [result("all", 0, 30.0), result("good", 9, 12.0), result("cheap", 50, 9.0), result("poor", 200, 8.0)]
    ours = result("ours", 1, 9.0, 2)
    chosen = choose(baselines, ours)
    assert {rule: one.policy for rule, one in chosen.items()} == {
        "cheapest in time": "good",
        "fewest missed": "all",
        "equal hours": "cheap",
    }
    assert ratios(ours, baselines[1]) == {"missed": 1 / 9, "worker_hours": 0.75, "changes": 0.25}
    assert choose(baselines[3:], ours)["cheapest in time"].policy == "poor"  # where none is in time
    twice = [ours, replace(ours, num_missed=3), baselines[1], replace(baselines[1], num_missed=1, worker_hours=6.0)]
    assert over_all(twice, "ours") == {"good": {"missed": 4 / 10, "worker_hours": 1.0, "changes": 0.25}}
