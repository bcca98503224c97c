"""Tests everything that OpenAI's and Anthropic's own clients parse of an answer, whole and streamed.

Runs in the suites' own environment, with the newest clients, against the deployment at PENSTOCK_URL: with the bundled
model and with its adapter. Neither writes sensible text, so the tests check only formats.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

URL = os.environ.get("PENSTOCK_URL", "http://127.0.0.1:8000")
MESSAGES: list[Any] = [{"role": "user", "content": "Write a few words about a city and its weather."}]
CHAT: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "frequency_penalty": 1.5, "max_tokens": 300}


class City(BaseModel):
    """A city."""

    is_warm: bool
    population: int


SCHEMA = City.model_json_schema() | {"additionalProperties": False}
TOOL: Any = {"type": "function", "function": {"name": "note_city", "parameters": SCHEMA, "strict": True}}
ANTHROPIC_TOOL: Any = {"name": "note_city", "description": "Notes a city.", "input_schema": SCHEMA}


@pytest.fixture(params=["penstock-tiny", "adapted"])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client() -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{URL}/v1", timeout=120, max_retries=0) as made:
        yield made


@pytest.fixture
async def async_client() -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", timeout=120, max_retries=0) as made:
        yield made


@pytest.fixture
def claude() -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=URL, timeout=120, max_retries=0) as made:
        yield made


def test_models_are_listed(client: openai.OpenAI, model: str) -> None:
    assert model in [each.id for each in client.models.list()]
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none")


def test_completions_stream_the_same_as_whole(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "prompt": "The boy went", "temperature": 0, "max_tokens": 12}
    asked["logprobs"] = 2
    whole = client.completions.create(**asked)
    with client.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    assert whole.choices[0].logprobs is not None
    assert len(whole.choices[0].logprobs.tokens or ()) == 12


async def test_chats_stream_the_same_as_whole(async_client: openai.AsyncOpenAI, model: str) -> None:
    asked: dict[str, Any] = {**CHAT, "model": model, "max_tokens": 24, "logprobs": True, "top_logprobs": 2, "n": 2}
    whole = await async_client.chat.completions.create(**asked, seed=1)
    assert [choice.index for choice in whole.choices] == [0, 1]
    stream = await async_client.chat.completions.create(**asked, seed=1, stream=True)
    texts = ["", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]


def test_chats_are_parsed_into_models(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(**CHAT, model=model, response_format=City)
    assert isinstance(answer.choices[0].message.parsed, City)
    turns = [*MESSAGES, answer.choices[0].message, {"role": "user", "content": "And?"}]
    client.chat.completions.create(**CHAT | {"messages": turns, "max_tokens": 8}, model=model)


def test_streamed_chats_are_parsed_into_models(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.stream(**CHAT, model=model, response_format=City) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    assert {"content.delta", "content.done"} <= kinds
    assert isinstance(answer.choices[0].message.parsed, City)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "note_city"}}])
def test_tool_calls_are_parsed(client: openai.OpenAI, model: str, choice: Any) -> None:
    tool = openai.pydantic_function_tool(City, name="note_city")
    answer = client.chat.completions.parse(**CHAT, model=model, tools=[tool], tool_choice=choice)
    assert answer.choices[0].finish_reason == "tool_calls"
    calls = answer.choices[0].message.tool_calls or []
    assert [type(call.function.parsed_arguments) for call in calls] == [City] * max(1, len(calls))
    turns = [*MESSAGES, answer.choices[0].message]
    turns += [{"role": "tool", "tool_call_id": call.id, "content": "noted"} for call in calls]
    after = client.chat.completions.create(**CHAT | {"messages": turns, "max_tokens": 8}, model=model, tools=[tool])
    assert after.choices[0].finish_reason in ("stop", "length")


async def test_streamed_tool_calls_are_parsed(async_client: openai.AsyncOpenAI, model: str) -> None:
    tool = openai.pydantic_function_tool(City, name="note_city")
    asked: dict[str, Any] = {**CHAT, "model": model, "tools": [tool], "tool_choice": "required"}
    async with async_client.chat.completions.stream(**asked, parallel_tool_calls=False) as stream:
        kinds = {event.type async for event in stream}
        answer = await stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    calls = answer.choices[0].message.tool_calls or []
    assert [type(call.function.parsed_arguments) for call in calls] == [City]


def test_responses_are_continued_read_and_deleted(client: openai.OpenAI, model: str) -> None:
    first = client.responses.create(model=model, input="Hello", max_output_tokens=16, store=True)
    assert first.usage is not None
    assert first.usage.output_tokens <= 16
    asked: dict[str, Any] = {"model": model, "input": "And?", "max_output_tokens": 16}
    second = client.responses.create(**asked, previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_responses_are_parsed_into_models(client: openai.OpenAI, model: str) -> None:
    answer = client.responses.parse(model=model, input="A city?", text_format=City, temperature=0)
    assert isinstance(answer.output_parsed, City)
    turns: Any = [{"role": "user", "content": "A city?"}, *answer.output, {"role": "user", "content": "And?"}]
    assert client.responses.create(model=model, input=turns, max_output_tokens=8).usage is not None


def test_streamed_responses_equal_their_events(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "input": "A city?", "text_format": City, "temperature": 0}
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        answer = stream.get_final_response()
    assert [events[0].type, events[-1].type] == ["response.created", "response.completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert isinstance(answer.output_parsed, City)


async def test_responses_call_functions(async_client: openai.AsyncOpenAI, model: str) -> None:
    tool: Any = {"type": "function", "name": "note_city", "parameters": SCHEMA, "strict": True}
    asked: dict[str, Any] = {"model": model, "tools": [tool], "temperature": 0}
    answer = await async_client.responses.create(**asked, input="A city?", tool_choice="required")
    calls = [item for item in answer.output if item.type == "function_call"]
    City.model_validate_json(calls[0].arguments)
    outputs: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "noted"} for call in calls]
    after = await async_client.responses.create(
        **asked, input=outputs, previous_response_id=answer.id, max_output_tokens=16
    )
    assert after.status in ("completed", "incomplete")


def test_messages_are_whole_and_streamed(claude: anthropic.Anthropic, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "max_tokens": 24, "messages": MESSAGES}
    asked["extra_body"] = {"temperature": 0.0}  # a model that the client no longer lists
    counted = claude.messages.count_tokens(model=model, messages=MESSAGES)
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == "".join(block.text for block in whole.content if block.type == "text")
    assert final.stop_reason == whole.stop_reason
    cached = whole.usage.cache_read_input_tokens or 0
    assert counted.input_tokens == whole.usage.input_tokens + cached


async def test_messages_call_tools(model: str) -> None:
    asked: dict[str, Any] = {"model": model, "max_tokens": 300, "messages": MESSAGES, "tools": [ANTHROPIC_TOOL]}
    async with anthropic.AsyncAnthropic(base_url=URL, timeout=120, max_retries=0) as claude:
        async with claude.messages.stream(**asked, tool_choice={"type": "tool", "name": "note_city"}) as stream:
            message = await stream.get_final_message()
        assert message.stop_reason == "tool_use"
        (call,) = [block for block in message.content if block.type == "tool_use"]
        City.model_validate(call.input)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "noted"}
        turns = [*MESSAGES, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        after = await claude.messages.create(**asked | {"messages": turns, "max_tokens": 8})
    assert after.role == "assistant"


def test_messages_are_parsed_into_models(claude: anthropic.Anthropic, model: str) -> None:
    answer = claude.messages.parse(model=model, max_tokens=300, messages=MESSAGES, output_format=City)
    assert isinstance(answer.parsed_output, City)


def test_errors_have_the_clients_own_types(client: openai.OpenAI, claude: anthropic.Anthropic, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**CHAT | {"temperature": -1}, model=model)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**CHAT, model="none")
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.create(model=model, max_tokens=0, messages=MESSAGES)
    assert "max_tokens" in json.dumps(refused.value.body)
