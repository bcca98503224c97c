"""Tests Anthropic's message made from parsed outputs: blocks, stop reasons, usage; streams equal whole messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InternalError, InvalidInput, Overloaded, Unavailable
from penstock.types import FinishReason
from router.api.openai.requests import ChatBody
from router.api.translation.anthropic.errors import anthropic_error
from router.api.translation.anthropic.requests import MessagesBody
from router.api.translation.anthropic.responses import MessagesResponse
from router.api.translation.sealed import seal, unseal
from router.parsers.events import TextDelta
from tests.router.api.dialects.deltas import WRITTEN, Written, deltas_of, events_of, merged, stream_of, whole_of

TEXT = Written("text", ("Hel", "lo"))
THINKING = Written("reasoning", ("Let me ", "see."))
CALL = Written("call", ('{"city":', '"Rome"}'), "look_up")


def response(max_tokens: int = 100, omits_thinking: bool = False) -> MessagesResponse:
    chat = ChatBody.model_validate({"messages": [{"role": "user", "content": "Hi"}]})
    return MessagesResponse(MessagesBody(chat, max_tokens, omits_thinking), "penstock-tiny")


def accumulated(events):
    """Returns the message that Anthropic's own client builds from the events."""
    from anthropic.lib.streaming._messages import accumulate_event  # takes three seconds, which collection should not

    message, buffers = None, {}
    for event in events:
        assert event.data["type"] == event.name
        if event.name != "ping":
            message = accumulate_event(event=event.data, current_snapshot=message, json_bufs=buffers)
    return message.to_dict()


def without_ids(message):
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {**message, "content": blocks, "id": ""}


def test_each_run_is_a_block():
    whole = whole_of(response(), deltas_of(events_of([THINKING, TEXT, CALL, CALL])))
    kinds = [block["type"] for block in whole["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["content"][0] == {"type": "thinking", "thinking": "Let me see.", "signature": "penstock"}
    assert whole["content"][1] == {"type": "text", "text": "Hello"}
    first, second = whole["content"][2:]
    assert first["input"] == {"city": "Rome"}
    assert first["id"].startswith("toolu_")
    assert first["id"] != second["id"]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)


@given(st.lists(WRITTEN, max_size=5), st.lists(st.integers(0, 3), max_size=8), st.booleans())
def test_a_stream_equals_the_whole_message_however_it_is_split(run, sizes, omits_thinking):
    events = events_of(merged(run))
    whole = whole_of(response(omits_thinking=omits_thinking), deltas_of(events))
    streamed = accumulated(stream_of(response(omits_thinking=omits_thinking), deltas_of(events, sizes)))
    for message in (whole, streamed):
        del message["usage"]  # there are as many tokens as deltas
        message.pop("stop_details", None)  # the client adds these itself
    assert without_ids(streamed) == without_ids(whole)


@given(st.lists(WRITTEN, max_size=5), st.lists(st.integers(0, 3), max_size=8))
def test_blocks_are_numbered_opened_and_closed_in_order(run, sizes):
    opened, count = None, 0
    for event in stream_of(response(), deltas_of(events_of(run), sizes)):
        if event.name == "content_block_start":
            assert (opened, event.data["index"]) == (None, count)
            opened, count = count, count + 1
        elif event.name.startswith("content_block"):
            assert event.data["index"] == opened
            opened = None if event.name == "content_block_stop" else opened
    assert opened is None


def test_a_stream_begins_with_a_start_and_a_ping_and_ends_with_usage():
    events = stream_of(response(), deltas_of(events_of([TEXT]), [1]))
    assert [event.name for event in events[:3]] == ["message_start", "ping", "content_block_start"]
    assert [event.name for event in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    usage = events[-2].data["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (8, 32, 2)


@pytest.mark.parametrize(
    ("reason", "max_tokens", "last", "stop"),
    [
        (FinishReason.STOP, 100, {}, ("end_turn", None)),
        (FinishReason.STOP, 100, {"stop_string": "END"}, ("stop_sequence", "END")),
        (FinishReason.LENGTH, 1, {}, ("max_tokens", None)),
        (FinishReason.LENGTH, 100, {}, ("model_context_window_exceeded", None)),
        (FinishReason.LENGTH, 100, {"granted_tokens": 1}, ("max_tokens", None)),
    ],
)
def test_stop_reasons(reason, max_tokens, last, stop):
    whole = whole_of(response(max_tokens), deltas_of([TextDelta("a")], reason=reason, **last))
    assert (whole["stop_reason"], whole["stop_sequence"]) == stop


def test_a_truncated_call_has_the_arguments_so_far():
    cut = Written("call", ('{"city": "Rom',), "look_up")
    whole = whole_of(response(1), deltas_of(events_of([cut], cut=True), reason=FinishReason.LENGTH))
    assert whole["content"][0]["input"] == {"city": "Rom"}
    assert whole["stop_reason"] == "max_tokens"


def test_omitted_thinking_travels_in_its_signature():
    whole = whole_of(response(omits_thinking=True), deltas_of(events_of([THINKING, TEXT])))
    assert whole["content"][0]["thinking"] == ""
    assert unseal(whole["content"][0]["signature"]) == "Let me see."


@given(st.text())
def test_sealed_thinking_can_be_unsealed(text):
    assert unseal(seal(text)) == text
    assert unseal(text) is None or text.startswith("penstock.")


def test_foreign_signatures_are_not_unsealed():
    assert unseal("penstock.r1.%%%") is None
    assert unseal("EqoBCkYIChgCKkCw") is None


def test_thinking_tokens_are_counted():
    deltas = deltas_of(events_of([THINKING, TEXT]), [1, 1, 1])
    usage = whole_of(response(), deltas)["usage"]
    assert usage["output_tokens_details"] == {"thinking_tokens": 2}


def test_a_failure_is_an_error_event():
    (event,) = response().failure(Unavailable("no worker"))
    assert event.name == "error"
    assert event.data == {"type": "error", "error": {"type": "overloaded_error", "message": "no worker"}}


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidInput("stop", "is 3"), 400, "invalid_request_error"),
        (Overloaded("busy"), 429, "rate_limit_error"),
        (Unavailable("away"), 529, "overloaded_error"),
        (InternalError("oh"), 500, "api_error"),
    ],
)
def test_errors_have_anthropics_types_and_statuses(error, status, kind):
    given_status, body = anthropic_error(error)
    assert (given_status, body["type"], body["error"]["type"]) == (status, "error", kind)


def test_errors_use_anthropics_field_names():
    assert anthropic_error(InvalidInput("sampling.stop", "is 3"))[1]["error"]["message"] == "stop_sequences: is 3"
