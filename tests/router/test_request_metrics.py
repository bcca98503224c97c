"""What a router counts of a request that has ended: stages, lanes, prompt lengths, targets and where prompts went."""

from __future__ import annotations

import time

import pytest

from penstock.client.retry import RetryBudget
from penstock.config.autoscaler import SloConfig
from penstock.types import FinishReason, Lane, RequestId, SamplingParams
from penstock.v1 import common_pb2
from router.metrics.completion_counts import CompletionCounts
from router.metrics.demand_report import DemandCounter
from router.metrics.metrics import RouterMetrics
from router.metrics.request_metrics import prompt_class
from router.prepared_request import PreparedRequest


def count(timing: common_pb2.Timing, *, num_prompt: int = 100, num_tokens: int = 11) -> str:
    """Counts one interactive request with this timing; returns the exposition."""
    slo = SloConfig(ttft_s=0.5, itl_s=0.02)
    metrics = RouterMetrics("m")
    counts = CompletionCounts(metrics, RetryBudget(), DemandCounter(slo), slo)
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
    counts.completion(request, FinishReason.LENGTH, timing, num_tokens)
    counts.request(request, usage, timing)
    return metrics.render().decode()


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
        series = f'penstock:stage_seconds_sum{{lane="interactive",model_name="m",stage="{stage}"}} {seconds}'
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
        ({"decode_ms": 201.0}, 1, "met"),  # one token has no time between tokens
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


def test_prompt_classes_meet_at_their_bounds() -> None:
    sizes = (1, 1023, 1024, 8191, 8192, 32767, 32768, 1 << 20)
    assert [prompt_class(size) for size in sizes] == [
        *["below 1k"] * 2,
        *["1k to 8k"] * 2,
        *["8k to 32k"] * 2,
        *["32k and more"] * 2,
    ]
