"""Tests trace files, the generated mix, and the report of a replay."""

from __future__ import annotations

import gzip
import itertools
import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from penstock.config import DecodeConfig
from penstock.kv.page_hash import hash_pages
from penstock.types import WorkerId
from router.routing.costs.pull_costs import PullBook
from simulator.fleet import FleetSpec, SimulatedFleet
from simulator.replay import UNLIMITED, fit, main, replay, with_pages
from simulator.report import Slo, offered_load, single_cache_hit_rate
from simulator.request import TraceRequest
from simulator.routers.prompt_hashes import PromptHasher
from simulator.traces import SharedPrefixMix, drop_longer, load_trace, scale_arrivals
from simulator.workers.prefill_model import PrefillModel

SPEC = FleetSpec(num_prefill=3, num_decode=3, prefill_pages=4000, decode_pages=4000)
MIX = SharedPrefixMix(num_requests=120, requests_per_s=30.0, output_tokens=20, think_s=1.0)


def write_trace(path: Path, rows: list[dict[str, object]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def row(timestamp: float, **more: object) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": 700, "output_length": 5, **more}


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_equal_block_hashes_give_equal_tokens_and_others_differ(tmp_path: Path, name: str) -> None:
    rows = [row(0, hash_ids=[7, 8]), row(10, hash_ids=[7, 9]), row(20)]
    each, other, alone = load_trace(write_trace(tmp_path / name, rows))
    assert len(each.token_ids()) == each.num_input_tokens == 700
    assert each.token_ids()[:512] == other.token_ids()[:512]
    assert not set(each.token_ids()[512:]) & set(other.token_ids())
    assert not set(alone.token_ids()) & {*each.token_ids(), *other.token_ids()}
    assert [each.arrival_s, other.arrival_s, alone.arrival_s] == [0.0, 0.01, 0.02]


def test_scaling_and_dropping_keep_the_order() -> None:
    requests = MIX.make(1)
    faster = scale_arrivals(requests, 2.0)
    assert offered_load(faster, SPEC) == pytest.approx(2 * offered_load(requests, SPEC))
    short = drop_longer(requests, 3000)
    assert 0 < len(short) < len(requests)
    assert all(request.num_input_tokens + request.num_output_tokens <= 3000 for request in short)
    assert [request.number for request in short] == list(range(len(short)))
    assert short[0].arrival_s == 0.0


def test_the_generated_mix_depends_only_on_its_seed_and_shares_prefixes() -> None:
    requests = MIX.make(3)
    assert requests == MIX.make(3) != MIX.make(4)
    pages = 1_000_000
    assert single_cache_hit_rate(requests, 16, pages) > 0.4
    alone = replace(MIX, single_share=1.0).make(3)
    assert single_cache_hit_rate(alone, 16, pages) == 0.0


def test_a_single_cache_hits_earlier_pages_but_never_the_last_token() -> None:
    requests = [TraceRequest(number, float(number), 64, 1, (1,), 64) for number in range(3)]
    assert single_cache_hit_rate(requests, 16, 100) == pytest.approx(2 * 48 / (3 * 64))


@pytest.mark.parametrize("num_prefill", [0, 3])
def test_a_replay_completes_everything_and_counts_hits(num_prefill: int) -> None:
    requests, factor = fit(MIX.make(0), SPEC, load=0.6)
    assert factor > 0
    spec = with_pages(replace(SPEC, num_prefill=num_prefill), UNLIMITED, requests)
    summary, fleet = replay(requests, spec, 0, Slo(5.0, 1.0))
    assert (summary.num_requests, summary.num_failed) == (120, 0)
    single = single_cache_hit_rate(requests, spec.page_size, 3 * spec.prefill_pages)
    assert 0 < summary.hit_rate <= single
    computed = sum(worker.num_computed_tokens for worker in fleet.workers.values())
    prompts = sum(request.num_input_tokens for request in requests)
    assert computed >= prompts * (1 - summary.hit_rate) * 0.98
    assert 0 < summary.ttft_p50_s <= summary.ttft_p90_s <= summary.ttft_p99_s
    assert summary.goodput == 1.0


@pytest.mark.parametrize("bytes_per_s", [50e9, 1e8])
def test_prefixes_are_pulled_over_fast_links(bytes_per_s: float) -> None:
    link = replace(SPEC.link_costs, bytes_per_s=bytes_per_s)
    requests, _ = fit(MIX.make(0), SPEC, load=0.6)
    spec = with_pages(replace(SPEC, pull=True, link_costs=link), UNLIMITED, requests)
    summary, fleet = replay(requests, spec, 0, Slo(5.0, 1.0))
    assert summary.num_failed == 0
    pulled = sum(
        worker.pulls.num_pulled_tokens for worker in fleet.workers.values() if isinstance(worker, PrefillModel)
    )
    assert (pulled > 0) == (bytes_per_s > 1e9)


def test_routers_learn_that_pulls_take_longer_than_expected() -> None:
    requests, _ = fit(MIX.make(0), SPEC, load=0.6)
    spec = with_pages(
        replace(SPEC, pull=True, link_costs=replace(SPEC.link_costs, bytes_per_s=50e9)), UNLIMITED, requests
    )
    fleet = SimulatedFleet(spec, 0)
    ends = [(source, target) for source in spec.names for target in spec.names if target.startswith("prefill")]
    for source, target in ends:
        fleet.links.set_slowness(source, target, 100.0)
    pulls = fleet.router._known.pulls
    expected = {
        (source, target): pulls.links.cost(WorkerId(source), WorkerId(target)).byte_s for source, target in ends
    }
    for request in requests:
        fleet.submit(request)
    fleet.run()
    learned = {(source, target): pulls.links.cost(WorkerId(source), WorkerId(target)).byte_s for source, target in ends}
    assert all(learned[link] > 2 * expected[link] for link in ends if link[0] != link[1])


def test_a_pull_that_is_given_up_keeps_what_has_arrived_and_sends_no_more() -> None:
    requests, _ = fit(MIX.make(0), SPEC, load=0.6)
    spec = with_pages(
        replace(SPEC, pull=True, link_costs=replace(SPEC.link_costs, bytes_per_s=50e9)), UNLIMITED, requests
    )
    fleet = SimulatedFleet(spec, 0)
    for source, target in itertools.permutations(spec.names, 2):
        fleet.links.set_slowness(source, target, 20.0)
    reports = []
    with mock.patch.object(PullBook, "on_end", lambda self, plan, worker, pull, _: reports.append(pull)):
        for request in requests:
            fleet.submit(request)
        fleet.run()
    given_up = [pull for pull in reports if pull is not None and pull.pulled_tokens < pull.wanted_tokens]
    assert any(pull.pulled_tokens for pull in given_up)


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--limit", "30", "--workers", "2", "--policy", "round-robin", "--policy", "kv-aware"]) == 0
    printed = capsys.readouterr().out
    assert "30 of 30 requests fit" in printed
    assert [line.split()[0] for line in printed.splitlines()[2:]] == ["round-robin", "kv-aware"]
    assert main(["--trace", "gone.jsonl"]) == 2


@pytest.mark.parametrize("page_size", [16, 48, 64, 128])
def test_hashes_by_block_are_those_of_the_prompts(page_size: int) -> None:
    hasher = PromptHasher(page_size, b"salt")
    for request in MIX.make(5):
        assert hasher.hashes(request) == hash_pages(request.token_ids(), page_size, b"salt")


def test_every_prefill_worker_gets_requests_although_the_first_ones_are_known_to_be_fast() -> None:
    """Requests share nothing, at three quarters of the capacity of six workers."""
    requests = [TraceRequest(n, 0.07 * n, 4000, 8, tuple(range(100 * n, 100 * n + 63)), 64) for n in range(80)]
    fleet = SimulatedFleet(FleetSpec(6, 4, 64, 2000, 2000, decode=DecodeConfig(placement="remote")), 0)
    for request in requests:
        fleet.submit(request)
    fleet.run()
    assert {outcome.computed_by for outcome in fleet.outcomes} == {f"prefill-{index}" for index in range(6)}
