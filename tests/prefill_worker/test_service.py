"""Tests the gRPC service of a prefill worker, without a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from unittest.mock import Mock

import grpc
import grpc.aio
import pytest

from engine.step.loop import StepLoop
from penstock.v1 import worker_pb2, worker_pb2_grpc
from prefill_worker.service import PrefillService
from prefill_worker.worker import PrefillWorker
from tests.support.serving import until


async def test_closing_ends_the_calls_that_were_opened_in_advance_and_refuses_later_ones() -> None:
    """No command ever comes, as from a decode worker that has opened a call for its next prefill."""
    service = PrefillService(Mock(spec=PrefillWorker), Mock(spec=StepLoop))
    server = grpc.aio.server()
    worker_pb2_grpc.add_PrefillWorkerServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    never = asyncio.Event()

    async def commands() -> AsyncIterator[worker_pb2.PrefillCommand]:
        await never.wait()
        yield worker_pb2.PrefillCommand()

    async with asyncio.timeout(60), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = worker_pb2_grpc.PrefillWorkerStub(channel)
        opened = stub.Prefill(commands())
        await until(lambda: bool(service._waiting))
        service.close()
        assert await opened.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError, match="the prefill worker is closing"):
            await stub.Prefill(commands()).read()
        await server.stop(30)  # waits for no call
        never.set()
