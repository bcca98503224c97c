"""Tests the OpenAI-compatible API over fake workers: both calls, streamed or whole, the openai client, bad input."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx
import openai
import pytest

from penstock.errors import InternalError
from router.api.http import generation
from tests.router.api.test_grpc_service import TOKENIZER, saying, text_tokens
from tests.support.router.router_fakes import EOS, FakeWorker, expected_tokens, running_router, until


@pytest.fixture(name="worker")
async def _worker():
    return await FakeWorker().start()


@pytest.fixture(name="router")
async def _router(worker):
    async with running_router(worker) as router:
        yield router


@pytest.fixture(name="http")
async def _http(router):
    async with httpx.AsyncClient(base_url=router.http_url, timeout=60) as client:
        yield client


@pytest.fixture(name="client")
async def _client(router):
    async with openai.AsyncOpenAI(base_url=f"{router.http_url}/v1", api_key="none", max_retries=0) as client:
        yield client


MODEL = "penstock-tiny"


def text_of(worker, rank=0, count=16):
    return TOKENIZER.spelling.decode(expected_tokens(worker.submits[rank], count))


async def test_a_completion_is_returned_whole(client, worker):
    answer = await client.completions.create(model=MODEL, prompt="Hello", seed=3)
    assert answer.choices[0].text == text_of(worker)
    assert answer.choices[0].finish_reason == "length"
    num_prompt = len(TOKENIZER._encode(["Hello"], True)[0])
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (num_prompt, 16)
    assert answer.usage.total_tokens == num_prompt + 16
    assert answer.id.startswith("cmpl-")


async def test_a_completion_is_streamed(client, worker):
    stream = await client.completions.create(
        model=MODEL, prompt="Hello", max_tokens=9, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == text_of(worker, count=9)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1] if chunk.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 9


async def test_a_chat_is_returned_whole(client, worker):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    answer = await client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=5)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == text_of(worker, count=5)
    rendered = "<|bos|><|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"
    assert list(worker.submits[0].token_ids) == TOKENIZER._encode([rendered], False)[0]


async def test_a_streamed_chat_with_two_choices(client, worker):
    messages = [{"role": "user", "content": "Hi"}]
    stream = await client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=6, stream=True, n=2, seed=40
    )
    texts, reasons = {0: "", 1: ""}, {}
    async for chunk in stream:
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert reasons == {0: "length", 1: "length"}
    by_seed = {submit.sampling.seed: submit for submit in worker.submits}
    assert texts == {rank: TOKENIZER.spelling.decode(expected_tokens(by_seed[40 + rank], 6)) for rank in range(2)}


async def test_a_chat_without_a_limit_is_not_bounded_by_its_tenants_kv_quota():
    """The context is larger than the quota, but a request only holds what it uses."""
    worker = await FakeWorker(context_length=20_000, pause_at=1).start()
    admission = {"tenant": {"max_inflight_tokens": 5000}}
    async with running_router(worker, admission=admission) as router:
        async with httpx.AsyncClient(base_url=router.http_url, timeout=60.0) as http:
            chat = asyncio.create_task(
                http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
            )
            await worker.until(lambda fake: len(fake.submits) == 1)
            submit = worker.submits[0]
            assert submit.sampling.max_tokens == 20_000 - submit.num_prompt_tokens
            gate = router.server.context.gate.admission
            assert gate.inflight_tokens("") == 4096 + submit.num_prompt_tokens
            chat.cancel()
            await until(lambda: gate.num_inside == 0)


async def test_a_chat_without_a_limit_can_fill_the_context(http, worker):
    await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], "stop": "e"})
    submit = worker.submits[0]
    assert submit.sampling.max_tokens == 2048 - len(submit.token_ids)


@pytest.mark.parametrize(
    ("prompt", "encoded"),
    [
        ("a b", [TOKENIZER._encode(["a b"], True)[0]]),
        (["a b", "c"], [TOKENIZER._encode(["a b"], True)[0], TOKENIZER._encode(["c"], True)[0]]),
        ([300, 301, 302], [[300, 301, 302]]),
        ([[300, 301], [302]], [[300, 301], [302]]),
    ],
)
async def test_every_form_of_prompt_is_served(http, worker, prompt, encoded):
    body = {"model": MODEL, "prompt": prompt, "n": 2, "seed": 5, "max_tokens": 4}
    answer = (await http.post("/v1/completions", json=body)).json()
    submits = {(tuple(submit.token_ids), submit.sampling.seed): submit for submit in worker.submits}
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(encoded)))
    for rank, token_ids in enumerate(encoded):
        for index in range(2):
            expected = TOKENIZER.spelling.decode(expected_tokens(submits[tuple(token_ids), 5 + index], 4))
            assert answer["choices"][2 * rank + index]["text"] == expected
    assert answer["usage"]["prompt_tokens"] == sum(map(len, encoded))
    assert answer["usage"]["completion_tokens"] == 8 * len(encoded)


async def test_extensions_reach_the_worker(http, worker):
    body = {
        "prompt": [300],
        "max_tokens": 4,
        "ignore_eos": True,
        "min_tokens": 2,
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "logit_bias": {"301": -5},
        "stop_token_ids": [7],
        "temperature": 0,
        "user": "somebody",
    }
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    sampling = worker.submits[0].sampling
    assert sampling.ignore_eos
    assert (sampling.min_tokens, sampling.top_k, sampling.temperature) == (2, 0, 0)
    assert sampling.min_p == pytest.approx(0.1)
    assert sampling.repetition_penalty == pytest.approx(1.2)
    assert dict(sampling.logit_bias) == {301: -5.0}
    assert list(sampling.stop_token_ids) == [7]


async def test_outputs_end_at_stop_strings_and_the_end_token():
    said = [*text_tokens(" yes and no"), EOS]
    worker = await FakeWorker(next_token=saying(said)).start()
    async with running_router(worker) as router, httpx.AsyncClient(base_url=router.http_url, timeout=60) as http:
        body = {"prompt": [300], "max_tokens": 40}
        choice = (await http.post("/v1/completions", json=body)).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (" yes and no", "stop")
        choice = (await http.post("/v1/completions", json={**body, "stop": ["s an"]})).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (" ye", "stop")


async def test_log_probabilities_have_both_formats(client, worker):
    completion = await client.completions.create(model=MODEL, prompt=[300], logprobs=2, max_tokens=3)
    logprobs = completion.choices[0].logprobs
    tokens = [TOKENIZER.spelling.token_text(token) for token in expected_tokens(worker.submits[0], 3)]
    assert logprobs.tokens == tokens
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset == [0, len(tokens[0]), len(tokens[0] + tokens[1])]
    assert logprobs.top_logprobs[0] == {
        TOKENIZER.spelling.token_text(300): -1.0,
        TOKENIZER.spelling.token_text(301): -2.0,
    }
    chat = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=1, max_tokens=2
    )
    content = chat.choices[0].logprobs.content
    assert [token.token for token in content] == [
        TOKENIZER.spelling.token_text(t) for t in expected_tokens(worker.submits[1], 2)
    ]
    assert bytes(content[0].bytes).decode(errors="replace") == content[0].token
    assert [top.logprob for top in content[0].top_logprobs] == [-1.0]


async def test_models_health_and_metrics_are_served(client, http):
    assert [model.id for model in (await client.models.list()).data] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    assert (await http.get("/v1/models")).json()["data"][0]["max_model_len"] == 2048
    health = await http.get("/health")
    assert (health.status_code, health.json()) == (200, {"status": "ready"})
    assert "vllm:num_requests_running" in (await http.get("/metrics")).text


async def test_health_is_503_without_a_decode_worker():
    worker = await FakeWorker(role="prefill").start()
    async with running_router(worker) as router, httpx.AsyncClient(base_url=router.http_url, timeout=60) as http:
        assert (await http.get("/health")).status_code == 503


CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
BAD = {
    "no prompt": ("completions", {}, "prompt", "prompt: is missing; add it"),
    "empty prompt": ("completions", {"prompt": ""}, "prompt", "is empty"),
    "empty list": ("completions", {"prompt": []}, "prompt", "is empty"),
    "mixed prompt": (
        "completions",
        {"prompt": ["a", 1]},
        "prompt[1]",
        "prompt[1]: is 1; give text",
    ),
    "prompt of objects": (
        "completions",
        {"prompt": [{}]},
        "prompt",
        "prompt: is [{}]; give text, token ids",
    ),
    "inner token id": (
        "completions",
        {"prompt": [[1], [1, "x"]]},
        "prompt[1][1]",
        "prompt[1][1]: is 'x'; give an integer",
    ),
    "message": (
        "chat/completions",
        {"messages": [0, 0]},
        "messages[0]",
        "messages[0]: is 0; give an object",
    ),
    "part": (
        "chat/completions",
        {"messages": [{"role": "user", "content": [0, 0]}]},
        "messages[0].content[0]",
        "messages[0].content[0]: is 0; give an object",
    ),
    "stop": (
        "chat/completions",
        {**CHAT, "stop": [0, 0]},
        "stop",
        "stop: is [0, 0]; give a string or a list of strings",
    ),
    "bias": (
        "chat/completions",
        {**CHAT, "logit_bias": {"a": 0}},
        "logit_bias.a",
        "logit_bias.a: is 'a'; give an integer",
    ),
    "too long": ("completions", {"prompt": [300] * 2048}, "prompt", "prompt: has 2048 tokens"),
    "token id": ("completions", {"prompt": [-1]}, "prompt", "prompt: is [-1]"),
    "big token id": ("completions", {"prompt": [2048]}, "prompt", "prompt: hold 2048"),
    "max_tokens": ("completions", {"prompt": "a", "max_tokens": 9999}, "max_tokens", "max_tokens: is 9999"),
    "negative": ("completions", {"prompt": "a", "max_tokens": -1}, "max_tokens", "max_tokens: is -1"),
    "temperature": ("chat/completions", {**CHAT, "temperature": -1}, "temperature", "temperature: is -1"),
    "type": ("chat/completions", {**CHAT, "temperature": "hot"}, "temperature", "temperature: is 'hot'"),
    "best_of": ("completions", {"prompt": "a", "best_of": 3}, "best_of", "best_of = 3 is not supported"),
    "suffix": ("completions", {"prompt": "a", "suffix": "b"}, "suffix", 'suffix = "b" is not supported'),
    "nothing allowed": (
        "completions",
        {"prompt": "a", "allowed_token_ids": []},
        "allowed_token_ids",
        "allowed_token_ids: is empty; give at least one token",
    ),
    "spaces": ("completions", {"prompt": "a", "bad_words": [" "]}, "bad_words", "bad_words: has ' '; give a word"),
    "tools": ("chat/completions", {**CHAT, "tools": [{"type": "web_search"}]}, "tools[0].type", "only functions"),
    "format": (
        "chat/completions",
        {**CHAT, "response_format": {"type": "xml"}},
        "response_format.type",
        "give text, json_object, json_schema or structural_tag",
    ),
    "role": ("chat/completions", {"messages": [{"role": "tools", "content": "x"}]}, "messages[0].role", "give one of"),
    "no messages": ("chat/completions", {"messages": []}, "messages", "messages: is empty; give at least one message"),
    "image": (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content",
        "give text only",
    ),
    "top_logprobs": ("chat/completions", {**CHAT, "top_logprobs": 2}, "top_logprobs", "set logprobs to true"),
    "n": ("completions", {"prompt": "a", "n": 1000}, "n", "n: is 1000"),
}


@pytest.mark.parametrize("stream", [False, True])
async def test_bad_requests_are_refused_by_field_value_and_fix(http, stream):
    for path, body, param, message in BAD.values():
        answer = await http.post(f"/v1/{path}", json={**body, "stream": stream})
        error = answer.json()["error"]
        assert answer.status_code == 400, error
        assert error["param"] == param, error
        assert message in error["message"], error
        assert error["type"] == "invalid_request_error"
        assert error["code"] == "invalid_input"
    assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b'{"prompt": "ab\xff"}', "is not valid UTF-8"),
        (b'{"prompt": "\\ud800"}', "body: is not valid JSON"),
        (b"{", "body: is not valid JSON"),
        (b"[1]", "body: is"),
        (b'{"prompt": "a", "top_p": NaN}', "top_p: is nan; give a finite number"),
    ],
)
async def test_bodies_that_are_not_json_are_refused(http, raw, problem):
    answer = await http.post("/v1/completions", content=raw)
    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]


async def test_unknown_models_and_paths_are_not_found(http, client):
    with pytest.raises(openai.NotFoundError, match="'gpt-5' is not served here; use 'penstock-tiny'"):
        await client.completions.create(model="gpt-5", prompt="x")
    assert (await http.get("/v1/models/gpt-5")).json()["error"]["code"] == "model_not_found"
    answer = await http.get("/v2/nothing")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert (await http.get("/v1/completions")).status_code == 405


async def test_an_adapter_is_selected_by_name_and_listed_with_its_parent(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    worker = await FakeWorker().start()
    worker._description.adapter_slots = 1
    async with running_router(worker, adapters={"sql": str(tmp_path)}) as router:
        async with openai.AsyncOpenAI(base_url=f"{router.http_url}/v1", api_key="none", max_retries=0) as client:
            listed = {model.id: model.model_extra.get("parent") for model in (await client.models.list()).data}
            adapted = await client.completions.create(model="sql", prompt="Hello", seed=3)
            await client.completions.create(model=MODEL, prompt="Hello", seed=3)
            with pytest.raises(openai.NotFoundError, match="use 'penstock-tiny' or one of its"):
                await client.completions.create(model="law", prompt="x")
    assert listed == {MODEL: None, "sql": MODEL}
    assert adapted.model == "sql"
    first, second = worker.submits
    assert (first.adapter.name, first.adapter.path) == ("sql", str(tmp_path))
    assert not second.HasField("adapter")
    assert first.salt != second.salt


async def test_without_a_worker_calls_fail_with_503_and_a_retry_hint():
    worker = await FakeWorker(role="prefill").start()
    async with running_router(worker, default_timeout_s=0.2) as router:
        async with httpx.AsyncClient(base_url=router.http_url, timeout=60) as http:
            answer = await http.post("/v1/completions", json={"prompt": "a", "stream": True})
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pause_at", [0, 2])
async def test_a_client_that_disconnects_frees_its_worker_at_once(stream, pause_at):
    worker = await FakeWorker(pause_at=pause_at).start()
    async with running_router(worker) as router, httpx.AsyncClient(base_url=router.http_url, timeout=60) as http:
        body = {"prompt": ["a", "b"], "stream": stream, "max_tokens": 9}
        going = asyncio.create_task(http.post("/v1/completions", json=body))
        await worker.until(lambda fake: len(fake.submits) == 2)
        going.cancel()
        await worker.until(lambda fake: len(fake.cancelled) == 2)
        await until(lambda: router.server.context.gate.admission.num_inside == 0)


async def test_an_error_during_a_stream_is_an_error_event_without_done():
    worker = await FakeWorker(pause_at=2).start()
    async with running_router(worker, default_timeout_s=2.0) as router:
        async with httpx.AsyncClient(base_url=router.http_url, timeout=60) as http:
            answer = await http.post("/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 9})
        events = answer.text.strip().split("\n\n")
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert events[-1].startswith("event: error\ndata: ")
        error = json.loads(events[-1].split("data: ", 1)[1])["error"]
        assert error["code"] == "deadline_exceeded"
        assert "[DONE]" not in answer.text
        async with openai.AsyncOpenAI(base_url=f"{router.http_url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.completions.create(model=MODEL, prompt="a", stream=True, max_tokens=9)
            with pytest.raises(openai.APIError, match="did not end within"):
                async for _ in stream:
                    pass


async def test_a_long_wait_sends_the_head_and_heartbeats_before_the_first_token(monkeypatch):
    monkeypatch.setattr(generation, "HEARTBEAT_S", 0.01)
    worker = await FakeWorker(pause_at=0).start()
    async with running_router(worker) as router, httpx.AsyncClient(base_url=router.http_url, timeout=60) as http:
        body = {"prompt": "a", "stream": True, "max_tokens": 2}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            assert (answer.status_code, answer.headers["x-request-id"] != "") == (200, True)
            pieces = answer.aiter_text()
            assert await anext(pieces) == "\n\n"
            worker.resume.set()
            rest = "".join([piece async for piece in pieces])
        assert rest.endswith("data: [DONE]\n\n")
        assert rest.count('"finish_reason":"length"') == 1


async def test_a_stream_that_fails_after_its_head_ends_with_an_error_event(monkeypatch):
    monkeypatch.setattr(generation, "HEARTBEAT_S", 0.01)
    worker = await FakeWorker(pause_at=0).start()
    async with running_router(worker, default_timeout_s=2.0) as router:
        async with openai.AsyncOpenAI(base_url=f"{router.http_url}/v1", api_key="none", max_retries=0) as client:
            stream = await client.completions.create(model=MODEL, prompt="a", stream=True, max_tokens=9)
            with pytest.raises(openai.APIError, match="did not end within"):
                assert [chunk async for chunk in stream] == []
        await worker.until(lambda fake: len(fake.cancelled) == 1)


async def test_an_internal_error_of_a_worker_is_a_server_error():
    worker = await FakeWorker(refuse_with=InternalError("the step failed")).start()
    async with running_router(worker) as router, httpx.AsyncClient(base_url=router.http_url, timeout=60) as http:
        answer = await http.post("/v1/completions", json={"prompt": ["a", "b"]})
        assert answer.status_code == 500
        assert answer.json()["error"] == {
            "message": "the step failed",
            "type": "server_error",
            "param": None,
            "code": "internal",
        }


async def test_responses_do_not_wait_for_a_delayed_ack(router, http):
    """Without TCP_NODELAY on accepted sockets, each response body would be delayed by at least 40 ms."""
    await http.post("/v1/completions", json={"prompt": [300], "max_tokens": 1})
    (connection,) = router.server._https[0].server_state.connections
    assert connection.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_every_answer_has_a_request_id(http):
    given = await http.get("/v1/models", headers={"x-request-id": "call-7"})
    own = await http.get("/nowhere")
    unprintable = await http.get("/v1/models", headers={"x-request-id": "a" * 200})
    assert given.headers["x-request-id"] == "call-7"
    assert own.status_code == 404
    assert len(own.headers["x-request-id"]) == 32
    assert len(unprintable.headers["x-request-id"]) == 32
    for fields in ({"request_id": "r-1"}, {"rid": "r-1"}, {"rid": "r-1", "stream": True}):
        answer = await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **fields})
        assert answer.headers["x-request-id"] == "r-1"


async def test_continuous_usage_counts_up_in_every_chunk(http):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": [300, 301, 302], "max_tokens": 5, "ignore_eos": True, "stream": True, "stream_options": options}
    answer = await http.post("/v1/completions", json=body)
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    usages = [json.loads(line.removeprefix("data: "))["usage"] for line in lines]
    counts = [usage["completion_tokens"] for usage in usages]
    assert all(usage["prompt_tokens"] == 3 for usage in usages)
    assert counts == sorted(counts)
    assert counts[-2:] == [5, 5]


async def test_null_equals_an_absent_field(http):
    names = ("model", "stream", "stream_options", "max_tokens", "stop", "user", "service_tier", "tools", "logprobs")
    answer = await http.post("/v1/completions", json={"prompt": "a", **dict.fromkeys(names)})
    assert answer.status_code == 200, answer.text


async def test_calls_that_are_answered_with_an_error_are_counted_by_reason(http, router):
    await http.post("/v1/completions", content=b"{")
    await http.post("/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": -1})
    await http.post("/v1/completions", json={"model": "another", "prompt": "a"})
    for number in range(3):
        await http.get(f"/no/such/call/{number}")
    await http.post("/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 1})
    text = router.server.context.metrics.render().decode()
    counted = {line for line in text.splitlines() if line.startswith("penstock:http_errors_total")}
    assert counted == {
        f'penstock:http_errors_total{{model_name="{MODEL}",reason="{reason}"}} {count}.0'
        for reason, count in (("INVALID_INPUT", 2), ("MODEL_NOT_FOUND", 1), ("NO_SUCH_CALL", 3))
    }
