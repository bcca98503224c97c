"""Tests the router's gRPC service over fake workers: streams, completions, stop strings, every kind of bad input."""

from __future__ import annotations

import asyncio
import re

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.errors import (
    DeadlineExceeded,
    InvalidInput,
    ModelNotFound,
    Overloaded,
    PenstockError,
    Unavailable,
    from_rpc_error,
)
from penstock.v1 import common_pb2, inference_pb2
from router.text.tokenizer import Tokenizer
from tests.support.router.router_fakes import EOS, MODEL, FakeWorker, expected_tokens, finish_of, running_router, until

TOKENIZER = Tokenizer.load(MODEL)


def text_tokens(text):
    return TOKENIZER._encode([text], False)[0]


def saying(token_ids):
    """Returns a `next_token` that emits these tokens by output position, for prompts of one token."""
    return lambda context, sampling: token_ids[len(context) - 1]


def request(text=None, token_ids=(), **sampling):
    return inference_pb2.GenerateRequest(
        text=text, token_ids=token_ids, sampling=common_pb2.SamplingParams(**{"max_tokens": 8, "seed": 7, **sampling})
    )


async def collect(call):
    return [message async for message in call]


async def read_tokens(call, count):
    """Reads messages until all completions together have this many tokens, and returns them."""
    messages = []
    async for message in call:
        messages.append(message)
        if sum(len(message.token_ids) for message in messages) >= count:
            break
    return messages


async def failure(call) -> PenstockError:
    with pytest.raises(grpc.RpcError) as caught:
        await collect(call) if hasattr(call, "__aiter__") else await call
    return from_rpc_error(caught.value)


async def test_a_stream_has_every_token_once_and_ends_with_usage_and_timing():
    worker = await FakeWorker().start()
    async with running_router(worker) as router:
        messages = await collect(router.stub.Generate(request("Hello there", max_tokens=20)))
        submit = worker.submits[0]
        token_ids = [token for message in messages for token in message.token_ids]
        assert list(submit.token_ids) == TOKENIZER._encode(["Hello there"], True)[0]
        assert submit.num_prompt_tokens == len(submit.token_ids)
        assert token_ids == expected_tokens(submit, 20)
        assert "".join(message.text for message in messages) == TOKENIZER.spelling.decode(token_ids)
        last = messages[-1]
        assert finish_of(last) == "length"
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(submit.token_ids), 20)
        assert last.timing.decode_worker == "decode-0"
        assert last.timing.first_token_ms > 0
        assert not any(message.finish_reason for message in messages[:-1])
        assert {message.request_id for message in messages} == {submit.request_id}
        assert last.model == "penstock-tiny"


async def test_defaults_are_resolved_before_a_worker_sees_the_request():
    worker = await FakeWorker(context_length=60).start()
    async with running_router(worker) as router:
        message = inference_pb2.GenerateRequest(token_ids=range(10, 20))
        messages = await collect(router.stub.Generate(message))
        sampling = worker.submits[0].sampling
        assert sampling.max_tokens == 50
        assert sampling.temperature == 1.0
        assert sampling.HasField("seed")
        assert messages[-1].usage.completion_tokens == 50


async def test_completions_of_one_prompt_have_different_seeds():
    worker = await FakeWorker().start()
    async with running_router(worker) as router:
        messages = await collect(router.stub.Generate(request("Once", n=3, max_tokens=6)))
        by_seed = {submit.sampling.seed: submit for submit in worker.submits}
        assert sorted(by_seed) == [7, 8, 9]
        for index in range(3):
            own = [message for message in messages if message.index == index]
            tokens = [token for message in own for token in message.token_ids]
            assert tokens == expected_tokens(by_seed[7 + index], 6)
            assert finish_of(own[-1]) == "length"
            assert own[-1].HasField("timing")
        assert [message.HasField("usage") for message in messages].count(True) == 1
        assert messages[-1].usage.completion_tokens == 18


async def test_a_long_prompt_is_computed_once_before_its_other_completions_start():
    worker = await FakeWorker(pause_at=0).start()
    async with running_router(worker) as router:
        reading = asyncio.create_task(collect(router.stub.Generate(request(token_ids=range(300, 400), n=3))))
        await worker.until(lambda fake: len(fake.submits) == 1)
        worker.pause_at = None
        worker.resume.set()
        messages = await reading
        assert len(worker.submits) == 3
        assert messages[-1].usage.completion_tokens == 24


@pytest.mark.parametrize("tokens_per_frame", [1, 3, 100])
async def test_a_stop_string_across_tokens_ends_the_stream_and_the_work(tokens_per_frame):
    said = [token for text in (" one", " two", " st", "op", " here", " and", " on") for token in text_tokens(text)]
    worker = await FakeWorker(next_token=saying(said * 9), tokens_per_frame=tokens_per_frame, step_s=0.01).start()
    async with running_router(worker) as router:
        messages = await collect(router.stub.Generate(request(token_ids=[300], stop=["stop h", "zzz"], max_tokens=60)))
        assert "".join(message.text for message in messages) == " one two "
        assert finish_of(messages[-1]) == "stop"
        assert messages[-1].HasField("timing")
        tokens = [token for message in messages for token in message.token_ids]
        assert tokens == said[: len(tokens)]
        assert messages[-1].usage.completion_tokens == len(tokens) <= said.index(text_tokens(" and")[0])
        if tokens_per_frame < 60:
            await worker.until(lambda fake: fake.cancelled == [fake.submits[0].stream_id])


async def test_a_partial_match_of_a_stop_string_is_emitted_at_the_end():
    said = text_tokens(" almost sto")
    worker = await FakeWorker(next_token=saying([*said, EOS])).start()
    async with running_router(worker) as router:
        messages = await collect(router.stub.Generate(request(token_ids=[300], stop=["stop"], max_tokens=50)))
        assert "".join(message.text for message in messages) == " almost sto"
        assert [token for message in messages for token in message.token_ids] == [*said, EOS]


async def test_stop_strings_do_not_match_before_min_tokens():
    said = text_tokens(" stop") * 8
    worker = await FakeWorker(next_token=saying(said)).start()
    async with running_router(worker) as router:
        wanted = request(token_ids=[300], stop=["stop"], min_tokens=3 * len(text_tokens(" stop")), max_tokens=len(said))
        messages = await collect(router.stub.Generate(wanted))
        assert "".join(message.text for message in messages) == " stop stop stop "


async def test_log_probabilities_include_the_tokens_texts():
    worker = await FakeWorker().start()
    async with running_router(worker) as router:
        messages = await collect(router.stub.Generate(request("Hi", logprobs=2, max_tokens=4)))
        logprobs = [token_logprob for message in messages for token_logprob in message.logprobs]
        tokens = [token for message in messages for token in message.token_ids]
        assert [token_logprob.token_id for token_logprob in logprobs] == tokens
        assert [logprob.token for logprob in logprobs] == [TOKENIZER.spelling.token_text(token) for token in tokens]
        assert [top.token_id for top in logprobs[0].top] == [300, 301]
        assert logprobs[0].top[0].token == TOKENIZER.spelling.token_text(300)


async def test_a_chat_is_rendered_with_the_models_template():
    worker = await FakeWorker().start()
    async with running_router(worker) as router:
        chat = [inference_pb2.ChatMessage(role="user", content="Hello!")]
        await collect(router.stub.Generate(inference_pb2.GenerateRequest(messages=chat)))
        expected = TOKENIZER._encode(["<|bos|><|user|>Hello!<|end|><|assistant|>"], False)[0]
        assert list(worker.submits[0].token_ids) == expected
        tokenized = await router.stub.Tokenize(inference_pb2.TokenizeRequest(messages=chat))
        assert list(tokenized.token_ids) == expected


async def test_tokenize_and_list_models():
    worker = await FakeWorker().start()
    async with running_router(worker) as router:
        tokenized = await router.stub.Tokenize(inference_pb2.TokenizeRequest(text="the cat"))
        assert list(tokenized.token_ids) == TOKENIZER._encode(["the cat"], True)[0]
        assert "".join(tokenized.tokens) == "<|bos|>the cat"
        models = (await router.stub.ListModels(inference_pb2.ListModelsRequest())).models
        assert [(model.id, model.context_length, model.revision) for model in models] == [("penstock-tiny", 2048, "r1")]


BAD_REQUESTS = {
    "no prompt": (inference_pb2.GenerateRequest(), "prompt", "is empty"),
    "empty text": (request(""), "prompt", "is empty"),
    "two prompts": (request("a", token_ids=[1]), "prompt", "text and token_ids; give exactly one"),
    "prompt too long": (request(token_ids=[300] * 3000), "prompt", "has 3000 tokens.*2048.*2047 or fewer"),
    "max_tokens": (request("a", max_tokens=5000), "sampling.max_tokens", "is 5000.*give at most 2046"),
    "temperature": (request("a", temperature=-1.0), "sampling.temperature", "is -1; give a value from 0"),
    "nan": (request("a", top_p=float("nan")), "sampling.top_p", "is nan; give a finite number"),
    "n": (request("a", n=100000), "sampling.n", "is 100000; give a value from 1 to"),
    "token id": (request(token_ids=[5, 999999]), "token_ids", "999999; the vocabulary ends at 2047"),
    "role": (
        inference_pb2.GenerateRequest(messages=[inference_pb2.ChatMessage(role="robot", content="x")]),
        r"messages\[0\].role",
        "'robot'; give one of system, user, assistant",
    ),
    "request id": (inference_pb2.GenerateRequest(text="a", request_id="x" * 500), "request_id", "500 characters"),
}


@pytest.fixture(name="router")
async def _router():
    worker = await FakeWorker().start()
    async with running_router(worker) as router:
        yield router


async def test_bad_requests_are_refused_by_field_value_and_fix(router):
    for message, field, problem in BAD_REQUESTS.values():
        error = await failure(router.stub.Generate(message))
        assert isinstance(error, InvalidInput), error
        assert re.match(f"{field}: .*{problem}", error.message), error.message
    assert await collect(router.stub.Generate(request("still up")))


async def test_an_unknown_model_is_not_found(router):
    error = await failure(router.stub.Generate(inference_pb2.GenerateRequest(text="a", model="gpt-5")))
    assert isinstance(error, ModelNotFound)
    assert error.message == "model: 'gpt-5' is not served here; use 'penstock-tiny'"
    assert isinstance(
        await failure(router.stub.Tokenize(inference_pb2.TokenizeRequest(text="a", model="x"))), ModelNotFound
    )


def _string_field(number: int, raw: bytes) -> bytes:
    return bytes([number << 3 | 2, len(raw)]) + raw


@pytest.mark.parametrize(
    ("method", "raw", "field"),
    [
        ("Generate", _string_field(2, b"ab\xff\xfe"), "text"),
        ("Generate", _string_field(4, _string_field(1, b"user") + _string_field(2, b"\xc3")), "messages[0].content"),
        ("Generate", _string_field(5, bytes([13 << 3 | 2, 2]) + b"\xe2\x82"), "sampling.stop[0]"),
        ("Generate", b"\x12\xff\xff", "request"),
        ("Tokenize", _string_field(2, b"\x80"), "text"),
    ],
)
async def test_invalid_utf8_is_an_invalid_argument(router, method, raw, field):
    path = f"/penstock.v1.Inference/{method}"
    call = router.channel.unary_stream(path) if method == "Generate" else router.channel.unary_unary(path)
    answer = call(raw)
    with pytest.raises(grpc.RpcError) as caught:
        await answer.read() if method == "Generate" else await answer
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    status = dict(caught.value.trailing_metadata())["grpc-status-details-bin"]
    bad = error_details_pb2.BadRequest()
    assert any(detail.Unpack(bad) for detail in status_pb2.Status.FromString(status).details)
    assert bad.field_violations[0].field == field


async def test_a_deadline_bounds_the_whole_request():
    worker = await FakeWorker(pause_at=3).start()
    async with running_router(worker) as router:
        error = await failure(router.stub.Generate(request("slow"), timeout=2.0))
        assert isinstance(error, DeadlineExceeded)
        await worker.until(lambda fake: len(fake.cancelled) == 1)
        assert worker.submits[0].timeout_ms <= 2010  # gRPC sends a deadline of seconds rounded up to 10 ms


async def test_the_default_deadline_bounds_a_request_without_one():
    worker = await FakeWorker(pause_at=3).start()
    async with running_router(worker, default_timeout_s=2.0) as router:
        error = await failure(router.stub.Generate(request("slow")))
        assert isinstance(error, DeadlineExceeded)
        assert "did not end within its 2 s" in error.message
        await worker.until(lambda fake: len(fake.cancelled) == 1)


async def test_a_cancelled_call_frees_its_worker_at_once():
    worker = await FakeWorker(pause_at=2).start()
    async with running_router(worker) as router:
        call = router.stub.Generate(request("going", n=2))
        await call.read()
        call.cancel()
        await worker.until(lambda fake: len(fake.cancelled) == 2)
        await until(lambda: router.server.context.gate.admission.num_inside == 0)
        assert not worker.running


async def test_requests_beyond_the_limit_are_refused_with_a_hint():
    worker = await FakeWorker(pause_at=0).start()
    async with running_router(worker, max_inflight=1) as router:
        first = router.stub.Generate(request("one"))
        await worker.until(lambda fake: len(fake.submits) == 1)
        error = await failure(router.stub.Generate(request("two")))
        assert isinstance(error, Overloaded)
        assert 1.0 <= error.retry_after_s <= 1.5
        worker.resume.set()
        assert len(await collect(first)) > 0


async def test_without_a_worker_health_is_not_serving_and_requests_wait():
    worker = await FakeWorker().start()
    port = int(worker.address.rsplit(":", 1)[1])
    await worker.stop()
    async with running_router(worker, wait=False) as router:
        health = health_pb2_grpc.HealthStub(router.channel)
        check = health_pb2.HealthCheckRequest(service="penstock.v1.Inference")
        assert (await health.Check(check)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        error = await failure(router.stub.Generate(request("now"), timeout=0.3))
        assert isinstance(error, DeadlineExceeded | Unavailable)
        waiting = asyncio.create_task(collect(router.stub.Generate(request("soon"))))
        await worker.start(port)
        assert len(await waiting) > 0
        assert (await health.Check(check)).status == health_pb2.HealthCheckResponse.SERVING
