"""Tests that metrics, traces, logs, waterfalls and decision records use the same stage names with the same times."""

from __future__ import annotations

import logging
import re
import time

import pytest
from opentelemetry.context import Context
from prometheus_client.parser import text_string_to_metric_families

from penstock.client.retry import RetryBudget
from penstock.config.autoscaler import SloConfig
from penstock.types import FinishReason, RequestId, SamplingParams
from penstock.v1 import common_pb2
from router.metrics.completion_counts import CompletionCounts
from router.metrics.demand_report import DemandCounter
from router.metrics.metrics import RouterMetrics
from router.prepared_request import PreparedRequest
from router.tracing.request_trace import RequestTrace, SampledCall
from router.tracing.spans import SpanBuilder
from router.tracing.stages import EndedCompletion, Stage, WorkerLeg
from router.tracing.waterfall import waterfall

NAMES = [stage.value for stage in Stage]


@pytest.fixture
def counts() -> CompletionCounts:
    return CompletionCounts(RouterMetrics("m"), RetryBudget(), DemandCounter(SloConfig()))


@pytest.fixture
def ended(counts: CompletionCounts, caplog: pytest.LogCaptureFixture) -> EndedCompletion:
    """Returns a completion that has passed every stage and was counted."""
    caplog.set_level(logging.DEBUG, "router.metrics")
    accepted_s = time.monotonic()
    trace = RequestTrace(SampledCall(7, Context(), lambda done: None), "chat", accepted_s)
    request = PreparedRequest(
        RequestId("r"), [1] * 9, SamplingParams(max_tokens=4), "rev", accepted_s, accepted_s + 9.0,
        prepared_s=accepted_s + 0.002, trace=trace,
    )  # fmt: skip
    timing = common_pb2.Timing(
        queue_ms=16.0, prefill_ms=40.0, transfer_ms=3.0, decode_queue_ms=2.0, first_token_ms=64.0, decode_ms=100.0,
        prefill_worker="prefill-0", decode_worker="decode-0", pages_moved=1,
    )  # fmt: skip
    legs = [WorkerLeg("decode-0", accepted_s + 0.006)]
    return counts.completion(
        request, FinishReason.LENGTH, timing, 4, admitted_s=accepted_s + 0.005, legs=legs, choices=()
    )


EXPECTED_MS = dict(zip(NAMES, (2.0, 3.0, 1.0, 10.0, 40.0, 3.0, 2.0, 100.0), strict=True))


def test_spans_have_the_stages(ended: EndedCompletion) -> None:
    call = SampledCall(7, Context(), lambda done: None)
    trace = RequestTrace(call, "chat", ended.accepted_s, completions=[ended], ended_s=time.monotonic() + 1.0)
    spans = SpanBuilder("penstock", "router-0", "m").build(trace)
    found = {span.name: (span.end_time - span.start_time) / 1e6 for span in spans if span.name in NAMES}
    assert found == pytest.approx(EXPECTED_MS, abs=0.01)
    assert {span.name for span in spans} - set(NAMES) == {"chat m", "decode worker"}


def test_waterfall_and_decision_record_have_the_stages(ended: EndedCompletion) -> None:
    described = waterfall([ended], "kv-aware")
    (completion,) = described["completions"]
    durations = {stage["name"]: stage["end_ms"] - stage["start_ms"] for stage in completion["stages"]}
    assert list(durations) == NAMES
    assert durations == pytest.approx(EXPECTED_MS, abs=0.01)
    assert completion["stages_ms"] == pytest.approx(EXPECTED_MS, abs=0.01)
    actual = described["decision"]["completions"][0]["actual"]
    recorded = {key: ms for key, ms in actual.items() if key.endswith("_ms") and key != "first_token_ms"}
    assert recorded == pytest.approx({f"{name.replace(' ', '_')}_ms": ms for name, ms in EXPECTED_MS.items()}, abs=0.01)


@pytest.mark.usefixtures("ended")
def test_metrics_have_the_stages(counts: CompletionCounts) -> None:
    (family,) = [
        family
        for family in text_string_to_metric_families(counts.metrics.render().decode())
        if family.name == "penstock:stage_seconds"
    ]
    found = {
        sample.labels["stage"]: sample.value * 1e3 for sample in family.samples if sample.name.endswith("seconds_sum")
    }
    assert found == pytest.approx(EXPECTED_MS, abs=0.01)


@pytest.mark.usefixtures("ended")
def test_the_log_has_the_stages(caplog: pytest.LogCaptureFixture) -> None:
    (line,) = [record.getMessage() for record in caplog.get_records("setup")]
    assert line.startswith("r [0] length: ")
    found = {name: float(ms) for name, ms in re.findall(r"([a-z ]+?) (\d+\.\d) ms", line.partition(": ")[2])}
    assert {name.strip(): ms for name, ms in found.items()} == pytest.approx(EXPECTED_MS, abs=0.1)
