"""Tests how bodies of the Responses API become chats: items, tools, formats, earlier responses, and bad input."""

from __future__ import annotations

import json

import pytest

from penstock.config import StoreConfig
from penstock.config.limits import LimitsConfig
from penstock.errors import InvalidInput
from router.api.translation.responses import requests
from router.api.translation.responses.requests import read_response_call
from router.api.translation.responses.store import CallInput, ResponseNotFound, ResponseStore
from router.api.translation.sealed import seal

FUNCTION = {"type": "function", "name": "look_up", "parameters": {"type": "object", "properties": {}}, "strict": True}


@pytest.fixture(name="store")
def _store():
    return ResponseStore(StoreConfig(), lambda: 0.0)


@pytest.fixture(name="chat", autouse=True)
def _chat(monkeypatch):
    """Returns the fields from which the chat's own body is read."""
    seen = {}

    def validate(kind, fields, limits):
        seen.update(fields)
        return kind.model_validate({"messages": [{"role": "user", "content": "Hi"}]})

    monkeypatch.setattr(requests, "validate_body", validate)
    return seen


def read(kept, /, tenant="a", **body):
    return read_response_call(json.dumps({"input": "Hi", **body}).encode(), LimitsConfig(), tenant, kept)


def test_text_and_instructions_become_messages(store, chat):
    body = read(store, instructions="Be brief.", model="m", max_output_tokens=7, temperature=0.5, stream=True)
    assert chat == {
        "model": "m",
        "stream": True,
        "temperature": 0.5,
        "max_completion_tokens": 7,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    }
    assert body.given.messages == [{"role": "user", "content": "Hi"}]
    assert (body.echo["instructions"], body.echo["max_output_tokens"], body.stores) == ("Be brief.", 7, True)


def test_items_of_an_agents_turn_become_messages(store, chat):
    given = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "call_id": "call_1", "name": "look_up", "arguments": "{}", "status": "completed"},
        {"type": "function_call", "call_id": "call_2", "name": "look_up", "arguments": '{"a":1}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "sun"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "rain"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": seal("So.")},
        {"role": "assistant", "content": "Both."},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    body = read(store, input=given)
    calls = [
        {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}},
        {"id": "call_2", "type": "function", "function": {"name": "look_up", "arguments": '{"a":1}'}},
    ]
    assert chat["messages"] == [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
        {"role": "tool", "tool_call_id": "call_2", "content": "rain"},
        {"role": "assistant", "content": "Both.", "reasoning_content": "So."},
        {"role": "user", "content": "And?"},
    ]
    listed = [json.loads(text) for _, text in body.given.items]
    assert [item["type"] for item in listed] == [item.get("type", "message") for item in given]
    assert all(item["id"] for item in listed)
    assert listed[0]["content"] == [{"type": "input_text", "text": "Be brief."}]
    assert listed[9]["content"] == [{"type": "output_text", "text": "Both."}]


def test_an_earlier_response_is_continued_without_its_instructions(store, chat):
    earlier = CallInput([], [{"role": "user", "content": "one"}])
    store.put("a", {"id": "resp_1"}, earlier, [{"role": "assistant", "content": "two"}], None)
    body = read(store, input="three", instructions="New.", previous_response_id="resp_1")
    assert [message["content"] for message in chat["messages"]] == ["New.", "one", "two", "three"]
    assert body.given.messages == [{"role": "user", "content": "three"}]
    assert body.previous_id == "resp_1"
    with pytest.raises(ResponseNotFound, match="previous_response_id: 'resp_1' is not in the store"):
        read(store, tenant="b", previous_response_id="resp_1")


def test_tools_and_tool_choice_are_translated(store, chat):
    body = read(store, tools=[FUNCTION], tool_choice={"type": "function", "name": "look_up"}, parallel_tool_calls=False)
    function = {name: value for name, value in FUNCTION.items() if name != "type"}
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "look_up"}}
    assert chat["parallel_tool_calls"] is False
    assert body.echo["tools"] == [FUNCTION]
    read(store, tools=[FUNCTION], tool_choice="required")
    assert chat["tool_choice"] == "required"


def test_formats_and_effort_are_translated(store, chat):
    form = {"type": "json_schema", "name": "answer", "schema": {"type": "object"}, "strict": True}
    body = read(store, text={"format": form}, reasoning={"effort": "low", "summary": "auto"})
    schema = {"name": "answer", "schema": {"type": "object"}, "strict": True}
    assert chat["response_format"] == {"type": "json_schema", "json_schema": schema}
    assert chat["reasoning_effort"] == "low"
    assert body.echo["text"] == {"format": form}
    read(store, text={"format": {"type": "json_object"}})
    assert chat["response_format"] == {"type": "json_object"}
    chat.clear()
    read(store, text={"format": {"type": "text"}})
    assert "response_format" not in chat


def test_harmless_options_are_accepted(store):
    body = read(
        store,
        truncation="disabled",
        metadata={"a": "b"},
        include=["reasoning.encrypted_content", "file_search_call.results"],
        stream_options={"include_obfuscation": False},
        background=False,
        store=False,
    )
    assert (body.echo["metadata"], body.seals_reasoning, body.stores) == ({"a": "b"}, True, False)


def test_too_large_a_response_is_refused_only_if_it_would_be_stored():
    store = ResponseStore(StoreConfig(tenant_bytes=1500), lambda: 0.0)
    assert not read(store, input="a" * 1000).stores
    with pytest.raises(InvalidInput, match="store = true, but the input is too large"):
        read(store, input="a" * 1000, store=True)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": None}, "input: is None; give text or a list of items"),
        ({"input": ""}, "input: is empty"),
        ({"input": []}, "input: is empty"),
        ({"input": ["a"]}, r"input\[0\]: is 'a'; give an object"),
        ({"input": [{"content": "a"}]}, r"input\[0\].role: is missing"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         r"input\[0\].content\[0\].type = 'input_image' is not supported"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, r"input\[0\].type = 'item_reference' is not supported"),
        ({"input": [{"type": "computer_call", "id": "a"}]}, r"input\[0\].type = 'computer_call' is not supported"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}]},
         r"input\[0\].encrypted_content: was not made by this service"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, r"input\[0\].output: is missing"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type = 'web_search' is not supported"),
        ({"tools": [{"type": "custom", "name": "a"}]}, r"tools\[0\].type = 'custom' is not supported"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type: is 'file_search'"),
        ({"tool_choice": "some"}, "tool_choice: is 'some'; give none, auto, required"),
        ({"background": True}, "background = true is not supported"),
        ({"truncation": "auto"}, 'truncation = "auto" is not supported'),
        ({"conversation": "c"}, 'conversation = "c" is not supported'),
        ({"prompt": {"id": "p"}}, "prompt = .* is not supported"),
        ({"include": ["message.output_text.logprobs"]}, "include: has 'message.output_text.logprobs'"),
        ({"text": {"verbosity": "low"}}, 'text.verbosity = "low" is not supported'),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema: is missing"),
        ({"max_output_tokens": 0}, "max_output_tokens: is 0; give 1 or more"),
        ({"metadata": 3}, "metadata: is 3; give an object"),
        ({"metadata": {"a": 3}}, "metadata.a: is 3; keys may have"),
        ({"metadata": {str(number): "a" for number in range(17)}}, "metadata: has 17 pairs; give 16 or fewer"),
        ({"mirostat": 1}, "mirostat: is not a field of this API"),
    ],
)  # fmt: skip
def test_bad_bodies_are_refused_by_field(store, body, message):
    with pytest.raises(InvalidInput, match=f"^{message}"):
        read(store, **body)
