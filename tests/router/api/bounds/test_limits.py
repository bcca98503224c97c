"""Tests that every size of a public request has a limit, and that no bytes cause INTERNAL or kill a router."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from penstock.errors import InvalidInput, Overloaded, from_rpc_error, to_status
from penstock.v1 import common_pb2, inference_pb2
from tests.router.api.test_grpc_service import failure
from tests.support.router.router_fakes import MODEL, FakeWorker, RunningRouter, running_router
from tests.support.suite.examples import examples

SMALL = {
    "request_bytes": 40_000, "header_bytes": 2_000, "prompt_characters": 1_000, "prompt_tokens": 100, "messages": 3,
    "completions": 8, "stop_token_ids": 4, "logit_bias": 5, "body_timeout_s": 0.3,
}  # fmt: skip
METHODS = ("Generate", "Tokenize", "ListModels")
CALM = {
    grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}  # fmt: skip


@pytest.fixture(name="router")
async def _router():
    async with running_router(await FakeWorker().start(), limits=SMALL) as router:
        yield router


def generate(**fields: object) -> inference_pb2.GenerateRequest:
    sampling = {
        name: fields.pop(name) for name in list(fields) if name in common_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    }
    return inference_pb2.GenerateRequest(sampling=common_pb2.SamplingParams(**sampling), **fields)


def says(*contents: str, role: str = "user") -> list[inference_pb2.ChatMessage]:
    return [inference_pb2.ChatMessage(role=role, content=content) for content in contents]


def emits(*counts: int) -> list[inference_pb2.Emitted]:
    """Returns finished completions with so many tokens outside the vocabulary, of which only the number should be
    examined."""
    return [
        inference_pb2.Emitted(index=index, token_ids=[2**31] * count, finished=True)
        for index, count in enumerate(counts)
    ]


TOO_MUCH = {
    "text": (generate(text="x" * 1001), "text: has 1001 characters; give 1000 or fewer"),
    "tokens of a text": (generate(text="a b c " * 150), "prompt: has .* tokens; give 100 or fewer"),
    "token ids": (generate(token_ids=[300] * 101), "token_ids: has 101 tokens; give 100 or fewer"),
    "messages": (generate(messages=says("a", "b", "c", "d")), "messages: has 4 messages; give 3 or fewer"),
    "content": (generate(messages=says("x" * 600, "x" * 600)), "messages: has 1200 characters of content"),
    "role": (generate(messages=says("x", role="r" * 33)), r"messages\[0\].role: has 33 characters"),
    "model": (generate(text="x", model="m" * 257), "model: has 257 characters; give 256 or fewer"),
    "request id": (generate(text="x", request_id="r" * 129), "request_id: has 129 characters; give 128 or fewer"),
    "lines in an id": (generate(text="x", request_id="a\nERROR forged"), "request_id: has unprintable characters"),
    "n": (generate(text="x", n=9), "sampling.n: is 9; give a value from 1 to 8"),
    "stop strings": (generate(text="x", stop=["s"] * 17), "sampling.stop: has 17 strings; give at most 16"),
    "a stop string": (generate(text="x", stop=["s" * 257]), "sampling.stop: has a string of 257 characters"),
    "stop tokens": (generate(text="x", stop_token_ids=[1] * 5), "sampling.stop_token_ids: has 5 tokens; give 4"),
    "biases": (generate(text="x", logit_bias=dict.fromkeys(range(6), 1.0)), "sampling.logit_bias: has 6 entries"),
    "emitted": (generate(text="x", emitted=emits(*[1] * 9)), "emitted: has 9 completions; give 8 or fewer"),
    "emitted tokens": (
        generate(text="x", emitted=emits(60, 60)),
        "emitted: has 120 tokens over all completions; give 100",
    ),
    "emitted of one": (
        generate(text="x", emitted=emits(9), max_tokens=8, seed=1),
        r"emitted\[0\].token_ids: hold 9 tokens, but max_tokens is 8; raise it to generate more tokens",
    ),
    "logprobs": (generate(text="x", logprobs=21), "sampling.logprobs: is 21; give a value from 0 to 20"),
}


@pytest.mark.parametrize("case", TOO_MUCH)
async def test_too_large_requests_are_refused_by_field(router, case):
    message, says_so = TOO_MUCH[case]
    with pytest.raises(InvalidInput, match=says_so):
        raise await failure(router.stub.Generate(message))


async def test_tokenize_has_the_same_limits(router):
    for message, says_so in (
        (inference_pb2.TokenizeRequest(text="x" * 1001), "text: has 1001"),
        (inference_pb2.TokenizeRequest(text="a b c " * 150), "prompt: has .* tokens"),
        (inference_pb2.TokenizeRequest(messages=says("a", "b", "c", "d")), "messages: has 4"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            await router.stub.Tokenize(message)
        with pytest.raises(InvalidInput, match=says_so):
            raise from_rpc_error(caught.value)


async def test_grpc_bounds_messages_and_metadata(router):
    error = await failure(router.stub.Generate(generate(text="x" * 50_000)))
    assert isinstance(error, Overloaded)
    assert "message larger than max" in error.message
    with pytest.raises(grpc.RpcError) as caught:
        await router.stub.ListModels(inference_pb2.ListModelsRequest(), metadata=(("x-long", "x" * 4000),))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_http_bounds_bodies_and_headers(router):
    async with httpx.AsyncClient(base_url=router.http_url, timeout=60) as http:
        prompts = json.dumps({"prompt": ["a", "b", "c"], "n": 3})

        async def endless():
            for _ in range(1000):
                yield b" " * 1000

        for request, status, param, says_so in (
            ({"content": b"x" * 40_001}, 413, "body", "body: has 40001 bytes or more; send 40000 or fewer"),
            ({"content": endless()}, 413, "body", "send 40000 or fewer"),
            ({"content": b"{}", "headers": {"x-long": "x" * 2500}}, 431, "headers", "send 2000 or fewer"),
            ({"content": prompts}, 400, "n", "n: has 9 completions over all prompts; give 8 or fewer"),
        ):
            answer = await http.post("/v1/completions", **request)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (status, param)
            assert says_so in error["message"]


async def test_bodies_in_memory_are_bounded_together():
    limits = SMALL | {"bodies_bytes": 1500, "body_timeout_s": 20.0}
    async with running_router(await FakeWorker().start(), limits=limits) as router:
        async with httpx.AsyncClient(base_url=router.http_url, timeout=60.0) as http:
            body = {"prompt": "x" * 900, "max_tokens": 1}
            for _ in range(3):  # a parsed body no longer counts
                assert (await http.post("/v1/completions", json=body)).status_code in (200, 400)
            _, writer = await asyncio.open_connection("127.0.0.1", router.server.ports.http)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2000\r\n\r\n" + b" " * 1000)
            async with asyncio.timeout(60.0):
                while (answer := await http.post("/v1/completions", json=body)).status_code != 503:
                    pass  # the other body has not arrived yet
            assert "limits.bodies_bytes = 1500" in answer.json()["error"]["message"]
            assert answer.headers["retry-after"] == "1"
            writer.close()
            async with asyncio.timeout(60.0):
                while (await http.post("/v1/completions", json=body)).status_code == 503:
                    pass  # the other connection is not closed yet


async def test_a_body_that_never_arrives_times_out(router):
    reader, writer = await asyncio.open_connection("127.0.0.1", router.server.ports.http)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    async with asyncio.timeout(60):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"body: did not arrive within 0.3 s" in answer
    writer.close()


async def test_metrics_require_their_token_if_tenants_are_configured(tmp_path):
    path = tmp_path / "token"
    path.write_text("scrape-me-please\n")
    path.chmod(0o600)
    tenants = {"acme": {"subjects": ["acme"]}}
    for options, shown, status in (
        ({"tenants": tenants}, None, 403),
        ({"tenants": tenants, "metrics_token_file": str(path)}, "scrape-me-please", 200),
        ({"metrics_token_file": str(path)}, "scrape-me", 401),
        ({"metrics_token_file": str(path)}, None, 401),
    ):
        async with running_router(await FakeWorker().start(), wait=False, **options) as router:
            async with httpx.AsyncClient(base_url=router.http_url, timeout=60) as http:
                headers = {"authorization": f"Bearer {shown}"} if shown else {}
                assert (await http.get("/metrics", headers=headers)).status_code == status


def test_error_messages_fit_into_trailers_whatever_value_they_repeat():
    for text in ("x" * 100_000, "\N{PILE OF POO}" * 100_000):
        status = to_status(InvalidInput("field", f"is {text}"))
        assert len(status.SerializeToString()) < 2500
        assert status.message.endswith("...")


class Background:
    """Runs a router in a thread of its own, since hypothesis makes blocking calls."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._stack = contextlib.AsyncExitStack()
        self.router = self._run(self._start())
        self.channel = grpc.insecure_channel(self.router.grpc_address)

    async def _start(self) -> RunningRouter:
        worker = await FakeWorker().start()
        return await self._stack.enter_async_context(running_router(worker, limits=SMALL, default_timeout_s=60.0))

    def _run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60.0)

    def code(self, method: str, data: bytes) -> grpc.StatusCode:
        """Returns the status of a call with these bytes as its message."""
        path = f"/penstock.v1.Inference/{method}"
        call = self.channel.unary_stream if method == "Generate" else self.channel.unary_unary
        try:
            answer = call(path)(data, timeout=60)
            if method == "Generate":
                for _ in answer:
                    pass
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    def is_well(self) -> bool:
        answer = health_pb2_grpc.HealthStub(self.channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    def stop(self) -> None:
        self.channel.close()
        self._run(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60.0)
        self._loop.close()


@pytest.fixture(name="background", scope="module")
def _background() -> Iterator[Background]:
    background = Background()
    yield background
    background.stop()


fuzz = examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
uint32 = st.integers(0, 2**32 - 1) | st.integers(0, 40)
floats = st.floats(width=32) | st.just(1.0)
texts = st.text(max_size=30)
sampling = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": uint32, "min_tokens": uint32, "temperature": floats, "top_k": uint32, "top_p": floats,
        "min_p": floats, "repetition_penalty": floats, "presence_penalty": floats, "frequency_penalty": floats,
        "logit_bias": st.dictionaries(uint32, floats, max_size=7), "seed": st.integers(0, 2**64 - 1), "n": uint32,
        "stop": st.lists(texts, max_size=20), "stop_token_ids": st.lists(uint32, max_size=6),
        "ignore_eos": st.booleans(), "logprobs": uint32,
    },
)  # fmt: skip
messages = st.lists(st.builds(inference_pb2.ChatMessage, role=texts | st.just("user"), content=texts), max_size=5)
requests = st.builds(
    inference_pb2.GenerateRequest,
    model=st.just("") | st.just(MODEL.name) | texts,
    text=st.none() | texts,
    token_ids=st.just([]) | st.lists(uint32, max_size=120) | st.lists(st.integers(0, 2000), max_size=8),
    messages=st.just([]) | messages,
    sampling=st.builds(lambda fields: common_pb2.SamplingParams(**fields), sampling),
    request_id=texts,
    lane=st.integers(0, 9),
)


@fuzz
@given(request=requests)
def test_no_request_causes_an_internal_error(background, request):
    assert background.code("Generate", request.SerializeToString()) in CALM
    tokenize = inference_pb2.TokenizeRequest(model=request.model, messages=request.messages)
    assert background.code("Tokenize", tokenize.SerializeToString()) in CALM
    assert background.is_well()


@fuzz
@given(method=st.sampled_from(METHODS), data=st.binary(max_size=200), request=requests, cut=st.integers(0, 60))
def test_no_bytes_cause_an_internal_error(background, method, data, request, cut):
    whole = request.SerializeToString()
    for message in (data, whole[:cut] + data + whole[cut:]):
        assert background.code(method, message) in CALM
    assert background.is_well()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
FIELDS = (
    "model", "prompt", "messages", "stream", "stream_options", "max_tokens", "min_tokens", "temperature", "top_k",
    "top_p",
    "logit_bias", "seed", "n", "stop", "stop_token_ids", "logprobs", "top_logprobs", "max_completion_tokens", "tools",
)  # fmt: skip
bodies = st.builds(
    lambda fields, usual: json.dumps(usual | fields).encode(errors="replace"),
    st.dictionaries(st.sampled_from(FIELDS) | texts, json_values, max_size=4),
    st.sampled_from([{}, {"prompt": "x", "max_tokens": 2}, {"messages": [{"role": "user", "content": "x"}]}]),
)


@fuzz
@given(path=st.sampled_from(["completions", "chat/completions"]), body=bodies | st.binary(max_size=60))
def test_no_body_causes_a_server_error(background, path, body):
    answer = httpx.post(f"{background.router.http_url}/v1/{path}", content=body, timeout=60)
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert answer.json()["error"]["message"]
    assert background.is_well()


@pytest.mark.parametrize("messages", [False, True])
async def test_a_text_larger_than_any_context_is_refused_untokenized(monkeypatch, messages):
    async with running_router(await FakeWorker(context_length=2048).start()) as router:

        async def encode(*_: object, **__: object) -> list[int]:
            raise AssertionError("it was tokenized")

        for name in ("encode", "encode_chat"):
            monkeypatch.setattr(router.server.preparer.tokenizer, name, encode)
        text = "x" * (64 * 2048 + 1)
        asked = generate(messages=says(text)) if messages else generate(text=text)
        error = await failure(router.stub.Generate(asked))
        assert isinstance(error, InvalidInput)
        spelt = inference_pb2.TokenizeRequest(text=asked.text or None, messages=asked.messages)
        with pytest.raises(grpc.RpcError, match="has 131073 characters"):
            await router.stub.Tokenize(spelt)
        assert "has 131073 characters" in error.message
        assert "give 131072 or fewer" in error.message
