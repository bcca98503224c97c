"""Tests that counting in batches equals counting one by one, and equals the library's histograms."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from penstock.config.autoscaler import SloConfig
from penstock.types import FinishReason, Lane
from penstock.v1 import common_pb2
from router.metrics import request_metrics
from router.metrics.metrics import RouterMetrics
from router.metrics.request_metrics import EndedRequest, RequestMetrics, prompt_class
from router.tracing.stages import EndedCompletion, LegCause, Stage, WorkerLeg, stage_intervals

MS = st.floats(0.0, 2000.0).map(lambda value: round(value, 3))
BEGAN_S = 1000.0
TIMINGS = st.builds(
    common_pb2.Timing,
    queue_ms=MS,
    prefill_ms=MS,
    transfer_ms=MS | st.just(0.0),
    decode_queue_ms=MS,
    first_token_ms=MS,
    decode_ms=MS,
    prefill_worker=st.sampled_from(["", "decode-0", "prefill-0"]),
    decode_worker=st.just("decode-0"),
    pages_moved=st.integers(0, 2),
    cached_tokens=st.integers(0, 300),
    num_preemptions=st.integers(0, 2),
    num_redispatches=st.integers(0, 1),
)


@st.composite
def completions(draw: st.DrawFn) -> EndedCompletion:
    moments = sorted(draw(st.lists(MS, min_size=5, max_size=5)))
    prepared_s, admitted_s, *sent_s = (BEGAN_S + moment / 1e3 for moment in moments)
    causes = (LegCause.PLACED, draw(st.sampled_from(list(LegCause))), LegCause.MIGRATED)
    legs = [WorkerLeg("w", at_s, cause) for at_s, cause in zip(sent_s, causes, strict=True)][: draw(st.integers(0, 3))]
    return EndedCompletion(
        1,
        "r",
        0,
        draw(st.sampled_from(list(Lane))),
        draw(st.sampled_from(list(FinishReason))),
        draw(st.sampled_from([1, 512, 2000, 100_000])),
        draw(st.integers(0, 5)),
        draw(TIMINGS),
        BEGAN_S,
        draw(st.sampled_from([0.0, prepared_s])),
        admitted_s,
        1.7e9,
        legs,
        (),
        "",
    )


def samples(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


def count(metrics: RequestMetrics, ended: EndedCompletion) -> None:
    """Counts all metrics of a request with one completion."""
    num_prompt_tokens, timing = ended.num_prompt_tokens, ended.timing
    sizes = (num_prompt_tokens, timing.cached_tokens, ended.num_tokens)
    metrics.first_token((ended.lane.value, num_prompt_tokens, "t", timing.first_token_ms / 1e3))
    metrics.gaps(ended.lane, num_prompt_tokens, "t").defer(timing.decode_ms / 1e3)
    metrics.completion((ended, "t"))
    metrics.request(EndedRequest(ended.lane, "t", *sizes, timing.first_token_ms, timing.decode_ms, ended.end_ms / 1e3))


@settings(max_examples=40)
@given(st.lists(completions(), max_size=12), st.integers(0, 1))
def test_batches_count_the_same_as_single_events(ended: Sequence[EndedCompletion], num_tenants: int) -> None:
    batched, single = CollectorRegistry(), CollectorRegistry()
    in_batches = RequestMetrics(batched, "m", SloConfig(), num_tenants)
    one_by_one = RequestMetrics(single, "m", SloConfig(), num_tenants)
    for each in ended:
        count(in_batches, each)
        count(one_by_one, each)
        one_by_one.fold()
    in_batches.fold()
    assert samples(batched) == pytest.approx(samples(single))


@settings(max_examples=40)
@given(st.lists(completions(), max_size=12))
def test_stages_equal_the_waterfalls_in_the_librarys_histogram(ended: Sequence[EndedCompletion]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    metrics = RequestMetrics(ours, "m", SloConfig())
    labels = ("model_name", "lane", "stage", "prompt", "pool")
    library = Histogram("penstock:stage_seconds", "x", labels, buckets=request_metrics._STAGE_S, registry=theirs)
    for each in ended:
        metrics.completion((each, ""))
        pool = "prefill" if each.timing.prefill_worker == "prefill-0" else "decode"
        for stage, interval in zip(Stage, stage_intervals(each), strict=True):
            series = library.labels("m", each.lane.value, stage.value, prompt_class(each.num_prompt_tokens), pool)
            if interval is not None:
                series.observe((interval[1] - interval[0]) / 1e3)
    metrics.fold()
    found = samples(ours)
    expected = {key: value for key, value in samples(theirs).items() if not key[0].endswith("_created")}
    assert {key: found[key] for key in expected} == pytest.approx(expected)


async def test_a_started_router_counts_without_scrapes() -> None:
    metrics = RouterMetrics("m")
    metrics.start()
    for _ in range(600):
        metrics.requests.first_token(("bulk", 9, "t", 0.1))
    async with asyncio.timeout(60):
        while 'count{model_name="m"} 600.0' not in read_only(metrics):  # noqa: ASYNC110
            await asyncio.sleep(0)
    metrics.stop()
    assert metrics._catching_up is None


def read_only(metrics: RouterMetrics) -> str:
    """Returns the request metrics without what has not been counted yet."""
    return generate_latest(metrics._request_registry).decode()


def test_pending_counts_are_bounded_without_scrapes() -> None:
    metrics = RouterMetrics("m")
    timing = common_pb2.Timing(first_token_ms=1.0, decode_ms=1.0)
    ended = EndedCompletion(
        1, "r", 0, Lane.BULK, FinishReason.STOP, 9, 2, timing, time.monotonic(), 0.0, 0.0, 0.0, (), (), ""
    )
    requests, gaps = metrics.requests, metrics.requests.gaps(Lane.BULK, 9, "t")
    for number in range(1, 1001):
        metrics.recent.keep(ended._replace(number=number))
        count(requests, ended)
        metrics.mispredicted(0.1, 0.1, 0.1)
        if number % 10 == 0:
            metrics.catch_up()
            assert not requests._completions
            assert not metrics.recent._new
            lists = (requests._first_tokens, requests._read.which, requests._requests, metrics._errors_s)
            assert max(map(len, (*lists, gaps._deferred))) < 512
    assert 'vllm:request_success_total{finished_reason="stop",model_name="m"} 520.0' in read_only(metrics)
    assert [row["number"] for row in metrics.recent.after(998, 9)] == [999, 1000]
    text = metrics.render().decode()
    assert 'vllm:request_success_total{finished_reason="stop",model_name="m"} 1000.0' in text
    assert 'vllm:inter_token_latency_seconds_count{model_name="m"} 1000.0' in text
    assert 'penstock:prediction_error_seconds_count{model_name="m",stage="prefill"} 1000.0' in text
