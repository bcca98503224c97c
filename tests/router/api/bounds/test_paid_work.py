"""Tests that work before admission is charged first, and is not done for a caller that no longer waits."""

from __future__ import annotations

import asyncio
import random
import threading

import grpc
import httpx
import pytest

from penstock.config.admission import AdmissionConfig, TenantLimits
from penstock.errors import DeadlineExceeded, Overloaded, from_rpc_error
from penstock.types import Lane
from penstock.v1 import inference_pb2
from router.admission.admission_policy import AdmissionPolicy
from router.admission.interface import AdmissionRequest, Dispatched, RefusalReason, Refused
from tests.router.api.test_grpc_service import failure, request
from tests.support.router.router_fakes import FakeWorker, running_router, until

BURST = 100
METERED = {"tenant": {"tokens_per_s": 0.001, "burst_tokens": BURST}}
LONG = "a long text, tokenized in a thread. " * 200


def offer(policy, key, prompt_tokens, prepaid_tokens, num_sequences=1):
    wanted = AdmissionRequest(key, Lane.STANDARD, "", prompt_tokens, 1, 0.0, 100.0, num_sequences, prepaid_tokens)
    return policy.offer(wanted, 0.0)


def policy_with(**limits):
    return AdmissionPolicy(AdmissionConfig(tenant=TenantLimits(**limits)), random.Random(1))


def test_prepaid_tokens_are_part_of_the_price():
    policy = policy_with(tokens_per_s=0.001, burst_tokens=BURST)
    assert not policy.prepay("", 60, 0.0)
    assert policy.prepay("", 60, 0.0) > 0  # 40 tokens are left
    assert isinstance(offer(policy, 1, 70, 60), Dispatched)  # 71 tokens in all, of which 60 are prepaid
    assert not policy.prepay("", 29, 0.0)
    assert policy.prepay("", 1, 0.0) > 0


def test_a_refusal_refunds_prepaid_tokens_unless_the_caller_causes_it():
    policy = policy_with(tokens_per_s=0.001, burst_tokens=BURST, max_requests=1)
    late = AdmissionRequest(1, Lane.STANDARD, "", 50, 1, 0.0, -1.0, prepaid_tokens=50)
    policy.prepay("", 50, 0.0)
    answer = policy.offer(late, 0.0)
    assert isinstance(answer, Refused)
    assert answer.reason is RefusalReason.DEADLINE
    policy.prepay("", 50, 0.0)
    assert isinstance(offer(policy, 2, 50, 50), Dispatched)  # 49 tokens are left
    policy.prepay("", 40, 0.0)
    answer = offer(policy, 3, 40, 40)
    assert isinstance(answer, Refused)
    assert answer.reason is RefusalReason.TENANT_REQUESTS
    assert policy.prepay("", 10, 0.0) > 0


class Counted:
    """Counts what a router's tokenizer encodes. While `hold` is set, its threads wait."""

    def __init__(self, router, monkeypatch) -> None:
        tokenizer = router.server._tokenizer
        self.num_encoded = 0
        self.threads = tokenizer._threads
        self.is_open = threading.Event()
        self.is_open.set()
        encode = tokenizer._encode

        def counted(*args):
            self.num_encoded += 1
            assert self.is_open.wait(60.0)
            return encode(*args)

        monkeypatch.setattr(tokenizer, "_encode", counted)


async def refused(call):
    with pytest.raises(Overloaded, match="more than this tenant's rate of tokens/s has left") as caught:
        raise await failure(call)
    assert caught.value.retry_after_s > 1.0


async def test_a_caller_without_budget_is_refused_before_tokenizing(monkeypatch):
    async with running_router(await FakeWorker().start(), admission=METERED) as router:
        counted = Counted(router, monkeypatch)
        # 101 tokens by its size, which only a full bucket covers
        whole = inference_pb2.TokenizeRequest(text="word " * 80)
        num_tokens = len((await router.stub.Tokenize(whole)).token_ids)
        assert num_tokens > 20
        assert counted.num_encoded == 1
        await refused(router.stub.Tokenize(whole))
        await refused(router.stub.Generate(request("word " * 80)))
        chat = [inference_pb2.ChatMessage(role="user", content="word " * 80)]
        await refused(router.stub.Generate(inference_pb2.GenerateRequest(messages=chat)))
        async with httpx.AsyncClient(base_url=router.http_url, timeout=60.0) as http:
            answer = await http.post("/v1/completions", json={"prompt": "word " * 80})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) > 1
        assert counted.num_encoded == 1
        # It has paid for its tokens, but not for the output estimate.
        left = BURST - num_tokens
        await refused(router.stub.Tokenize(inference_pb2.TokenizeRequest(text="x" * 4 * left)))
        await router.stub.Tokenize(inference_pb2.TokenizeRequest(text="x" * 4 * (left - 2)))


async def test_a_full_router_refunds_what_was_prepaid():
    worker = await FakeWorker(pause_at=0).start()
    async with running_router(worker, max_inflight=1, admission=METERED) as router:
        first = router.stub.Generate(request("one", max_tokens=5))
        await worker.until(lambda fake: len(fake.submits) == 1)
        accounts = router.server.context.gate.admission.accounts
        before_s = accounts.rate_wait_s("", BURST, 0.0)
        assert before_s > 0
        error = await failure(router.stub.Generate(request("word " * 40)))
        assert isinstance(error, Overloaded)
        assert "limit of 1 requests in flight" in error.message
        assert accounts.rate_wait_s("", BURST, 0.0) <= before_s
        first.cancel()


@pytest.fixture(name="busy")
async def _busy(monkeypatch):
    """Yields a router whose tokenizer threads are all busy."""
    async with running_router(await FakeWorker().start(), max_timeout_s=60.0) as router:
        counted = Counted(router, monkeypatch)
        counted.is_open.clear()
        calls = [asyncio.ensure_future(failure(router.stub.Generate(request(LONG)))) for _ in range(2)]
        await until(lambda: counted.num_encoded == 2)
        yield router, counted
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        counted.is_open.set()


async def test_the_deadline_covers_the_wait_for_a_thread(busy):
    router, counted = busy
    async with httpx.AsyncClient(base_url=router.http_url, timeout=60.0) as http:
        answer = await http.post("/v1/completions", json={"prompt": LONG}, headers={"x-request-timeout": "0.3"})
    assert answer.status_code == 504
    for call in (
        router.stub.Generate(request(LONG), timeout=0.3),
        router.stub.Tokenize(inference_pb2.TokenizeRequest(text=LONG), timeout=0.3),
    ):
        assert isinstance(await failure(call), DeadlineExceeded)
    await until(lambda: not counted.threads.num_queued)
    counted.is_open.set()
    await until(lambda: counted.threads._num_idle == 2)
    assert counted.num_encoded == 2  # nothing was tokenized for them


async def test_work_of_a_client_that_left_is_not_done(busy):
    router, counted = busy
    call = router.stub.Generate(request(LONG))
    async with httpx.AsyncClient(base_url=router.http_url, timeout=60.0) as http:
        posting = asyncio.create_task(http.post("/v1/completions", json={"prompt": LONG}))
        await until(lambda: counted.threads.num_queued == 2)
        call.cancel()
        posting.cancel()
        await until(lambda: not counted.threads.num_queued)
    counted.is_open.set()
    await until(lambda: counted.threads._num_idle == 2)
    assert counted.num_encoded == 2


async def test_a_full_tokenizer_queue_is_refused(monkeypatch):
    limits = {"text_queue_characters": len(LONG)}
    async with running_router(await FakeWorker().start(), limits=limits) as router:
        counted = Counted(router, monkeypatch)
        counted.is_open.clear()
        calls = [router.stub.Tokenize(inference_pb2.TokenizeRequest(text=LONG)) for _ in range(4)]
        answers = [asyncio.ensure_future(answer_of(call)) for call in calls]
        done, _ = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        error = done.pop().result()
        assert isinstance(error, Overloaded)
        assert "tokenizer: the queue is full (limits.text_queue_characters" in error.message
        counted.is_open.set()


async def answer_of(call):
    try:
        return await call
    except grpc.RpcError as error:
        return from_rpc_error(error)
