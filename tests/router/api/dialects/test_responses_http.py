"""Tests the Responses API over fake workers with OpenAI's own client: streams, tools, the store and cancelling."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from pydantic import BaseModel

from router.api.openai.fields import REFUSED
from tests.router.api.dialects.speech import CALL, MODEL, WEATHER, rendered, saying
from tests.router.api.test_tenants import KEYS, TENANTS
from tests.support.router.router_fakes import FakeWorker, running_router

TOOL = {"type": "function", "name": "get_weather", "description": "Looks it up.", "parameters": WEATHER, "strict": True}


class City(BaseModel):
    city: str


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


@pytest.fixture(name="client")
async def _client(router):
    async with openai.AsyncOpenAI(base_url=f"{router.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_a_response_is_returned_whole(client, worker):
    response = await client.responses.create(
        model=MODEL, input="Hi", instructions="Be brief.", max_output_tokens=99, metadata={"run": "1"}
    )
    assert (response.output_text, response.status, response.metadata) == ("Hello there", "completed", {"run": "1"})
    assert rendered(worker.submits[0]) == "<|bos|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"
    assert response.usage.input_tokens == len(worker.submits[0].token_ids)
    assert worker.submits[0].sampling.max_tokens == 99


@pytest.mark.parametrize("store", [True, False])
async def test_a_response_is_streamed(client, store):
    async with client.responses.stream(model=MODEL, input="Hi", store=store) as stream:
        kinds = [event.type async for event in stream]
        response = await stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert response.output_text == "Hello there"


async def test_the_event_stream_has_openais_wire_format(http):
    answer = await http.post("/v1/responses", json={"input": "Hi", "stream": True})
    events = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    for number, (name, data) in enumerate(events):
        fields = json.loads(data.removeprefix("data: "))
        assert (name, fields["sequence_number"]) == (f"event: {fields['type']}", number)


@pytest.mark.parametrize("streams", [False, True])
async def test_reasoning_and_function_calls_are_items(client, worker, streams):
    worker.next_token = saying(f"<think>\nHm.\n</think>\n\nI look.{CALL}")
    options = {"model": MODEL, "input": "Weather?", "tools": [TOOL], "include": ["reasoning.encrypted_content"]}
    if streams:
        async with client.responses.stream(**options) as stream:
            response = await stream.get_final_response()
    else:
        response = await client.responses.create(**options)
    reasoning, message, call = response.output
    assert reasoning.content[0].text.strip() == "Hm."
    assert reasoning.encrypted_content
    assert message.content[0].text.strip() == "I look."
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Rome"})


async def test_a_function_output_is_sent_back_by_items_or_by_id(client, worker):
    worker.next_token = saying(CALL)
    first = await client.responses.create(model=MODEL, input="Weather?", tools=[TOOL])
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "sun"}
    worker.next_token = saying("It shines.")
    items = [{"role": "user", "content": "Weather?"}, *(item.to_dict() for item in first.output), output]
    by_items = await client.responses.create(model=MODEL, input=items, tools=[TOOL], store=False)
    by_id = await client.responses.create(model=MODEL, input=[output], tools=[TOOL], previous_response_id=first.id)
    assert by_items.output_text == by_id.output_text == "It shines."
    assert list(worker.submits[1].token_ids) == list(worker.submits[2].token_ids)
    assert rendered(worker.submits[2]).endswith("<tool_response>\nsun\n</tool_response><|end|><|assistant|>")


@pytest.mark.skipif("response_format" in REFUSED, reason="this router compiles no schemas")
async def test_openais_client_parses_a_structured_response(client, worker):
    worker.next_token = saying('{"city": "Rome"}')
    parsed = await client.responses.parse(model=MODEL, input="Where?", text_format=City)
    assert parsed.output_parsed == City(city="Rome")
    assert "city" in worker.submits[0].sampling.grammar.source


async def test_stored_responses_are_read_listed_and_deleted(client):
    created = await client.responses.create(
        model=MODEL, input=[{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    )
    assert (await client.responses.retrieve(created.id)).output_text == "Hello there"
    items = [item async for item in client.responses.input_items.list(created.id, order="asc", limit=1)]
    assert [item.content[0].text for item in items] == ["one", "two"]
    await client.responses.delete(created.id)
    with pytest.raises(openai.NotFoundError, match="is not in the store of this router"):
        await client.responses.retrieve(created.id)
    with pytest.raises(openai.NotFoundError) as raised:
        await client.responses.create(model=MODEL, input="Hi", previous_response_id=created.id)
    assert raised.value.body["param"] == "previous_response_id"


async def test_a_tenants_responses_are_its_own(worker):
    async with running_router(worker, tenants=TENANTS) as router:
        base = f"{router.http_url}/v1"
        async with (
            openai.AsyncOpenAI(base_url=base, api_key=KEYS["acme"], max_retries=0) as mine,
            openai.AsyncOpenAI(base_url=base, api_key=KEYS["one"], max_retries=0) as others,
        ):
            created = await mine.responses.create(model=MODEL, input="Hi")
            for call in (others.responses.retrieve, others.responses.cancel, others.responses.delete):
                with pytest.raises(openai.NotFoundError):
                    await call(created.id)
            assert (await mine.responses.retrieve(created.id)).id == created.id


async def test_a_response_in_flight_is_cancelled(client, worker):
    worker.pause_at = 2  # for ever
    stream = aiter(await client.responses.create(model=MODEL, input="Hi", stream=True))
    created = await anext(stream)
    cancelled = await client.responses.cancel(created.response.id)
    assert cancelled.status == "cancelled"
    events = [event async for event in stream]
    assert (events[-1].type, events[-1].response.status) == ("response.incomplete", "cancelled")
    await worker.until(lambda fake: bool(fake.cancelled) and not fake.running)
    again = await client.responses.cancel(created.response.id)  # an ended response is returned unchanged
    assert again.status == "cancelled"


async def test_an_unstored_response_can_be_cancelled(client, worker):
    worker.pause_at = 2  # for ever
    stream = aiter(await client.responses.create(model=MODEL, input="Hi", stream=True, store=False))
    created = await anext(stream)
    assert (await client.responses.cancel(created.response.id)).status == "cancelled"
    assert [event async for event in stream][-1].response.status == "cancelled"


async def test_an_unknown_response_cannot_be_cancelled(client):
    with pytest.raises(openai.NotFoundError):
        await client.responses.cancel("resp_1")


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("order=up", "order: is 'up'; give asc or desc"),
        ("limit=0", "limit: is '0'; give a number from 1 to 100"),
        ("after=msg_1", "after: is 'msg_1', which is not in the list"),
    ],
)
async def test_bad_queries_are_refused(client, http, query, message):
    created = await client.responses.create(model=MODEL, input="Hi")
    answer = await http.get(f"/v1/responses/{created.id}/input_items?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(message)
    assert (await http.get(f"/v1/responses/{created.id}?stream=true")).status_code == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "Hi", "max_output_tokens": 99_999}, "max_output_tokens"),
        ({"input": "Hi", "temperature": -1}, "temperature"),
        ({"input": "Hi", "reasoning": {"effort": "some"}}, "reasoning.effort"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "", "arguments": "{}"}]}, "input"),
        ({"input": "Hi", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ],
)
async def test_errors_use_this_apis_field_names(http, body, param):
    answer = await http.post("/v1/responses", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


async def test_a_failing_stream_sends_an_error_and_raises(http, worker):
    worker.pause_at = 2  # for ever
    body = {"input": "Hi", "stream": True}
    answer = await http.post("/v1/responses", json=body, headers={"x-request-timeout": "1"})
    names = [line.removeprefix("event: ") for line in answer.text.split("\n") if line.startswith("event: ")]
    assert names[-2:] == ["response.failed", "error"]
