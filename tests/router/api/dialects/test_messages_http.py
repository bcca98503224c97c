"""Tests Anthropic's messages over fake workers with Anthropic's own client: whole, streamed, tools, counts, errors."""

from __future__ import annotations

import json

import httpx
import pytest

from penstock.errors import Unavailable
from router.api.openai.fields import REFUSED
from tests.router.api.dialects.speech import CALL, MODEL, WEATHER, rendered, saying
from tests.router.api.test_tenants import KEYS, TENANTS
from tests.support.router.router_fakes import FakeWorker, running_router

USER = {"role": "user", "content": "Hi"}
TOOL = {"name": "get_weather", "description": "Looks up the weather.", "input_schema": WEATHER}


@pytest.fixture(name="worker")
async def _worker():
    return await FakeWorker(next_token=saying("Hello there")).start()


@pytest.fixture(name="router")
async def _router(worker):
    async with running_router(worker, reasoning_parser="qwen3") as router:
        yield router


@pytest.fixture(name="http")
async def _http(router):
    async with httpx.AsyncClient(base_url=router.http_url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module", name="anthropic")
def _anthropic():
    """Imports the client only here, because it takes three seconds, which collection should not."""
    import anthropic

    return anthropic


@pytest.fixture(name="client")
async def _client(router, anthropic):
    async with anthropic.AsyncAnthropic(base_url=router.http_url, api_key="none", max_retries=0) as client:
        yield client


async def create(client, **options):
    return await client.messages.create(**{"model": MODEL, "max_tokens": 99, "messages": [USER], **options})


async def test_a_message_is_returned_whole(client, worker):
    message = await create(client, system="Be brief.", metadata={"user_id": "session-1"})
    assert message.content[0].text == "Hello there"
    assert (message.role, message.stop_reason, message.model) == ("assistant", "end_turn", MODEL)
    submit = worker.submits[0]
    assert rendered(submit) == "<|bos|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"
    assert message.usage.input_tokens == len(submit.token_ids)
    assert submit.sampling.max_tokens == 99


async def test_a_message_is_streamed(client):
    async with client.messages.stream(model=MODEL, max_tokens=99, messages=[USER]) as stream:
        texts = [text async for text in stream.text_stream]
        message = await stream.get_final_message()
    assert "".join(texts) == message.content[0].text == "Hello there"
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", len(texts) + 1)


async def test_the_event_stream_has_anthropics_wire_format(http):
    body = {"model": MODEL, "max_tokens": 99, "messages": [USER], "stream": True}
    answer = await http.post("/v1/messages", json=body, headers={"anthropic-version": "2023-06-01"})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    names = [lines[0].removeprefix("event: ") for lines in events]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    for name, (_, data) in zip(names, events, strict=True):
        assert json.loads(data.removeprefix("data: "))["type"] == name


@pytest.mark.parametrize("streams", [False, True])
async def test_thinking_and_tool_calls_are_blocks(client, worker, streams):
    worker.next_token = saying(f"<think>\nHm.\n</think>\n\nI look.{CALL}")
    options = {"tools": [TOOL], "thinking": {"type": "adaptive"}}
    if streams:
        async with client.messages.stream(model=MODEL, max_tokens=99, messages=[USER], **options) as stream:
            message = await stream.get_final_message()
    else:
        message = await create(client, **options)
    thinking, text, call = message.content
    assert (thinking.thinking.strip(), text.text.strip()) == ("Hm.", "I look.")
    assert (call.name, call.input) == ("get_weather", {"city": "Rome"})
    assert message.stop_reason == "tool_use"
    assert '"get_weather"' in rendered(worker.submits[0])


async def test_a_tool_result_is_sent_back(client, worker):
    turns = [
        USER,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "get_weather",
                                           "input": {"city": "Rome"}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "sun"}]},
    ]  # fmt: skip
    await create(client, messages=turns, tools=[TOOL])
    prompt = rendered(worker.submits[0])
    assert '"arguments": {"city": "Rome"}' in prompt
    assert "<tool_response>\nsun\n</tool_response>" in prompt


async def test_a_forced_tool_sets_a_grammar(client, worker):
    worker.next_token = saying(CALL)
    message = await create(client, tools=[TOOL], tool_choice={"type": "tool", "name": "get_weather"})
    assert message.content[0].input == {"city": "Rome"}
    assert "get_weather" in worker.submits[0].sampling.grammar.source


@pytest.mark.skipif("response_format" in REFUSED, reason="this router compiles no schemas")
async def test_a_schema_sets_a_grammar(client, worker):
    worker.next_token = saying('{"city": "Rome"}')
    message = await create(client, output_config={"format": {"type": "json_schema", "schema": WEATHER}})
    assert message.content[0].text == '{"city": "Rome"}'
    assert "city" in worker.submits[0].sampling.grammar.source


async def test_the_matched_stop_sequence_is_reported(client):
    message = await create(client, stop_sequences=["the", "never"])
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ("Hello ", "stop_sequence", "the")


async def test_max_tokens_is_cut_to_the_context(client, worker):
    worker.next_token = saying("a " * 3000)
    message = await create(client, max_tokens=16_000)
    assert message.stop_reason == "model_context_window_exceeded"
    message = await create(client, max_tokens=3)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 3)


async def test_a_last_message_of_the_assistant_is_continued(client, worker):
    await create(client, messages=[USER, {"role": "assistant", "content": "The best is"}])
    assert rendered(worker.submits[0]).endswith("<|assistant|>The best is")


async def test_token_counts_equal_those_of_a_message(client):
    options = {"model": MODEL, "messages": [USER], "system": "Be brief.", "tools": [TOOL]}
    count = await client.messages.count_tokens(**options)
    message = await create(client, **options)
    assert count.input_tokens == message.usage.input_tokens


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("POST", "/v1/messages", {"model": MODEL, "messages": [USER]}, 400, "invalid_request_error"),
        ("POST", "/v1/messages", {"model": "gpt", "max_tokens": 1, "messages": [USER]}, 404, "not_found_error"),
        ("POST", "/v1/messages", {"model": MODEL, "max_tokens": 1, "messages": [USER], "temperature": -1}, 400,
         "invalid_request_error"),
        ("POST", "/v1/messages/batches", {}, 404, "not_found_error"),
        ("GET", "/v1/messages", None, 405, "not_found_error"),
        ("POST", "/v1/messages/count_tokens", {"messages": []}, 400, "invalid_request_error"),
    ],
)  # fmt: skip
async def test_errors_have_anthropics_shape(http, method, path, body, status, kind):
    answer = await http.request(method, path, json=body)
    assert answer.status_code == status
    error = answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", kind)
    assert answer.headers["x-request-id"]


async def test_a_body_that_is_too_large_is_refused(worker, anthropic):
    async with running_router(worker, limits={"request_bytes": 2000}) as router:
        async with anthropic.AsyncAnthropic(base_url=router.http_url, api_key="none", max_retries=0) as client:
            with pytest.raises(anthropic.RequestTooLargeError) as raised:
                await create(client, system="a" * 3000)
    assert raised.value.body["error"]["type"] == "request_too_large"


async def test_a_full_router_is_an_overloaded_error(client, worker, anthropic):
    worker.refuse_with = Unavailable("the pool is full")
    with pytest.raises(anthropic.APIStatusError) as raised:
        await create(client)
    assert (raised.value.status_code, raised.value.body["error"]["type"]) == (529, "overloaded_error")


@pytest.mark.parametrize("header", ["x-api-key", "authorization"])
async def test_keys_come_in_either_header(worker, header):
    async with running_router(worker, tenants=TENANTS) as router:
        async with httpx.AsyncClient(base_url=router.http_url, timeout=60) as http:
            body = {"model": MODEL, "max_tokens": 5, "messages": [USER]}
            key = KEYS["acme"] if header == "x-api-key" else f"Bearer {KEYS['acme']}"
            assert (await http.post("/v1/messages", json=body, headers={header: key})).status_code == 200
            for headers in ({}, {header: "Bearer wrong"}):
                answer = await http.post("/v1/messages", json=body, headers=headers)
                assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")


async def test_the_real_client_sends_its_key(worker, anthropic):
    async with running_router(worker, tenants=TENANTS) as router:
        async with anthropic.AsyncAnthropic(base_url=router.http_url, api_key=KEYS["acme"]) as client:
            assert (await create(client)).content[0].text == "Hello there"
        async with anthropic.AsyncAnthropic(base_url=router.http_url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError):
                await create(client)


async def test_a_stream_that_fails_ends_with_an_error_event(client, worker, anthropic):
    worker.pause_at = 2  # for ever

    async def read():
        headers = {"x-request-timeout": "1"}
        async with client.messages.stream(model=MODEL, max_tokens=99, messages=[USER], extra_headers=headers) as stream:
            await stream.until_done()

    with pytest.raises(anthropic.APIStatusError) as raised:
        await read()
    assert raised.value.body["error"]["type"] == "timeout_error"
