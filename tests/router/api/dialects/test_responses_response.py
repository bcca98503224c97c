"""Tests a response of the Responses API made from parsed outputs: items and events; streams equal whole responses."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from penstock.config import StoreConfig
from penstock.config.limits import LimitsConfig
from penstock.errors import Cancelled, InvalidInput, Overloaded, Unavailable
from penstock.types import FinishReason
from router.api.translation.responses.requests import read_response_call
from router.api.translation.responses.responses import ResponsesResponse
from router.api.translation.responses.store import ResponseNotFound, ResponseStore
from router.api.translation.sealed import unseal
from tests.router.api.dialects.deltas import WRITTEN, Written, deltas_of, events_of, merged, stream_of, whole_of

TEXT = Written("text", ("Hel", "lo"))
REASONING = Written("reasoning", ("Let me ", "see."))
CALL = Written("call", ('{"city":', '"Rome"}'), "look_up")
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(name="store")
def _store():
    return new_store()


def new_store(**settings):
    return ResponseStore(StoreConfig.model_validate(settings), lambda: 0.0)


def response(kept=None, /, **body):
    kept = kept or new_store()
    raw = json.dumps({"input": "Hi", **body}).encode()
    return ResponsesResponse(read_response_call(raw, LimitsConfig(), "a", kept), "penstock-tiny", kept)


def accumulated(events):
    """Returns the last response in the events, each of which OpenAI's own client checks."""
    state = ResponseStreamState(input_tools=omit, text_format=omit)
    for number, event in enumerate(events):
        assert (event.data["type"], event.data["sequence_number"]) == (event.name, number)
        state.handle_event(EVENT.validate_python(event.data))
    return events[-1].data["response"]


def comparable(item):
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def items_of(whole):
    return [comparable(item) for item in whole["output"]]


def test_each_run_is_an_item():
    whole = whole_of(response(), deltas_of(events_of([REASONING, TEXT, CALL])))
    reasoning, message, call = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert message["content"][0]["text"] == "Hello"
    assert (call["name"], call["arguments"], call["status"]) == ("look_up", '{"city":"Rome"}', "completed")
    assert call["call_id"].startswith("call_")
    assert (whole["status"], whole["error"], whole["incomplete_details"]) == ("completed", None, None)


@given(st.lists(WRITTEN, max_size=5), st.lists(st.integers(0, 3), max_size=8))
def test_a_stream_equals_the_whole_response_however_it_is_split(run, sizes):
    events = events_of(merged(run))
    whole = whole_of(response(), deltas_of(events))
    streamed = accumulated(stream_of(response(), deltas_of(events, sizes)))
    assert items_of(streamed) == items_of(whole)
    assert streamed["status"] == whole["status"]


@given(st.lists(WRITTEN, max_size=5), st.lists(st.integers(0, 3), max_size=8))
def test_deltas_add_up_to_the_done_events_and_items(run, sizes):
    texts, items = {}, {}
    for event in stream_of(response(), deltas_of(events_of(run), sizes)):
        data = event.data
        if event.name.endswith(".delta"):
            texts[data["item_id"]] = texts.get(data["item_id"], "") + data["delta"]
        elif event.name in ("response.output_text.done", "response.reasoning_text.done"):
            assert texts[data["item_id"]] == data["text"]
        elif event.name == "response.function_call_arguments.done":
            assert texts.get(data["item_id"], "") == data["arguments"]
        elif event.name == "response.output_item.added":
            assert data["output_index"] == len(items)
            items[data["item"]["id"]] = None
        elif event.name == "response.output_item.done":
            items[data["item"]["id"]] = data["item"]
        elif event.name == "response.completed":
            assert data["response"]["output"] == list(items.values())


def test_a_stream_begins_and_ends_with_the_response():
    events = stream_of(response(), deltas_of(events_of([TEXT]), [1]))
    assert [event.name for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[0].data["response"]["status"] == "in_progress"
    usage = events[-1].data["response"]["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 32
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (40, 2, 42)


def test_a_truncated_output_is_incomplete(store):
    cut = Written("call", ('{"city": "Rom',), "look_up")
    deltas = deltas_of(events_of([TEXT, cut], cut=True), reason=FinishReason.LENGTH)
    whole = whole_of(response(store), deltas)
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in whole["output"]] == ["completed", "incomplete"]
    assert accumulated(stream_of(response(), deltas))["status"] == "incomplete"
    conversation = store.conversation("a", whole["id"], 10, 10_000)
    assert [message.get("tool_calls") for message in conversation] == [None, None]  # no tool can answer it


def test_a_response_is_stored_with_its_conversation(store):
    whole = whole_of(response(store, instructions="Be brief."), deltas_of(events_of([REASONING, TEXT, CALL])))
    assert json.loads(store.get("a", whole["id"]).response) == whole
    items = [json.loads(text) for _, text in store.get("a", whole["id"]).given.items]
    assert items[0]["content"] == [{"type": "input_text", "text": "Hi"}]
    user, assistant = store.conversation("a", whole["id"], 10, 10_000)
    assert user == {"role": "user", "content": "Hi"}
    assert (assistant["content"], assistant["reasoning_content"]) == ("Hello", "Let me see.")
    assert assistant["tool_calls"][0]["id"] == whole["output"][2]["call_id"]


def test_a_response_is_not_stored_if_its_call_says_so(store):
    whole = whole_of(response(store, store=False), deltas_of(events_of([TEXT])))
    assert whole["store"] is False
    with pytest.raises(ResponseNotFound):
        store.get("a", whole["id"])


def test_a_response_too_large_to_store_says_so():
    long = Written("text", ("a" * 4000,))
    whole = whole_of(response(new_store(tenant_bytes=4000)), deltas_of(events_of([long])))
    assert whole["store"] is False


def test_sealed_reasoning_is_added_on_request():
    body = {"include": ["reasoning.encrypted_content"], "store": False}
    whole = whole_of(response(**body), deltas_of(events_of([REASONING, TEXT])))
    assert unseal(whole["output"][0]["encrypted_content"]) == "Let me see."
    assert "encrypted_content" not in whole_of(response(), deltas_of(events_of([REASONING])))["output"][0]


def test_reasoning_tokens_are_counted():
    whole = whole_of(response(), deltas_of(events_of([REASONING, TEXT]), [1, 1, 1]))
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Unavailable("no worker"), "server_error"),
        (Overloaded("busy"), "rate_limit_exceeded"),
        (InvalidInput("prompt", "is bad"), "invalid_prompt"),
    ],
)
def test_a_failure_ends_the_response_and_is_stored(store, error, code):
    failing = response(store)
    failing.events(deltas_of(events_of([TEXT]), [1])[0], None)
    failed, event = failing.failure(error)
    assert (failed.name, event.name) == ("response.failed", "error")
    EVENT.validate_python(failed.data)
    EVENT.validate_python(event.data)
    assert (failed.data["response"]["status"], failed.data["response"]["error"]["code"]) == ("failed", code)
    assert failed.data["response"]["output"][0]["status"] == "incomplete"
    assert json.loads(store.get("a", failing.id).response)["status"] == "failed"


def test_a_cancelled_response_is_marked_cancelled(store):
    cancelled = response(store)
    (event,) = cancelled.failure(Cancelled("another call"))
    assert (event.name, event.data["response"]["status"]) == ("response.incomplete", "cancelled")
    assert json.loads(store.get("a", cancelled.id).response)["status"] == "cancelled"
