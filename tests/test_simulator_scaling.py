"""The real autoscaler over pools that change in virtual time, beside the one that goes by queue lengths."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.autoscale import BOUNDS, SLO, SPEC, planned, run
from simulator.elastic import ElasticFleet
from simulator.reactive import QueueTargets, Reactive
from simulator.request import TraceRequest
from simulator.traces import SharedPrefixMix, vary_rate

QUICK = replace(SPEC, num_prefill=2, num_decode=2, decode_stride=8)


def traffic() -> list[TraceRequest]:
    mix = SharedPrefixMix(num_requests=700, requests_per_s=1.0, num_systems=100, output_tokens=60)
    return vary_rate(mix.make(0), 500.0, 0.6)


def test_it_misses_no_more_with_fewer_changes_and_workers() -> None:
    ours = run("planned", traffic(), 60.0, planned(60.0), QUICK)
    queues = run("queues", traffic(), 60.0, Reactive(QueueTargets(1.0, 12.0), BOUNDS), QUICK)
    assert ours.num_missed <= queues.num_missed
    assert ours.num_changes < queues.num_changes
    assert ours.worker_hours < 1.1 * queues.worker_hours


def test_pools_change_without_a_request_lost_and_alike_each_time() -> None:
    first, again = (ElasticFleet(QUICK, 0, Reactive(QueueTargets(1.0, 2.0, 30.0), BOUNDS), SLO, 10.0) for _ in range(2))
    outcomes = [fleet.run(traffic()[:300]) for fleet in (first, again)]
    assert all(one.is_complete and not one.num_wrong_tokens for one in outcomes[0])
    assert first.num_changes > 10
    assert [one.end_s for one in outcomes[0]] == [one.end_s for one in outcomes[1]]


def test_a_rate_that_swings_keeps_its_requests_and_their_order() -> None:
    even = SharedPrefixMix(num_requests=400, requests_per_s=1.0).make(0)
    swung = vary_rate(even, 200.0, 0.8)
    assert [one.arrival_s for one in swung] == sorted(one.arrival_s for one in swung)
    first, last = (sum(low <= one.arrival_s % 200.0 < low + 50.0 for one in swung) for low in (0.0, 75.0))
    assert last > 2 * first
