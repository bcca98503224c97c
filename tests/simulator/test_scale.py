"""Tests runs whose requests are made as they arrive and forgotten as they end."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from simulator import scale
from simulator.fleet import FleetSpec, SimulatedFleet
from simulator.report import percentile
from simulator.request import Outcome
from simulator.scale import ScaleResult, during, large_spec, main, progress_line, run_at_scale, traffic
from simulator.traces import SharedPrefixMix

SPEC = FleetSpec(2, 2, 64, 400, 400)
MIX = SharedPrefixMix(num_requests=200, requests_per_s=12.0, output_tokens=30, think_s=1.0)


def test_a_stream_is_in_order_and_depends_only_on_its_seed() -> None:
    requests = list(MIX.stream(1))
    assert requests == list(MIX.stream(1)) != list(MIX.stream(2))
    assert [request.number for request in requests] == list(range(MIX.num_requests))
    assert all(before.arrival_s <= after.arrival_s for before, after in pairwise(requests))
    shared = [request for request in requests if request.block_ids[0] < MIX.num_systems * 32]
    assert 0.02 < 1 - len(shared) / len(requests) < 0.9
    continued = sum(
        any(request is not other and request.block_ids == other.block_ids[: len(request.block_ids)] for other in shared)
        for request in shared
    )
    assert continued > len(shared) / 4
    rate = len(requests) / requests[-1].arrival_s
    assert rate == pytest.approx(MIX.requests_per_s, rel=0.5)


def test_streamed_requests_have_the_outcomes_of_submitted_ones() -> None:
    requests = list(MIX.stream(3))
    before, streamed = SimulatedFleet(SPEC, 0), SimulatedFleet(SPEC, 0)
    ended: list[Outcome] = []
    for request in requests:
        before.submit(request)
    streamed.submit_stream(iter(requests), ended.append)
    for fleet in (before, streamed):
        fleet.run()
    assert streamed.outcomes == []
    assert [outcome.end_s for outcome in sorted(ended, key=lambda outcome: outcome.request.number)] == [
        outcome.end_s for outcome in before.outcomes
    ]


def test_the_figures_of_a_run_at_scale_are_those_of_its_requests() -> None:
    result = run_at_scale(SPEC, MIX.stream(3))
    fleet = SimulatedFleet(SPEC, 0)
    for request in MIX.stream(3):
        fleet.submit(request)
    fleet.run()
    assert (result.num_requests, result.num_failed, result.num_workers) == (200, 0, 4)
    assert result.ttft_p99_s == percentile([outcome.ttft_s or 0.0 for outcome in fleet.outcomes], 0.99)
    prompts = sum(outcome.request.num_input_tokens for outcome in fleet.outcomes)
    assert result.hit_rate == pytest.approx(sum(outcome.cached_tokens for outcome in fleet.outcomes) / prompts)
    assert result.peak_memory_bytes > 10_000_000


def test_a_run_reports_its_figures_as_it_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "_PROGRESS_S", 0.0)
    seen: list[ScaleResult] = []
    result = run_at_scale(SPEC, MIX.stream(3), 0, seen.append)
    assert [each.num_requests for each in seen] == list(range(1, result.num_requests + 1))
    assert seen[-1].hit_rate == result.hit_rate
    assert progress_line(result).startswith("200 requests")
    assert 0 < result.placing_s < result.processor_s


def test_traffic_ends_when_its_time_is_over() -> None:
    assert not list(during(MIX.stream(3), 0.0))
    assert len(list(during(MIX.stream(3), 1e6))) == MIX.num_requests


def test_the_load_of_the_traffic_equals_that_of_the_prefill_workers() -> None:
    slow, fast = (list(traffic(8, 400, 0, load)) for load in (0.5, 1.0))
    assert slow[-1].arrival_s == pytest.approx(2 * fast[-1].arrival_s, rel=0.3)
    assert large_spec(9, 50) == replace(FleetSpec(4, 5, 64), prefill_pages=50, decode_pages=50)


def test_the_command_prints_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--workers", "4", "--requests", "40", "--cache-pages", "300"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("40 requests, 0 not complete, on 4 workers")
    assert all(word in printed for word in ("hits", "busiest over mean", "TTFT p50", "of memory"))
    with pytest.raises(SystemExit):
        main(["--workers", "1"])
