"""Tests how Anthropic's bodies become chats: blocks, tools, thinking, marks that change no token, and bad input."""

from __future__ import annotations

import json

import pytest

from penstock.config.limits import LimitsConfig
from penstock.errors import InvalidInput
from router.api.translation.anthropic.requests import _chat_fields, read_count_call, read_message_call
from router.api.translation.objects import JsonObject
from router.api.translation.sealed import seal

USER = {"role": "user", "content": "Hi"}
TOOL = {"name": "look_up", "description": "Looks up.", "input_schema": {"type": "object", "properties": {}}}


def fields(**body):
    """Returns the fields of the chat."""
    return _chat_fields(JsonObject({"messages": [USER], **body}), LimitsConfig())[0]


def messages(*given, **body):
    return fields(messages=list(given), **body)["messages"]


def read(**body):
    raw = json.dumps({"model": "m", "max_tokens": 9, "messages": [USER], **body}).encode()
    return read_message_call(raw, LimitsConfig())


def text(value, **more):
    return {"type": "text", "text": value, **more}


def test_a_conversation_with_tools_becomes_a_chat():
    found = messages(
        {"role": "user", "content": [text("Weather?"), text("In Rome.")]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                text("I look."),
                {"type": "tool_use", "id": "toolu_1", "name": "look_up", "input": {"city": "Röm", "b": 1}},
                {"type": "tool_use", "id": "toolu_2", "name": "look_up", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("sun"), text("25")]},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "gone", "is_error": True},
                text("And?"),
            ],
        },
        system="Be brief.",
    )
    calls = [
        {"id": "toolu_1", "type": "function", "function": {"name": "look_up", "arguments": '{"city":"Röm","b":1}'}},
        {"id": "toolu_2", "type": "function", "function": {"name": "look_up", "arguments": "{}"}},
    ]
    assert found == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?\nIn Rome."},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "sun\n25"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: gone"},
        {"role": "user", "content": "And?"},
    ]


def test_adjacent_turns_of_a_role_are_joined():
    found = messages(USER, {"role": "user", "content": "there"}, {"role": "system", "content": "Now."}, USER)
    assert found == [
        {"role": "user", "content": "Hi\nthere"},
        {"role": "system", "content": "Now."},
        {"role": "user", "content": "Hi"},
    ]


def test_cache_marks_and_header_lines_change_no_message():
    marked = fields(
        system=[
            text("x-anthropic-billing-header: cc_version=2.1.100.7b4; cch=eb6c6;"),
            text("You are an agent.", cache_control={"type": "ephemeral"}),
        ],
        messages=[{"role": "user", "content": [text("Hi", cache_control={"type": "ephemeral", "ttl": "1h"})]}],
        tools=[{**TOOL, "cache_control": {"type": "ephemeral"}}],
        cache_control={"type": "ephemeral"},
    )
    joined = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cch=0aaa9;\nYou are an agent."
    assert marked == fields(system=joined, tools=[TOOL]) == fields(system="You are an agent.", tools=[TOOL])


def test_a_header_line_elsewhere_is_text():
    line = "Explain x-anthropic-billing-header: a=b"
    assert messages(USER, system=line)[0]["content"] == line
    assert messages({"role": "user", "content": "x-anthropic-billing-header: a"})[0]["content"].startswith("x-")


def test_a_system_prompt_of_header_lines_is_empty():
    assert messages(USER, system=[text("x-anthropic-billing-header: a")]) == [USER]


def test_sealed_thinking_is_taken_from_its_signature():
    block = {"type": "thinking", "thinking": "", "signature": seal("Hm.")}
    found = messages(USER, {"role": "assistant", "content": [block, text("Yes")]}, USER)
    assert found[1]["reasoning_content"] == "Hm."


def test_a_last_message_of_the_assistant_is_continued():
    found = fields(messages=[USER, {"role": "assistant", "content": "The best is ("}])
    assert (found["continue_final_message"], found["add_generation_prompt"]) == (True, False)
    assert "continue_final_message" not in fields()


def test_options_and_tools_are_translated():
    found = fields(
        model="m",
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        stream=True,
        stop_sequences=["END"],
        metadata={"user_id": "user_1_session_2"},
        service_tier="standard_only",
        tools=[{**TOOL, "type": "custom", "strict": True}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    function = {"name": "look_up", "description": "Looks up.", "parameters": TOOL["input_schema"], "strict": True}
    del found["messages"]
    assert found == {
        "model": "m",
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "stream": True,
        "stop": ["END"],
        "user": "user_1_session_2",
        "service_tier": "default",
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "look_up"}, {"type": "function", "function": {"name": "look_up"}}),
    ],
)
def test_tool_choices_are_translated(choice, chosen):
    assert fields(tools=[TOOL], tool_choice=choice)["tool_choice"] == chosen


@pytest.mark.parametrize(
    ("body", "effort", "arguments"),
    [
        ({}, None, None),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "none", None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, None, {"enable_thinking": True}),
        ({"thinking": {"type": "adaptive"}}, None, None),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "low", None),
        ({"output_config": {"effort": "max"}}, "max", None),
    ],
)
def test_thinking_settings_are_translated(body, effort, arguments):
    found = fields(**body)
    assert (found.get("reasoning_effort"), found.get("chat_template_kwargs")) == (effort, arguments)


def test_an_output_schema_becomes_a_grammar():
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    found = fields(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert found["response_format"]["json_schema"] == {"name": "output", "schema": schema, "strict": True}


def test_the_bodys_limit_may_exceed_the_context():
    body = read(max_tokens=32_000)
    assert body.default_max_tokens == 32_000
    assert not body.requests("a")[0].sampling.HasField("max_tokens")
    counted = read_count_call(json.dumps({"messages": [USER], "tools": [TOOL]}).encode(), LimitsConfig())
    assert (counted.messages[0].content, counted.chat.tools[0].name) == ("Hi", "look_up")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": None}, "max_tokens: is missing; add it"),
        ({"max_tokens": 0}, "max_tokens: is 0; give 1 or more"),
        ({"max_tokens": True}, "max_tokens: is True; give an integer"),
        ({"messages": []}, "messages: is empty or missing"),
        ({"messages": "Hi"}, "messages: is 'Hi'; give a list"),
        ({"messages": ["Hi"]}, r"messages\[0\]: is 'Hi'; give an object"),
        ({"messages": [{"role": "tool", "content": "a"}]}, r"messages\[0\].role: is 'tool'; give one of user, assist"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content: is missing"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content: is 3; give text or a list of blocks"),
        ({"messages": [{"role": "user", "content": "a", "id": 1}]}, r"messages\[0\].id: is not a field"),
        (
            {"messages": [{"role": "user", "content": [text("a"), {"type": "image", "source": {}}]}]},
            r"messages\[0\].content\[1\].type = 'image' is not supported in a user message",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            r"messages\[0\].content\[0\].type = 'document' is not supported",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "a"}]}]},
            r"messages\[1\].content\[0\].type = 'redacted_thinking' is not supported",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b"}]}]},
            "messages: end with a tool_use",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\].type = 'web_search_2025"),
        ({"tools": [{"name": "a"}]}, r"tools\[0\].input_schema: is missing"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, r"tools\[0\].defer_loading = true is not supported"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type: is 'some'; give one of"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type: is 'between_tools'; give one of"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences: has 17 strings"),
        ({"container": "c"}, 'container = "c" is not supported; leave it out'),
        ({"mirostat": 1}, "mirostat: is not a field of this API"),
        ({"system": [{"type": "image"}]}, r"system\[0\].type = 'image' is not supported; send text"),
    ],
)
def test_bad_bodies_are_refused_by_field(body, message):
    with pytest.raises(InvalidInput, match=f"^{message}"):
        read(**body)
