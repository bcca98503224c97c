"""Tests `penstock top`: rates between two snapshots of a deployment, computed from fake status and metrics. No Ray."""

from __future__ import annotations

import asyncio
import json

import pytest

from cluster.cli.commands.inspecting.top import format_rates, sparkline
from cluster.cli.main import main
from cluster.cli.rates import DeploymentSnapshot, RouterCounts, compute_rates, read_counts
from penstock.types import Lane
from penstock.v1 import admin_pb2, worker_pb2
from router.metrics.metrics import RouterMetrics
from router.metrics.request_metrics import EndedRequest
from tests.cluster.controller.test_operations import served


def worker(number: int, tokens: int, *, epoch: int = 1, queries: int = 0, hits: int = 0) -> admin_pb2.WorkerStatus:
    load = worker_pb2.Load(
        num_running=2,
        free_pages=25,
        total_pages=100,
        step_s=0.004,
        decode_steps=worker_pb2.StepTotals(tokens=tokens),
        cache=worker_pb2.CacheStats(queries=queries, device_hits=hits),
    )
    member = admin_pb2.Member(worker_id=f"decode-{number}", epoch=epoch, role="decode")
    return admin_pb2.WorkerStatus(member=member, state="ready", load=load)


def sample(at_s: float, *workers: admin_pb2.WorkerStatus, **routers: RouterCounts) -> DeploymentSnapshot:
    return DeploymentSnapshot(at_s, admin_pb2.StatusResponse(model="m", ready=True, workers=workers), routers)


def test_rates_are_differences_between_two_snapshots() -> None:
    before = sample(10.0, worker(0, 100, queries=10, hits=5), worker(1, 500))
    now = sample(12.0, worker(0, 300, queries=30, hits=20), worker(1, 7, epoch=2))
    view = compute_rates(before, now)
    first, second = view.workers
    assert (first.decode_tokens_per_s, first.hit_rate, first.pages_used, first.step_s) == (100.0, 0.75, 0.75, 0.004)
    assert (second.decode_tokens_per_s, second.hit_rate) == (None, None)  # another epoch counts from zero
    assert (view.tokens_per_s, view.ttft_s, view.num_queued) == (100.0, None, None)


def test_a_starting_worker_shows_its_progress() -> None:
    coming = admin_pb2.WorkerStatus(
        member=admin_pb2.Member(worker_id="decode-1", role="decode"), state="starting", detail="capturing graphs 7/19"
    )
    view = compute_rates(sample(0.0, worker(0, 1), coming), sample(2.0, worker(0, 1), coming))
    (line,) = [line for line in format_rates("m", view).splitlines() if line.startswith("decode-1")]
    assert line.split()[1] == "starting"
    assert line.endswith("capturing graphs 7/19")


def metrics(first_tokens_s: list[float], tokens: int) -> RouterCounts:
    counts = RouterMetrics("m")
    for seconds in first_tokens_s:
        counts.requests.first_token((Lane.STANDARD.value, 100, "", seconds))
    counts.requests.gaps(Lane.STANDARD, 100, "").observe(0.004, tokens)
    counts.requests.generation_tokens.inc(tokens)
    counts.requests.request(EndedRequest(Lane.STANDARD, "", 100, tokens, tokens, 0.0, 0.0, 1.0))
    return read_counts(counts.render().decode())


def test_router_histograms_become_percentiles_of_the_interval() -> None:
    before = sample(0.0, a=metrics([9.0] * 50, 20), gone=metrics([9.0], 5))
    now = sample(2.0, a=metrics([9.0] * 50 + [0.02] * 98 + [0.9] * 2, 60), new=metrics([9.0], 5))
    view = compute_rates(before, now)
    assert view.ttft_s == (0.025, 1.0)  # observations before the interval do not count
    assert view.itl_s == (0.005, 0.005)
    assert view.tokens_per_s == 20.0
    beyond = compute_rates(sample(0.0, a=metrics([], 0)), sample(1.0, a=metrics([999.0], 0)))
    assert beyond.ttft_s == (None, None)


def test_a_restarted_router_counts_from_zero() -> None:
    view = compute_rates(sample(0.0, a=metrics([0.02] * 5, 90)), sample(1.0, a=metrics([0.02], 30)))
    assert view.tokens_per_s == 30.0


def test_the_view_names_pools_and_workers() -> None:
    text = format_rates("m", compute_rates(sample(0.0, worker(0, 0)), sample(1.0, worker(0, 50))))
    lines = text.splitlines()
    assert lines[0] == "m: ready   50 tokens/s   queued -"
    assert lines[1].startswith("TTFT - ms")
    assert lines[3] == "decode: 1 of 1 ready, 2 running, 0 waiting, pages 75%, 50 tokens/s"
    assert lines[-1].split() == ["decode-0", "ready", "2", "0", "75%", "0", "50", "4.0", "-"]


def test_a_view_fits_eighty_columns() -> None:
    busy = sample(0.0, *(worker(number, 0, queries=10) for number in range(4)), a=metrics([0.02], 1))
    later = sample(
        1.0, *(worker(number, 12345, queries=99, hits=89) for number in range(4)), a=metrics([0.9] * 9, 9999)
    )
    for past in (None, [0.0, 50.0, 99999.0] * 7):
        assert max(map(len, format_rates("some-model-8b", compute_rates(busy, later), past).splitlines())) <= 80


def test_sparklines_and_bars_are_to_scale() -> None:
    assert sparkline([0.0, 50.0, 100.0]) == "▁▅█"
    assert sparkline([0.0, 0.0]) == "▁▁"
    view = compute_rates(sample(0.0, worker(0, 0)), sample(1.0, worker(0, 50)))
    assert "██████░░  75%" in format_rates("m", view, [50.0]).splitlines()[-1]


def test_the_headline_matches_the_pools_rate_while_answers_stream() -> None:
    """The router counts tokens as they pass, not at the end of an answer."""
    view = compute_rates(
        sample(0.0, worker(0, 100), a=metrics([], 90)), sample(1.0, worker(0, 210), a=metrics([], 200))
    )
    lines = format_rates("m", view).splitlines()
    assert "110 tokens/s" in lines[0]
    assert lines[3].endswith("110 tokens/s")


async def test_top_prints_as_many_views_as_requested(capsys: pytest.CaptureFixture[str]) -> None:
    async with served() as (_, address):
        flags = ["top", "--interval", "0.05", "-n", "2", "--admin", address]
        assert await asyncio.to_thread(main, [*flags, "--json"]) == 0
        views = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [each["model"] for each in views] == ["some-model"] * 2
        assert [each["worker_id"] for each in views[0]["workers"]] == ["prefill-0", "decode-0", "decode-1"]
        assert await asyncio.to_thread(main, flags) == 0
        assert capsys.readouterr().out.count("decode-1") == 2
