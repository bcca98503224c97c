"""Tests that a call opened in advance serves one prefill, is dropped when it breaks, and ends when it stays unused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from decode_worker.prefill import warm_calls
from decode_worker.prefill.warm_calls import WarmCalls, open_call
from penstock.rpc.server import make_channel
from penstock.v1 import worker_pb2, worker_pb2_grpc
from tests.support.serving import until
from worker.channels import Channels


class CallCounter(worker_pb2_grpc.PrefillWorkerServicer):
    """Counts open calls and closes each call after its first command."""

    def __init__(self) -> None:
        self.num_open = self.num_opened = 0

    async def Prefill(
        self, request_iterator: AsyncIterator[worker_pb2.PrefillCommand], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.PrefillEvent]:
        self.num_opened += 1
        self.num_open += 1
        try:
            async for _ in request_iterator:
                yield worker_pb2.PrefillEvent(closed=worker_pb2.PrefillClosed())
                return
        finally:
            self.num_open -= 1


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[CallCounter, WarmCalls, Channels, str]]:
    counting, server = CallCounter(), grpc.aio.server()
    worker_pb2_grpc.add_PrefillWorkerServicer_to_server(counting, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channels = Channels(make_channel)
    warm = WarmCalls(channels)
    try:
        yield counting, warm, channels, f"127.0.0.1:{port}"
    finally:
        await warm.close()
        await channels.close()
        await server.stop(0)


async def start(call: warm_calls.WarmCall) -> list[str]:
    call.commands.put_nowait(worker_pb2.PrefillCommand(start=worker_pb2.PrefillStart(request_id="one")))
    return [str(event.WhichOneof("event")) async for event in call.take_over()]


async def test_an_opened_call_serves_one_prefill() -> None:
    async with serving() as (counting, warm, channels, address):
        assert warm.take(address) is None
        async with channels.use(address) as channel:
            open_call(channel, warm_calls.asyncio.Queue()).cancel()
        warm.keep(address)
        warm.keep(address)
        await until(lambda: counting.num_open == 1)
        taken = warm.take(address)
        assert taken is not None
        assert warm.take(address) is None
        async with channels.use(address):
            assert await start(taken) == ["closed"]
        await until(lambda: counting.num_open == 0)


async def test_an_unused_call_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_calls, "_WARM_S", 0.2)
    async with serving() as (counting, warm, _, address):
        warm.keep(address)
        await until(lambda: counting.num_opened == 1)
        await until(lambda: counting.num_open == 0)
        assert warm.take(address) is None


async def test_a_broken_call_is_not_used() -> None:
    async with serving() as (counting, warm, _, address):
        warm.keep(address)
        await until(lambda: counting.num_open == 1)
        held = warm._ready[address]
        assert held.call is not None
        held.call.cancel()
        await until(lambda: counting.num_open == 0)
        assert warm.take(address) is None
        warm.keep(address)
        await until(lambda: counting.num_open == 1)
