"""Tests that a value of the wrong kind, however deep in a body, is a 400 with field, value and fix, in each API's own
error format."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.router.router_fakes import FakeWorker, running_router

Fields = dict[str, Any]
Table = list[tuple[Fields, str]]  # fields beside those of a plain body, and how the error begins

USER = {"role": "user", "content": "a"}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
MESSAGES_TOOL = {"name": "f", "input_schema": {}}
RESPONSES_TOOL = {"type": "function", **FUNCTION}


def offered(**function: object) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}]}


def said(*messages: object) -> dict[str, Any]:
    return {"messages": [USER, *messages]}


def formatted(**schema: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", **schema}}


def chosen(tool_choice: object) -> dict[str, Any]:
    return {"tools": [TOOL], "tool_choice": tool_choice}


CHAT: Table = [
    ({"tools": {}}, "tools: is {}; give a list"),
    ({"tools": [1]}, "tools[0]: is 1; give an object"),
    ({"tools": [{"type": "function"}]}, "tools[0].function: is missing; add it"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name: repeats 'f'; give each tool a different name"),
    (offered(parameters="x"), "tools[0].function.parameters: is 'x'; give an object"),
    (offered(parameters=[]), "tools[0].function.parameters: is []; give an object"),
    (offered(description=1), "tools[0].function.description: is 1; give text"),
    (offered(name="a b"), "tools[0].function.name: is 'a b'; give 1 to 128 letters, digits, _ and -"),
    (chosen("g"), "tool_choice: is 'g'; give auto, none, required or a function"),
    (chosen(1), "tool_choice: is 1; give text or an object"),
    (chosen({"type": "function", "function": {"name": "g"}}), "tool_choice: names 'g', which is not among the tools"),
    ({"tool_choice": "required"}, "tool_choice: is 'required', but there are no tools; add tools"),
    ({"messages": "x"}, "messages: is 'x'; give a list"),
    ({"messages": []}, "messages: is empty; give at least one message"),
    (said({"role": "user", "content": 1}), "messages[1].content: is 1; give text or a list of parts"),
    (said({"role": "user"}), "messages[1].content: is missing; give text or a list of parts"),
    (said({"role": "user", "content": [1]}), "messages[1].content[0]: is 1; give an object"),
    (
        said({"role": "user", "content": [{"type": "text"}]}),
        "messages[1].content[0].text: is missing; add it",
    ),
    (
        said({"role": "user", "content": [{"type": "text", "text": 1}]}),
        "messages[1].content[0].text: is 1; give text",
    ),
    (
        said({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}),
        "messages[1].tool_calls[0].function.arguments: is {}; give text",
    ),
    ({"response_format": "json"}, "response_format: is 'json'; give an object"),
    ({"response_format": {}}, "response_format.type: is None; give text, json_object, json_schema"),
    (formatted(), "response_format.json_schema: is None; give an object with a schema"),
    (formatted(json_schema={"name": "a"}), "response_format.json_schema.schema: is missing; add it"),
    (formatted(json_schema={"schema": 1}), "response_format.json_schema.schema: is 1; a JSON schema is an object"),
    (formatted(json_schema={"schema": {"type": "x"}}), "response_format.json_schema.schema: cannot be enforced"),
    ({"stop": ["a"] * 17}, "stop: has 17 strings; give 16 or fewer"),
    ({"stop": 1}, "stop: is 1; give a string or a list of strings"),
    ({"stop": ""}, "stop: has a string of 0 characters; give 1 to 256"),
    ({"n": 0}, "n: is 0; give a value from 1 to 128"),
    ({"n": -1}, "n: is -1; give 1 or more"),
    ({"n": 1.5}, "n: is 1.5; give an integer"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs: is -1; give a value from 0 to 20"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: is 21; give a value from 0 to 20"),
    ({"top_logprobs": 3}, "top_logprobs: is 3 without logprobs; set logprobs to true"),
    ({"temperature": "hot"}, "temperature: is 'hot'; give a number"),
    ({"temperature": -1}, "temperature: is -1; give a value from 0 to 100"),
    ({"max_completion_tokens": 1 << 40}, f"max_completion_tokens: is {1 << 40}; give at most {(1 << 32) - 1}"),
    ({"max_tokens": "5"}, "max_tokens: is '5'; give an integer"),
    ({"max_completion_tokens": True}, "max_completion_tokens: is True; give an integer"),
    ({"n": "2"}, "n: is '2'; give an integer"),
    ({"seed": False}, "seed: is False; give an integer"),
    ({"logprobs": True, "top_logprobs": "2"}, "top_logprobs: is '2'; give an integer"),
    ({"priority": "1"}, "priority: is '1'; give an integer"),
    ({"temperature": "1"}, "temperature: is '1'; give a number"),
    ({"top_p": True}, "top_p: is True; give a number"),
    ({"logit_bias": {"1": "2"}}, "logit_bias[1]: is '2'; give a number"),
    ({"kv_hints": {"pin_s": "5"}}, "kv_hints.pin_s: is '5'; give a number"),
    ({"kv_hints": {"priority": True}}, "kv_hints.priority: is True; give an integer"),
    ({"nvext": {"agent_hints": {"osl": "5"}}}, "nvext.agent_hints.osl: is '5'; give an integer"),
    ({"logit_bias": {"1": "x"}}, "logit_bias[1]: is 'x'; give a number"),
    ({"stream_options": {"include_usage": "x"}}, "stream_options.include_usage: is 'x'; give true or false"),
    ({"stream": "off"}, "stream: is 'off'; give true or false"),
    ({"stream": 0}, "stream: is 0; give true or false"),
    ({"logprobs": "false"}, "logprobs: is 'false'; give true or false"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls: is 'no'; give true or false"),
    ({"ignore_eos": "off"}, "ignore_eos: is 'off'; give true or false"),
    ({"add_generation_prompt": "false"}, "add_generation_prompt: is 'false'; give true or false"),
    (offered(strict="false"), "tools[0].function.strict: is 'false'; give true or false"),
    ({"kv_hints": {"only": "false"}}, "kv_hints.only: is 'false'; give true or false"),
    ({"reasoning_effort": "huge"}, "reasoning_effort: is 'huge'; give one of none, minimal"),
]
COMPLETIONS: Table = [
    ({"echo": "off"}, "echo: is 'off'; give true or false"),
    ({"return_token_ids": "false"}, "return_token_ids: is 'false'; give true or false"),
    ({"logprobs": True}, "logprobs: is True; give an integer"),
    ({"truncate_prompt_tokens": "5"}, "truncate_prompt_tokens: is '5'; give an integer"),
    ({"logprobs": -1}, "logprobs: is -1; give 0 or more"),
    ({"logprobs": 21}, "logprobs: is 21; give a value from 0 to 20"),
    ({"prompt": {}}, "prompt: is {}; give text, token ids, or a list of either"),
    ({"prompt": [1, "a"]}, "prompt[1]: is 'a'; give an integer"),
    ({"prompt": [1, "2"]}, "prompt[1]: is '2'; give an integer"),
    ({"prompt": [True]}, "prompt[0]: is True; give an integer"),
    ({"prompt": [[1], [2.0]]}, "prompt[1][0]: is 2.0; give an integer"),
    ({"stop_token_ids": ["1"]}, "stop_token_ids[0]: is '1'; give an integer"),
    ({"stop_token_ids": [-1]}, "stop_token_ids: is [-1]; give 0 or more"),
    ({"bad_words": [1]}, "bad_words: is [1]; give a string or a list of strings"),
]
MESSAGES: Table = [
    ({"stream": "off"}, "stream: is 'off'; give true or false"),
    ({"max_tokens": None}, "max_tokens: is missing; add it"),
    ({"max_tokens": "5"}, "max_tokens: is '5'; give an integer"),
    ({"max_tokens": True}, "max_tokens: is True; give an integer"),
    ({"top_k": "5"}, "top_k: is '5'; give an integer"),
    ({"temperature": "1"}, "temperature: is '1'; give a number"),
    ({"max_tokens": 0}, "max_tokens: is 0; give 1 or more"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content: is 1; give text or a list of blocks"),
    ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role: is 'wizard'; give one of user, assistant"),
    ({"tools": [{"name": "f", "input_schema": 1}]}, "tools[0].input_schema: is 1; give an object"),
    ({"tools": [MESSAGES_TOOL], "tool_choice": "auto"}, "tool_choice: is 'auto'; give an object"),
    ({"tools": [MESSAGES_TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice: names 'g', which is not"),
    ({"stop_sequences": ["a"] * 17}, "stop_sequences: has 17 strings; give 16 or fewer"),
    ({"stop_sequences": [1]}, "stop_sequences: is [1]; give a string or a list of strings"),
    ({"top_k": -5}, "top_k: is -5; give 0 or more"),
    ({"thinking": {"type": "x"}}, "thinking.type: is 'x'; give one of enabled, adaptive, disabled"),
]
RESPONSES: Table = [
    ({"stream": "off"}, "stream: is 'off'; give true or false"),
    ({"store": "false"}, "store: is 'false'; give true or false"),
    ({"input": 1}, "input: is 1; give text or a list of items"),
    ({"input": [{"role": "user"}]}, "input[0].content: is missing; add it"),
    ({"tools": [{"type": "function", "name": "f", "parameters": 1}]}, "tools[0].parameters: is 1; give an object"),
    ({"tools": [RESPONSES_TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice: names 'g', which is"),
    ({"text": 1}, "text: is 1; give an object"),
    ({"text": {"format": {}}}, "text.format.type: is missing; add it"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": 1}}}, "text.format.schema: is 1; give an obj"),
    ({"max_output_tokens": "5"}, "max_output_tokens: is '5'; give an integer"),
    ({"max_output_tokens": 5.5}, "max_output_tokens: is 5.5; give an integer"),
    ({"max_output_tokens": 0}, "max_output_tokens: is 0; give 1 or more"),
    ({"reasoning": {"effort": "x"}}, "reasoning.effort: is 'x'; give one of none, minimal"),
    ({"temperature": -1}, "temperature: is -1; give a value from 0 to 100"),
]
APIS: dict[str, tuple[Fields, Table]] = {
    "/v1/chat/completions": ({"messages": [USER]}, CHAT),
    "/v1/completions": ({"prompt": "a"}, COMPLETIONS),
    "/v1/messages": ({"model": "penstock-tiny", "max_tokens": 5, "messages": [USER]}, MESSAGES),
    "/v1/responses": ({"input": "Hi"}, RESPONSES),
}


@pytest.mark.parametrize("path", APIS)
async def test_a_wrong_value_is_a_400_with_field_value_and_fix(path: str) -> None:
    plain, table = APIS[path]
    async with (
        running_router(await FakeWorker().start()) as router,
        httpx.AsyncClient(base_url=router.http_url, timeout=60) as http,
    ):
        for fields, message in table:
            answer = await http.post(path, json={**plain, **fields})
            assert answer.status_code == 400, (fields, answer.text)
            body = answer.json()
            error = body["error"]
            assert error["message"].startswith(message), (fields, error["message"])
            assert error["type"] == "invalid_request_error", fields
            if path == "/v1/messages":
                assert body["type"] == "error", fields
            else:
                assert error["param"] == message.partition(":")[0], fields


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"max_tokens": 5.0, "n": 1.0, "temperature": 1, "logit_bias": {"7": 1}}),
        ("/v1/completions", {"top_k": -1.0, "logprobs": 1.0, "kv_hints": {"priority": 1.0, "pin_s": 1}}),
        ("/v1/messages", {"max_tokens": 5.0, "top_k": 5.0, "temperature": 1}),
        ("/v1/responses", {"max_output_tokens": 5.0, "top_p": 1}),
    ],
)
async def test_numbers_without_a_fraction_are_integers(path: str, fields: Fields) -> None:
    plain, _ = APIS[path]
    async with (
        running_router(await FakeWorker().start()) as router,
        httpx.AsyncClient(base_url=router.http_url, timeout=60) as http,
    ):
        answer = await http.post(path, json={**plain, **fields})
        assert answer.status_code == 200, answer.text
