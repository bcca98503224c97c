"""Tests what a router counts for an ended request: stages, lanes, prompt lengths, targets, where prompts were
computed."""

from __future__ import annotations

import asyncio
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from penstock.client.retry import RetryBudget
from penstock.config.autoscaler import SloConfig
from penstock.metrics.families import HistogramFamily
from penstock.types import FinishReason, Lane, RequestId, SamplingParams, WorkerId
from penstock.v1 import common_pb2
from router.metrics.completion_counts import CompletionCounts
from router.metrics.demand_report import DemandCounter
from router.metrics.metrics import RouterMetrics
from router.metrics.request_metrics import EndedRequest, RequestMetrics, prompt_class
from router.prepared_request import PreparedRequest
from router.routing.policy.interface import PairChoice, PairScore, PrefillEstimate


def count(
    timing: common_pb2.Timing, *, num_prompt: int = 100, num_tokens: int = 11, choice: PairChoice | None = None
) -> str:
    """Counts one interactive request with this timing; returns the exposition text."""
    slo = SloConfig(ttft_s=0.5, itl_s=0.02)
    metrics = RouterMetrics("m", slo=slo)
    counts = CompletionCounts(metrics, RetryBudget(), DemandCounter(slo))
    now_s = time.monotonic()
    request = PreparedRequest(
        RequestId("r"),
        [1] * num_prompt,
        SamplingParams(max_tokens=num_tokens),
        "rev",
        now_s,
        now_s + 9.0,
        lane=Lane.INTERACTIVE,
    )
    usage = common_pb2.Usage(prompt_tokens=num_prompt, completion_tokens=num_tokens, cached_tokens=timing.cached_tokens)
    counts.first_token(request, timing.first_token_ms / 1e3)
    counts.completion(request, FinishReason.LENGTH, timing, num_tokens, choices=[choice] if choice else ())
    counts.request(request, usage, timing)
    return metrics.render().decode()


def ended_request(tenant: str = "") -> EndedRequest:
    """Returns a request of the bulk lane that met its targets."""
    return EndedRequest(Lane.BULK, tenant, 10, 0, 1, 0.0, 0.0, 1.0)


def timing(**fields: object) -> common_pb2.Timing:
    defaults = {
        "queue_ms": 2.0,
        "prefill_ms": 40.0,
        "transfer_ms": 3.0,
        "first_token_ms": 60.0,
        "decode_ms": 100.0,
        "prefill_worker": "prefill-0",
        "decode_worker": "decode-0",
        "cached_tokens": 32,
    }
    return common_pb2.Timing(**{**defaults, **fields})  # type: ignore[arg-type]


def test_stages_are_observed_by_lane() -> None:
    text = count(timing())
    for stage, seconds in (("queue", 0.002), ("prefill", 0.04), ("transfer", 0.003), ("decode", 0.1)):
        labels = f'lane="interactive",model_name="m",pool="prefill",prompt="below 1k",stage="{stage}"'
        series = f"penstock:stage_seconds_sum{{{labels}}} {seconds}"
        assert series in text
    assert 'vllm:request_prefill_time_seconds_sum{model_name="m"} 0.04' in text
    assert 'vllm:request_decode_time_seconds_sum{model_name="m"} 0.1' in text
    assert 'vllm:request_time_per_output_token_seconds_sum{model_name="m"} 0.01' in text
    assert 'vllm:prompt_tokens_cached_total{model_name="m"} 32.0' in text
    first = 'penstock:time_to_first_token_seconds_count{lane="interactive",model_name="m",prompt="below 1k"} 1.0'
    assert first in text


@pytest.mark.parametrize(
    ("fields", "num_tokens", "result"),
    [
        ({}, 11, "met"),
        ({"first_token_ms": 501.0}, 11, "missed"),
        ({"decode_ms": 201.0}, 11, "missed"),
        ({"decode_ms": 201.0}, 1, "met"),  # a single token has no time between tokens
    ],
)
def test_a_request_meets_both_targets_or_misses(fields: dict[str, object], num_tokens: int, result: str) -> None:
    text = count(timing(**fields), num_tokens=num_tokens)
    for name in ("met", "missed"):
        value = 1.0 if name == result else 0.0
        assert f'penstock:request_targets_total{{lane="interactive",model_name="m",result="{name}"}} {value}' in text


@pytest.mark.parametrize(
    ("prefill_worker", "place"), [("prefill-0", "prefill worker"), ("decode-0", "decode worker"), ("", "decode worker")]
)
def test_prompt_tokens_are_counted_where_they_were_computed(prefill_worker: str, place: str) -> None:
    text = count(timing(prefill_worker=prefill_worker))
    expected = {"cached": 32.0, "prefill worker": 0.0, "decode worker": 0.0, place: 68.0}
    for name, value in expected.items():
        assert f'penstock:prompt_tokens_by_place_total{{model_name="m",place="{name}"}} {value}' in text


def test_the_tokens_of_a_split_prompt_are_counted_at_both_workers() -> None:
    split = common_pb2.PrefillPrice(place="split", prefill_worker="prefill-0", remote_tokens=64)
    text = count(timing(prefill_worker="prefill-0", prices=[split]))
    for name, value in {"cached": 32.0, "prefill worker": 32.0, "decode worker": 36.0}.items():
        assert f'penstock:prompt_tokens_by_place_total{{model_name="m",place="{name}"}} {value}' in text


def test_ended_completions_are_observed_by_lane_pool_prompt_and_finish_reason() -> None:
    text = count(timing(prefill_worker="decode-0"), num_prompt=9000)
    of_ended = 'finished_reason="length",lane="interactive",model_name="m",pool="decode",prompt="8k to 32k"'
    assert f"penstock:completion_seconds_sum{{{of_ended}}} 0.16" in text
    assert f"penstock:time_per_output_token_seconds_sum{{{of_ended}}} 0.01" in text
    alone = of_ended.replace('pool="decode",prompt="8k to 32k"', 'pool="prefill",prompt="below 1k"')
    assert f"penstock:time_per_output_token_seconds_count{{{alone}}} 0.0" in count(timing(), num_tokens=1)


def test_pending_ends_are_counted_at_a_scrape_or_in_batches_and_none_is_lost() -> None:
    metrics = RouterMetrics("m")
    ended = 0
    for more in (1, 511, 512, 513, 7):
        for _ in range(more):
            metrics.requests.request(ended_request())
        ended += more
        series = 'penstock:request_targets_total{lane="bulk",model_name="m",result="met"}'
        assert f"{series} {ended:.1f}" in metrics.render().decode()


async def test_the_event_loop_runs_while_metrics_are_rendered() -> None:
    metrics = RouterMetrics("m", 20)
    for tenant in range(30):
        metrics.requests.first_token((Lane.BULK.value, 10, str(tenant), 0.1))
        metrics.requests.request(ended_request(str(tenant)))
    rendering, num_turns = asyncio.create_task(metrics.render_aside()), 0
    while not rendering.done():
        num_turns += 1
        metrics.requests.first_token(
            (list(Lane)[num_turns % 3].value, 10, "another", 0.1)
        )  # new series appear meanwhile
        await asyncio.sleep(0)
    assert num_turns > 1
    expected = metrics.render().decode()
    assert (await metrics.render_aside()).decode() == expected
    names = re.findall(r"(?m)^# TYPE (\S+) ", expected)
    assert len(names) == len(set(names))


def test_vllms_histogram_is_the_sum_over_lanes_and_prompt_lengths() -> None:
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry, "m", SloConfig())
    metrics.first_token((Lane.BULK.value, 10, "", 0.004))
    metrics.first_token((Lane.STANDARD.value, 10_000, "", 0.02))
    metrics.gaps(Lane.BULK, 10, "").observe(0.003, 5)
    metrics.fold()
    text = generate_latest(registry).decode()
    assert 'vllm:time_to_first_token_seconds_bucket{le="0.005",model_name="m"} 1.0' in text
    assert 'vllm:time_to_first_token_seconds_count{model_name="m"} 2.0' in text
    assert 'vllm:time_to_first_token_seconds_sum{model_name="m"} 0.024' in text
    assert 'vllm:inter_token_latency_seconds_count{model_name="m"} 5.0' in text
    assert 'vllm:request_prefill_time_seconds_count{model_name="m"} 0.0' in text  # exists before the first request


def test_a_prompt_planned_for_a_prefill_worker_and_computed_elsewhere_is_counted() -> None:
    remote = common_pb2.PrefillPrice(place="remote", prefill_worker="prefill-0", remote_tokens=100)
    text = count(timing(prefill_worker="decode-0", prices=[remote]))
    assert 'penstock:prompt_tokens_planned_total{model_name="m",place="prefill worker"} 68.0' in text
    assert 'penstock:prompt_tokens_by_place_total{model_name="m",place="prefill worker"} 0.0' in text
    local = common_pb2.PrefillPrice(place="local")
    text = count(timing(prefill_worker="decode-0", prices=[local]))
    assert 'penstock:prompt_tokens_planned_total{model_name="m",place="decode worker"} 68.0' in text


@pytest.mark.parametrize(("pool", "promised"), [("prefill", 64.0), ("decode", 16.0)])
def test_promised_and_actual_cache_hits_are_counted_by_the_chosen_pool(pool: str, promised: float) -> None:
    prefill = (PrefillEstimate(WorkerId("prefill-0"), 0.0, 0.1, 64),) if pool == "prefill" else ()
    score = PairScore(None, WorkerId("decode-0"), 0.0, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 64, 16)
    text = count(timing(), choice=PairChoice(WorkerId("decode-0"), prefill, 36, score))
    for kind, tokens in (("all", 100.0), ("predicted cached", promised), ("cached", 32.0)):
        series = f'penstock:routed_prompt_tokens_total{{kind="{kind}",model_name="m",pool="{pool}"}}'
        assert f"{series} {tokens}" in text


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.integers(1, 5)), max_size=30))
def test_a_histogram_counts_as_the_librarys_does(values: list[tuple[float, int]]) -> None:
    bounds, ours, theirs = (0.5, 1.0, 10.0), CollectorRegistry(), CollectorRegistry()
    mine = HistogramFamily("h", "help", ["label"], bounds, ours)
    library = Histogram("h", "help", ["label"], buckets=bounds, registry=theirs)
    for value, times in values:
        mine.bind("a").observe(value, times)
        for _ in range(times):
            library.labels("a").observe(value)
    for bound in ("0.5", "1.0", "10.0", "+Inf"):
        labels = {"label": "a", "le": bound}
        assert ours.get_sample_value("h_bucket", labels) == theirs.get_sample_value("h_bucket", labels)
    of_all = theirs.get_sample_value("h_sum", {"label": "a"})
    assert ours.get_sample_value("h_sum", {"label": "a"}) == (None if of_all is None else pytest.approx(of_all))


def test_vllms_names_of_requests_are_exported() -> None:
    names = set(re.findall(r"(?m)^# TYPE (\S+) ", count(timing())))
    assert names >= {
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds",
        "vllm:request_time_per_output_token_seconds",
        "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",
        "vllm:request_success_total",
        "vllm:prompt_tokens_total",
        "vllm:prompt_tokens_cached_total",
        "vllm:generation_tokens_total",
        "vllm:num_preemptions_total",
    }


def test_prompt_classes_are_separated_at_their_bounds() -> None:
    sizes = (1, 1023, 1024, 8191, 8192, 32767, 32768, 1 << 20)
    assert [prompt_class(size) for size in sizes] == [
        *["below 1k"] * 2,
        *["1k to 8k"] * 2,
        *["8k to 32k"] * 2,
        *["32k and more"] * 2,
    ]


def test_the_label_tenant_is_bounded_and_off_by_default() -> None:
    registry = CollectorRegistry()
    metrics = RequestMetrics(registry, "m", SloConfig(), num_tenants=2)
    for tenant in ("a", "b", "c", "d", "a"):
        metrics.first_token((Lane.BULK.value, 10, tenant, 0.004))
        metrics.gaps(Lane.BULK, 10, tenant).observe(0.003)
        metrics.request(ended_request(tenant))
    metrics.fold()
    for name in ("time_to_first_token_seconds_count", "inter_token_latency_seconds_count"):
        for tenant, times in (("a", 2), ("b", 1), ("other", 2)):
            labels = {"model_name": "m", "lane": "bulk", "prompt": "below 1k", "tenant": tenant}
            assert registry.get_sample_value(f"penstock:{name}", labels) == times
    missed = {"model_name": "m", "lane": "bulk", "result": "met", "tenant": "other"}
    assert registry.get_sample_value("penstock:request_targets_total", missed) == 2
    assert registry.get_sample_value("vllm:time_to_first_token_seconds_count", {"model_name": "m"}) == 5
    assert "tenant=" not in count(timing())
