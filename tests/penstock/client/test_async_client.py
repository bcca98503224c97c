"""Tests the asyncio client against a scripted server, where it differs from the blocking one."""

from __future__ import annotations

import asyncio
import gc

import pytest

from penstock import AsyncClient
from penstock.client.retry import RetryPolicy
from penstock.errors import Cancelled, DeadlineExceeded, InternalError, ModelNotFound, Unavailable
from tests.support.router.fake_inference import FakeInference, FakeServer, say

QUICK = RetryPolicy(max_attempts=3, initial_s=0.01, max_s=0.02)
HANG = FakeInference.HANG


async def cancelled(service: FakeInference) -> bool:
    return await asyncio.to_thread(service.cancelled.wait, 5)


async def test_streams_run_side_by_side() -> None:
    service = FakeInference(*(say("a", "b") for _ in range(4)))
    with FakeServer(service) as server:
        async with AsyncClient(server.address) as client:
            results = await asyncio.gather(*(client.complete(f"prompt {number}") for number in range(4)))
    assert [result.text for result in results] == ["ab"] * 4


async def test_a_retry_continues_at_the_next_router_after_the_received_tokens() -> None:
    first, second = say("a", "b")
    service = FakeInference([Unavailable("busy")], say("ok"), [first, Unavailable("gone")])
    other = FakeInference([second])
    with FakeServer(service) as server, FakeServer(other) as spare:
        async with AsyncClient(server.address, retry=QUICK) as client:
            assert (await client.complete("Hello")).text == "ok"
        async with AsyncClient([server.address, spare.address], retry=QUICK) as client:
            assert (await client.complete("Hello")).text == "ab"
    assert [list(completion.token_ids) for completion in other.requests[0].emitted] == [list(first.token_ids)]
    assert len(service.requests) == 3


async def test_errors_are_typed_and_the_deadline_holds() -> None:
    with FakeServer(FakeInference([ModelNotFound("no model 'x'")], [HANG], say("a", "b")[:1])) as server:
        async with AsyncClient(server.address) as client:
            with pytest.raises(ModelNotFound, match="no model 'x'"):
                await client.complete("Hello")
            with pytest.raises(DeadlineExceeded):
                await client.complete("Hello", timeout_s=1.0)
            with pytest.raises(InternalError, match="without a finish reason"):
                await client.complete("Hello")


async def test_leaving_the_block_cancels_the_call() -> None:
    service = FakeInference([say("a", "b")[0], HANG])
    with FakeServer(service) as server:
        async with AsyncClient(server.address) as client:
            async with client.generate("Hello") as stream:
                assert (await anext(stream)).text == "a"
            assert await cancelled(service)
            assert [chunk async for chunk in stream] == []


async def test_closing_wakes_the_reader_with_cancelled() -> None:
    service = FakeInference([HANG])
    with FakeServer(service) as server:
        async with AsyncClient(server.address) as client:
            stream = client.generate("Hello")
            reader = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
            async with asyncio.timeout(60):
                while not service.requests:  # noqa: ASYNC110 - the fake's thread notifies nobody
                    await asyncio.sleep(0.01)
            stream.close()
            with pytest.raises(Cancelled):
                await asyncio.wait_for(reader, 60)


async def test_cancelling_the_task_cancels_the_call() -> None:
    service = FakeInference([say("a", "b")[0], HANG])
    with FakeServer(service) as server:
        async with AsyncClient(server.address) as client:
            task = asyncio.create_task(client.complete("Hello"))
            assert await asyncio.to_thread(service.called.wait, 5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await cancelled(service)


async def test_an_abandoned_stream_is_cancelled() -> None:
    service = FakeInference([say("a", "b")[0], HANG])
    with FakeServer(service) as server:
        async with AsyncClient(server.address) as client:
            async for _chunk in client.generate("Hello"):
                break
            gc.collect()
            assert await cancelled(service)


async def test_texts_are_tokenized_and_models_listed() -> None:
    with FakeServer(FakeInference([Unavailable("starting")])) as server:
        async with AsyncClient(server.address, retry=QUICK) as client:
            assert (await client.tokenize("two words")).tokens == ("two", "words")
            assert [model.id for model in await client.list_models()] == ["fake"]


async def test_a_lane_is_sent() -> None:
    service = FakeInference(say("x"))
    with FakeServer(service) as server:
        async with AsyncClient(server.address) as client:
            await client.complete("Hello", lane="bulk")
    assert service.requests[0].lane == 3
