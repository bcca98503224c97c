"""Tests what is sent to an engine and read from it: request fields, stream events, metrics, and hostile answers."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import wire
from penstock.errors import InvalidInput, Overloaded, Unavailable, to_status
from penstock.types import Grammar, GrammarKind, SamplingParams, StepTotals
from penstock.v1 import common_pb2, worker_pb2
from router.fleet.engines.completion_request import completion_body, prefill_body, refused_hints
from router.fleet.engines.completion_stream import (
    BrokenStream,
    EngineUsage,
    max_event_bytes,
    read_event,
    refusal,
    transfer_params,
)
from router.fleet.engines.metrics_text import LoadReader, read_metrics


def submit(sampling: SamplingParams, num_emitted: int = 0) -> worker_pb2.DecodeSubmit:
    tokens = [5, 6, 7, *range(30, 30 + num_emitted)]
    return worker_pb2.DecodeSubmit(token_ids=tokens, num_prompt_tokens=3, sampling=wire.sampling_to_wire(sampling))


def test_request_fields_have_the_engines_names() -> None:
    sampling = SamplingParams(
        max_tokens=9, min_tokens=4, temperature=0.5, top_k=7, top_p=0.5, min_p=0.25, presence_penalty=1.0,
        seed=2**64 - 1, logit_bias={3: 1.5}, stop_token_ids=(8,), logprobs=2, bad_words=("no",),
        allowed_token_ids=(4, 5), grammar=Grammar(GrammarKind.REGEX, "a+"),
    )  # fmt: skip
    body = completion_body(submit(sampling), "tiny", "00ff")
    assert body["model"] == "tiny"
    assert (body["prompt"], body["max_tokens"], body["min_tokens"]) == ([5, 6, 7], 9, 4)
    assert (body["temperature"], body["top_k"], body["seed"], body["presence_penalty"]) == (0.5, 7, 2**63 - 1, 1.0)
    assert (body["logit_bias"], body["stop_token_ids"], body["bad_words"]) == ({"3": 1.5}, [8], ["no"])
    assert (body["allowed_token_ids"], body["logprobs"], body["cache_salt"]) == ([4, 5], 2, "00ff")
    assert body["structured_outputs"] == {"regex": "a+"}
    first = prefill_body(body)
    assert (first["max_tokens"], first["min_tokens"], first["stream"]) == (1, 0, False)
    assert not {"logprobs", "stream_options", "structured_outputs", "return_token_ids"} & first.keys()
    assert first["cache_salt"] == "00ff"  # otherwise the pages would be computed in another scope


def test_a_resumed_completion_requests_only_the_remaining_tokens() -> None:
    sampling = SamplingParams(max_tokens=9, min_tokens=4, temperature=1.0, seed=5)
    body = completion_body(submit(sampling, num_emitted=6), "tiny", "")
    assert (len(body["prompt"]), body["max_tokens"], body["min_tokens"], body["seed"]) == (9, 3, 0, 11)  # type: ignore[arg-type]
    assert "cache_salt" not in body


@pytest.mark.parametrize(
    ("sampling", "num_emitted", "message"),
    [
        (SamplingParams(max_tokens=1, prompt_logprobs=1), 0, "prompt_logprobs: not available"),
        (SamplingParams(max_tokens=1, no_speculation=True), 0, "no_speculation: not available"),
        (SamplingParams(max_tokens=1, grammar=Grammar(GrammarKind.LARK, "x")), 0, "GRAMMAR_KIND_LARK is not available"),
        (SamplingParams(max_tokens=9, grammar=Grammar(GrammarKind.REGEX, "a")), 2, "cannot resume output"),
    ],
)
def test_options_that_an_engine_lacks_are_refused(sampling: SamplingParams, num_emitted: int, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        completion_body(submit(sampling, num_emitted), "tiny", "")


def test_unsupported_hints_are_refused_and_a_request_of_hints_alone_fails() -> None:
    hints = common_pb2.KvHints(session="s", pin_s=3.0, prefetch_s=0.0)
    answers = refused_hints(hints, "engine-a")
    assert [answer.hint for answer in answers] == ["session", "pin_s", "prefetch"]
    assert {answer.outcome for answer in answers} == {common_pb2.HINT_OUTCOME_REFUSED}
    assert {answer.worker_id for answer in answers} == {"engine-a"}
    assert refused_hints(common_pb2.KvHints(), "engine-a") == []
    alone = submit(SamplingParams(max_tokens=1))
    alone.kv_hints.only = True
    with pytest.raises(InvalidInput, match=r"kv_hints\.only: not available, since another engine"):
        completion_body(alone, "tiny", "")


def event(**choice: object) -> bytes:
    return b"data: " + json.dumps({"choices": [choice]}).encode()


def test_stream_events_become_deltas() -> None:
    logprobs = {"token_logprobs": [-0.5], "top_logprobs": [{"token_id:7": -0.5, "token_id:9": -1}]}
    found = read_event(event(token_ids=[7], logprobs=logprobs, finish_reason="stop"), True)
    assert isinstance(found, worker_pb2.StepDelta)
    assert (list(found.token_ids), found.finish_reason) == ([7], common_pb2.FINISH_REASON_STOP)
    assert [(top.token_id, top.logprob) for top in found.logprobs[0].top] == [(7, -0.5), (9, -1.0)]
    assert read_event(b": ping", False) is None
    assert read_event(b"data: [DONE]\r", False) is None
    usage = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 3}}}
    assert read_event(b"data:" + json.dumps(usage).encode(), False) == EngineUsage(3)
    assert read_event(b'data: {"choices": [], "usage": {"prompt_tokens_details": null}}', False) == EngineUsage(None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"data: {", "not JSON"),
        (b"data: " + b"[" * 100_000, "not JSON"),
        (b"data: []", "not an object"),
        (b'data: {"error": {"message": "out of blocks"}}', "out of blocks"),
        (b"data: {}", "no choices"),
        (b'data: {"choices": [1]}', "choice is not an object"),
        (event(token_ids="7"), "token_ids is not a list"),
        (event(token_ids=[True]), "token_ids is not a list"),
        (event(token_ids=[-1]), "token_ids is not a list"),
        (event(token_ids=[2**32]), "token_ids is not a list"),
        (event(token_ids=[], finish_reason="abort"), "unknown finish_reason 'abort'"),
        (event(token_ids=[1], logprobs=None), "logprobs is missing"),
        (event(token_ids=[1], logprobs={"token_logprobs": [], "top_logprobs": []}), "one entry for each"),
        (event(token_ids=[1], logprobs={"token_logprobs": ["a"], "top_logprobs": [None]}), "not a number"),
        (event(token_ids=[1], logprobs={"token_logprobs": [0], "top_logprobs": [{"word": -1}]}), "by its text"),
        (event(token_ids=[1], logprobs={"token_logprobs": [0], "top_logprobs": [3]}), "list of objects"),
        (event(token_ids=[1], logprobs={"token_logprobs": [math.nan], "top_logprobs": [None]}), "not finite"),
        (event(token_ids=[1], logprobs={"token_logprobs": [10**400], "top_logprobs": [None]}), "not finite"),
    ],
)
def test_a_hostile_event_breaks_only_its_own_stream(line: bytes, message: str) -> None:
    with pytest.raises(BrokenStream, match=message):
        read_event(line, True)


def test_a_token_of_zero_probability_gets_the_least_value_json_can_express() -> None:
    found = read_event(event(token_ids=[1], logprobs={"token_logprobs": [-math.inf], "top_logprobs": [None]}), True)
    assert isinstance(found, worker_pb2.StepDelta)
    assert found.logprobs[0].logprob == -9999.0


def test_the_size_of_an_event_is_bounded_by_its_completion() -> None:
    tops = {f"token_id:{150_000 + index}": -12.3456789012 for index in range(20)}
    choice = {
        "prompt_token_ids": list(range(100_000, 160_000)), "token_ids": [150_000] * 900, "text": "\\u2028" * 900,
        "logprobs": {
            "token_logprobs": [-12.3456789012] * 900, "top_logprobs": [tops] * 900, "tokens": ["token_id:150000"] * 900,
            "text_offset": [100_000] * 900,
        },
    }  # fmt: skip
    assert len(event(**choice)) < max_event_bytes(60_000, 900, 20)
    assert max_event_bytes(100, 100, 0) < 1 << 17  # parsed JSON takes many times its size


LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
NAMES = st.sampled_from(["choices", "token_ids", "usage", "logprobs"])


@given(st.recursive(LEAVES, lambda each: st.lists(each) | st.dictionaries(NAMES, each)))
def test_any_json_is_parsed_or_breaks_the_stream(value: object) -> None:
    try:
        read_event(b"data: " + json.dumps(value).encode(), True)
    except BrokenStream:
        return


@pytest.mark.parametrize(
    ("status", "kind"),
    [(429, Overloaded), (503, Overloaded), (404, Unavailable), (400, InvalidInput), (500, Unavailable)],
)
def test_refusals_are_typed_and_bounded(status: int, kind: type) -> None:
    error = refusal(status, json.dumps({"error": {"message": "m" * 10_000}}).encode(), "vllm-0")
    assert type(error) is kind
    assert "vllm-0" in error.message
    assert len(error.message) < 700
    assert "no reason" in refusal(status, b"<html>", "vllm-0").message


def test_a_refusal_is_one_printable_line() -> None:
    error = refusal(400, b'{"error": {"message": "half \\ud800 and\\nanother line"}}', "vllm-0")
    assert "half ? and?another line" in to_status(error).message


def test_a_prefill_without_transfer_parameters_is_an_error() -> None:
    assert transfer_params({"kv_transfer_params": {"a": 1}}) == {"a": 1}
    for answer in ([], {}, {"kv_transfer_params": None}):
        with pytest.raises(BrokenStream, match="configure its KV connector"):
            transfer_params(answer)


SCRAPE = """# HELP vllm:num_requests_running x
process_start_time_seconds 1.5e+09
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
vllm:num_requests_running{engine="1",model_name="tiny"} 1.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:prefix_cache_queries_total{engine="0"} 640.0
vllm:prefix_cache_hits_total{engine="0"} 320.0
vllm:request_prefill_time_seconds_count{engine="0"} %d
vllm:request_prefill_time_seconds_sum{engine="0"} %g
vllm:request_prefill_kv_computed_tokens_sum{engine="0"} %d
vllm:iteration_tokens_total_count{engine="0"} %d
vllm:inter_token_latency_seconds_count{engine="0"} %d
vllm:inter_token_latency_seconds_sum{engine="0"} %g
vllm:cache_config_info{_block_size_resolved="True",block_size="32",num_gpu_blocks="100",num_cpu_blocks="None"} 1.0
"""


def test_metrics_become_a_load_report() -> None:
    reader = LoadReader()
    reader.load(read_metrics(SCRAPE % (1, 1, 100, 10, 10, 1)), 0, 0)
    load = reader.load(read_metrics(SCRAPE % (3, 2, 300, 30, 50, 3)), queued_tokens=70, num_open=5)
    assert (load.num_running, load.num_waiting, load.total_pages, load.free_pages) == (3, 4, 100, 75)
    assert (load.queued_prefill_tokens, load.num_open) == (70, 5)
    assert (load.cache.queries, load.cache.device_hits) == (20, 10)
    assert load.prefill_steps == StepTotals(2, 200, 0.0, 1.0)
    assert load.decode_steps == StepTotals(20, 40, 0.0, 1.0)  # 20 steps of 50 ms
    assert math.isclose(load.step_s, 0.05)
    again = reader.load(read_metrics(SCRAPE % (0, 0, 0, 0, 0, 0)), 0, 0)  # a counter that fell
    assert again.decode_steps == load.decode_steps


@pytest.mark.parametrize("value", ["e", "1-1", "1e308", "+Inf", "NaN", "-5"])
def test_implausible_values_are_ignored(value: str) -> None:
    names = ("num_requests_running", "kv_cache_usage_perc", "prefix_cache_hits_total", "iteration_tokens_total_count")
    text = "".join(f"vllm:{name} {value}\n" for name in names for _ in range(2))
    text += 'vllm:num_requests_waiting 3\nvllm:cache_config_info{num_gpu_blocks="4000000000"} 1\n'
    reader = LoadReader()
    reader.load(read_metrics("vllm:num_requests_waiting 0\n"), 0, 0)
    assert reader.load(read_metrics(text), 0, 0).num_waiting == 3


def test_long_labels_are_read_in_linear_time() -> None:
    text = "vllm:cache_config_info{" + "a" * 1_000_000 + '="1",block_size="8"} 1\n'
    assert read_metrics(text).block_size == 8  # two hours, if each letter started a label


@given(st.text(max_size=300))
def test_any_text_is_parsed_as_metrics(text: str) -> None:
    lines = f'vllm:num_requests_running{text}\nvllm:cache_config_info{{block_size="{text}"}} 1.0\n{text} NaN\n'
    load = LoadReader().load(read_metrics(lines), 0, 0)
    assert load.free_pages <= load.total_pages
