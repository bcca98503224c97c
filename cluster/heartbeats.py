"""Whether a worker or a router still answers, seen from outside over gRPC: what Ray cannot tell of a frozen process.

A worker sends its load at least once a second on its event stream, and that stream is its lease. Silence or a broken
stream is not yet a loss: one direct question, with its own deadline, decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.grpc_server import Dial, make_channel
from penstock.types import Epoch
from penstock.v1 import worker_pb2, worker_pb2_grpc

LEASE_S = 3.0  # of a worker's silence
PROBE_TIMEOUT_S = 3.0  # of the question that follows it
PROBE_INTERVAL_S = 1.0  # between two questions to a router


async def follow_worker(
    address: str, epoch: Epoch, on_load: Callable[[worker_pb2.Load], None], dial: Dial = make_channel
) -> str:
    """Runs while this incarnation answers at `address`; returns the reason when it no longer does."""
    async with dial(address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        while True:
            reason = await _read_loads(stub, epoch, on_load)
            try:
                answer = await stub.Describe(worker_pb2.DescribeRequest(), timeout=PROBE_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                return f"{reason}, and then {_say(error)}"
            if answer.epoch != epoch:
                return f"another incarnation answers at {address}: epoch {answer.epoch}, not {epoch}"


async def _read_loads(
    stub: worker_pb2_grpc.WorkerStub, epoch: Epoch, on_load: Callable[[worker_pb2.Load], None]
) -> str:
    """Why the event stream can no longer be relied on."""
    # From the first event on: a snapshot only where the worker no longer holds them all.
    call = stub.WatchEvents(worker_pb2.WatchEventsRequest(epoch=epoch, next_seq=1))
    try:
        while True:
            async with asyncio.timeout(LEASE_S):
                batch = await call.read()
            if batch is grpc.aio.EOF:
                return "it ended its event stream"
            if batch.epoch != epoch:
                return f"epoch {batch.epoch} answers in place of {epoch}"
            on_load(batch.load)
    except TimeoutError:
        return f"no sign of life for {LEASE_S:g} s"
    except grpc.aio.AioRpcError as error:
        return f"its event stream broke: {_say(error)}"
    finally:
        call.cancel()


async def follow_router(address: str) -> str:
    """Runs while a router's health service answers, whatever it says; returns the reason when it no longer does."""
    async with make_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        failures = 0
        while failures < 2:
            try:
                await stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                failures, reason = failures + 1, _say(error)
                continue
            failures = 0
            await asyncio.sleep(PROBE_INTERVAL_S)
        return f"its health service does not answer: {reason}"


def _say(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details() or 'no details'}"
