"""Tests chats with tools and reasoning over fake workers that write given texts: whole, streamed, cut by failures."""

from __future__ import annotations

import itertools
import json

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from penstock.errors import ConfigError
from penstock.v1 import common_pb2
from tests.router.api.test_grpc_service import TOKENIZER, text_tokens
from tests.support.router.router_fakes import EOS, MODEL, FakeWorker, running_router

ASSISTANT = TOKENIZER.special_tokens["<|assistant|>"]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "now"}}
HI = [{"role": "user", "content": "Hi"}]
TWO_CALLS = (
    'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris, \\"l\'été\\" {"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


def writing(text: str):
    """Returns a `next_token` that writes a text after a chat's prompt and then ends."""
    tokens = [*text_tokens(text), EOS]

    def next_token(context, sampling):
        start = len(context) - list(context)[::-1].index(ASSISTANT)
        return tokens[len(context) - start]

    return next_token


class Served:
    """Holds a router over one fake worker, and clients."""

    def __init__(self, worker, router, client, http):
        self.worker, self.router, self.client, self.http = worker, router, client, http

    async def chat(self, text, **fields):
        """Returns message and finish reason of a chat in which the model writes `text`, once whole and once
        streamed."""
        self.worker.next_token = writing(text)
        body = {"model": "penstock-tiny", "messages": HI, **fields}
        whole = (await self.client.chat.completions.create(**body)).choices[0]
        chunks = [chunk async for chunk in await self.client.chat.completions.create(**body, stream=True)]
        return plain(whole.message), whole.finish_reason, joined(chunks)


@pytest.fixture(name="served")
async def _served():
    worker = await FakeWorker().start()
    async with running_router(worker, reasoning_parser="qwen3") as router:
        async with (
            openai.AsyncOpenAI(base_url=f"{router.http_url}/v1", api_key="none", max_retries=0) as client,
            httpx.AsyncClient(base_url=router.http_url, timeout=60) as http,
        ):
            yield Served(worker, router, client, http)


def plain(message):
    fields = message.model_dump()
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in fields["tool_calls"] or ()]
    assert fields.get("reasoning") == fields.get("reasoning_content")
    return fields["content"] or "", fields.get("reasoning") or "", calls


def joined(chunks):
    """Returns a streamed message in the form of `plain`, and its finish reason."""
    text = reasoning = ""
    calls, reason = [], None
    for chunk in chunks:
        choice = chunk.choices[0]
        assert reason is None, "nothing follows the end"
        reason = choice.finish_reason
        delta = choice.delta.model_dump()
        assert delta.get("reasoning") == delta.get("reasoning_content")
        text += delta.get("content") or ""
        reasoning += delta.get("reasoning") or ""
        for call in delta.get("tool_calls") or ():
            if call["id"]:
                assert call["id"].startswith("call_")
                assert call["type"] == "function"
                assert call["index"] == len(calls)
                calls.append((call["function"]["name"], ""))
            name, arguments = calls[call["index"]]
            calls[call["index"]] = name, arguments + call["function"]["arguments"]
    return (text, reasoning, calls), reason


async def test_tool_calls_are_returned_whole_and_streamed(served):
    message, reason, streamed = await served.chat(TWO_CALLS, tools=[WEATHER, CLOCK])
    text, reasoning, calls = message
    assert (text.strip(), reasoning, reason) == ("I look.", "", "tool_calls")
    assert [name for name, _ in calls] == ["get_weather", "now"]
    assert [json.loads(arguments) for _, arguments in calls] == [{"city": 'Paris, "l\'été" {'}, {}]
    assert streamed == (message, "tool_calls")


async def test_a_call_without_text_has_null_content(served):
    served.worker.next_token = writing('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    answer = await served.http.post("/v1/chat/completions", json={"messages": HI, "tools": [CLOCK]})
    message = answer.json()["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}


async def test_a_token_limit_in_a_call_ends_with_length_and_the_arguments_so_far(served):
    num_tokens = len(text_tokens(TWO_CALLS.split("aris")[0]))
    message, reason, streamed = await served.chat(TWO_CALLS, tools=[WEATHER, CLOCK], max_tokens=num_tokens)
    assert reason == "length"
    assert message[2][0][0] == "get_weather"
    assert streamed == (message, "length")


async def test_calls_stay_text_without_tools_or_with_tool_choice_none(served):
    for fields in ({}, {"tools": [WEATHER, CLOCK], "tool_choice": "none"}):
        message, reason, streamed = await served.chat(TWO_CALLS, **fields)
        assert (message, reason) == ((TWO_CALLS, "", []), "stop")
        assert streamed == (message, "stop")


async def test_only_the_first_call_is_returned_without_parallel_calls(served):
    message, reason, streamed = await served.chat(TWO_CALLS, tools=[WEATHER, CLOCK], parallel_tool_calls=False)
    assert [name for name, _ in message[2]] == ["get_weather"]
    assert reason == "tool_calls"
    assert streamed == (message, reason)


async def test_forced_calls_set_a_grammar(served):
    named = {"type": "function", "function": {"name": "now"}}
    for choice in ("required", named):
        await served.chat(TWO_CALLS, tools=[WEATHER, CLOCK], tool_choice=choice)
        grammar = served.worker.submits[-1].sampling.grammar
        assert grammar.kind == common_pb2.GRAMMAR_KIND_LARK
        assert "now" in grammar.source
        assert ("get_weather" in grammar.source) == (choice == "required")
    await served.chat(TWO_CALLS, tools=[WEATHER, CLOCK])
    assert not served.worker.submits[-1].sampling.HasField("grammar")
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    await served.chat(TWO_CALLS, tools=[strict, CLOCK])
    assert "get_weather" in served.worker.submits[-1].sampling.grammar.source


async def test_reasoning_is_separate_from_the_answer(served):
    text = "<think>\nWhat? Ah.\n</think>\n\nHello."
    message, reason, streamed = await served.chat(text)
    assert (message[0].strip(), message[1].strip(), reason) == ("Hello.", "What? Ah.", "stop")
    assert streamed == (message, "stop")
    message, reason, streamed = await served.chat(text, extra_body={"include_reasoning": False})
    assert (message[0].strip(), message[1]) == ("Hello.", "")
    assert streamed == (message, "stop")


@pytest.mark.parametrize("shown", [True, False])
async def test_usage_counts_the_tokens_of_reasoning(served, shown):
    served.worker.next_token = writing("<think>\nWhat? Ah.\n</think>\n\nHello.")
    body = {"messages": HI, "include_reasoning": shown}
    whole = (await served.http.post("/v1/chat/completions", json=body)).json()["usage"]
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    lines = (await served.http.post("/v1/chat/completions", json=body)).text.splitlines()
    assert json.loads(lines[-4].removeprefix("data: "))["usage"] == whole
    counted, about = whole["completion_tokens_details"]["reasoning_tokens"], len(text_tokens("\nWhat? Ah.\n"))
    assert about <= counted <= about + len(text_tokens("<think></think>"))
    assert counted < whole["completion_tokens"]


async def test_choices_are_parsed_separately(served):
    served.worker.next_token = writing(TWO_CALLS)
    answer = await served.http.post(
        "/v1/chat/completions", json={"messages": HI, "tools": [WEATHER, CLOCK], "n": 3, "logprobs": True}
    )
    choices = answer.json()["choices"]
    assert [len(choice["message"]["tool_calls"]) for choice in choices] == [2, 2, 2]
    assert len({call["id"] for choice in choices for call in choice["message"]["tool_calls"]}) == 6
    assert all(len(choice["logprobs"]["content"]) == len(text_tokens(TWO_CALLS)) + 1 for choice in choices)


async def test_a_worker_lost_within_a_call_leaves_no_gap():
    first = await FakeWorker("first", epoch=1, next_token=writing(TWO_CALLS), pause_at=30).start()
    second = await FakeWorker("second", epoch=2, next_token=writing(TWO_CALLS), pause_at=30).start()
    async with running_router(first, second) as router:
        async with openai.AsyncOpenAI(base_url=f"{router.http_url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.chat.completions.create(
                model="penstock-tiny", messages=HI, tools=[WEATHER, CLOCK], stream=True
            )
            chunks = []
            async for chunk in stream:
                chunks.append(chunk)
                if any(call.function.arguments for call in chunk.choices[0].delta.tool_calls or ()):
                    break
            lost, other = (first, second) if first.submits else (second, first)
            other.resume.set()
            await lost.stop()
            chunks += [chunk async for chunk in stream]
            (text, _, calls), reason = joined(chunks)
    assert other.submits
    assert len(other.submits[0].token_ids) > other.submits[0].num_prompt_tokens
    assert (text.strip(), reason) == ("I look.", "tool_calls")
    assert [json.loads(arguments) for _, arguments in calls] == [{"city": 'Paris, "l\'été" {'}, {}]


CONVERSATION = [
    {"role": "developer", "content": " Be brief. "},
    {"role": "user", "content": "Weather?", "name": "Ann"},
    {
        "role": "assistant",
        "content": None,
        "reasoning": "A tool knows.",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Ulm"}'}},
            {"id": "call_2", "type": "function", "function": {"name": "now", "arguments": ""}},
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
    {"role": "tool", "tool_call_id": "call_2", "content": "noon"},
    {"role": "assistant", "content": "Sunny."},
    {"role": "user", "content": "Thanks."},
]


def as_templates_take_it(messages):
    """Returns OpenAI's messages in the form that transformers' templates take."""
    taken = json.loads(json.dumps(messages).replace('"developer"', '"system"'))
    for message in taken:
        if isinstance(message["content"], list):
            message["content"] = message["content"][0]["text"]
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
    return taken


async def test_a_conversation_with_tools_is_rendered_as_by_transformers(served):
    reference = AutoTokenizer.from_pretrained(MODEL)
    await served.chat("x", messages=CONVERSATION, tools=[WEATHER, CLOCK])
    expected = reference.apply_chat_template(
        as_templates_take_it(CONVERSATION),
        tools=[WEATHER, CLOCK],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert list(served.worker.submits[0].token_ids) == expected


async def test_each_turns_prompt_extends_the_previous_one(served):
    prompts = []
    for end in (2, 5, 7):
        await served.chat("x", messages=CONVERSATION[:end], tools=[WEATHER, CLOCK])
        prompts.append(list(served.worker.submits[-1].token_ids))
    for before, after in itertools.pairwise(prompts):
        assert after[: len(before)] == before
        assert len(after) > len(before)


@pytest.mark.parametrize("final", ["It is ", "It is\n\n", " It is", "It is"])
async def test_an_open_final_message_is_rendered_as_by_transformers(served, final):
    messages = [*CONVERSATION, {"role": "assistant", "content": final}]
    body = {"messages": messages, "tools": [WEATHER, CLOCK], "continue_final_message": True, "max_tokens": 1}
    served.worker.next_token = lambda context, sampling: 300
    answer = await served.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    reference = AutoTokenizer.from_pretrained(MODEL)
    expected = reference.apply_chat_template(
        as_templates_take_it(messages), tools=[WEATHER, CLOCK], continue_final_message=True, return_dict=False
    )
    assert list(served.worker.submits[0].token_ids) == expected


async def test_a_prompt_can_omit_the_beginning_of_an_answer(served):
    served.worker.next_token = lambda context, sampling: 300
    body = {"messages": HI, "add_generation_prompt": False, "max_tokens": 1}
    assert (await served.http.post("/v1/chat/completions", json=body)).status_code == 200
    assert list(served.worker.submits[0].token_ids) == TOKENIZER._encode(["<|bos|><|user|>Hi<|end|>"], False)[0]


CALL = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
ANSWERED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
BAD = {
    "custom tool": ({"tools": [{"type": "custom"}]}, "tools[0].type", "only functions are supported"),
    "no function": ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name", "is missing"),
    "bad name": (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools[0].function.name",
        "128 letters",
    ),
    "same name": ({"tools": [CLOCK, CLOCK]}, "tools[1].function.name", "repeats 'now'"),
    "too many": ({"tools": [CLOCK] * 300}, "tools", "has 300 tools; give 256 or fewer"),
    "unknown tool field": (
        {"tools": [{"type": "function", "function": {"name": "a", "lazy": True}}]},
        "tools[0].function.lazy",
        "is not a field",
    ),
    "no tools": ({"tool_choice": "required"}, "tool_choice", "but there are no tools"),
    "unknown choice": ({"tools": [CLOCK], "tool_choice": "any"}, "tool_choice", "give auto, none, required"),
    "unknown name": (
        {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "then"}}},
        "tool_choice",
        "names 'then'",
    ),
    "name of a choice": (
        {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "none"}}},
        "tool_choice",
        "a reserved name",
    ),
    "functions": ({"functions": [{"name": "a"}]}, "functions", "is not supported"),
    "function_call": ({"function_call": {"name": "a"}}, "function_call", "is not supported"),
    "role function": ({"messages": [{"role": "function", "content": "a"}]}, "messages[0].role", "give one of"),
    "calling user": ({"messages": [{**ANSWERED, "role": "user"}]}, "messages[0].tool_calls", "give role 'assistant'"),
    "answering user": (
        {"messages": [{"role": "user", "content": "a", "tool_call_id": "c"}]},
        "messages[0].tool_call_id",
        "give role 'tool'",
    ),
    "two reasonings": (
        {"messages": [{"role": "assistant", "content": "", "reasoning": "a", "reasoning_content": "b"}]},
        "messages[0].reasoning",
        "differs from reasoning_content",
    ),
    "call of no function": (
        {"messages": [{**ANSWERED, "tool_calls": [{**CALL, "type": "custom"}]}]},
        "messages[0].tool_calls[0].type",
        "give function",
    ),
    "call without name": (
        {"messages": [{**ANSWERED, "tool_calls": [{**CALL, "function": {"name": ""}}]}]},
        "messages[0].tool_calls[0].function.name",
        "is empty",
    ),
    "both ends": (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "set one of them to false",
    ),
    "nothing to continue": (
        {"messages": [*HI, ANSWERED], "continue_final_message": True},
        "messages",
        "cannot be continued",
    ),
    "reserved argument": ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "has 'messages'"),
    "large arguments": ({"chat_template_kwargs": {"a": "b" * 20_000}}, "chat_template_kwargs", "or fewer"),
    "effort": ({"reasoning_effort": "huge"}, "reasoning_effort", "give one of none, minimal"),
    "template": ({"chat_template": "{{ messages }}"}, "chat_template", "is not supported"),
    "truncate": ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "give at least 1"),
    "salt": ({"cache_salt": "a" * 300}, "cache_salt", "give 256 or fewer"),
    "two lanes": ({"service_tier": "flex", "priority": -1}, "priority", "give only one of them"),
}


async def test_bad_chats_are_refused_by_field_value_and_fix(served):
    for case, (fields, param, problem) in BAD.items():
        answer = await served.http.post("/v1/chat/completions", json={"messages": HI, **fields})
        assert answer.status_code == 400, case
        error = answer.json()["error"]
        assert error["param"] == param, (case, error)
        assert problem in error["message"], (case, error)
    assert not served.worker.submits


async def test_arguments_that_are_not_json_are_rendered_unchanged(served):
    broken = {**CALL, "function": {"name": "now", "arguments": '{"city": "Pa'}}
    await served.chat("x", messages=[*HI, {**ANSWERED, "tool_calls": [broken]}, *HI])
    prompt = "".join(map(TOKENIZER.spelling.token_text, served.worker.submits[0].token_ids))
    assert r'"arguments": "{\"city\": \"Pa"' in prompt


async def test_the_parsers_can_be_configured():
    worker = await FakeWorker().start()
    async with (
        running_router(worker, tool_parser="none") as router,
        httpx.AsyncClient(base_url=router.http_url) as http,
    ):
        answer = await http.post("/v1/chat/completions", json={"messages": HI, "tools": [CLOCK]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
        assert "or set tool_parser" in answer.json()["error"]["message"]
    with pytest.raises(ConfigError, match="tool_parser: 'hermit' is not a parser; choose one of auto, none, "):
        async with running_router(tool_parser="hermit", workers=("127.0.0.1:1",)):
            pass
