"""Whether a worker or a router still answers, seen from outside over gRPC: what Ray cannot tell of a frozen process.

A worker sends its load at least once a second on its event stream, and that stream is its lease. Silence comes in two
degrees. One that is *doubted* gets no new work, which costs little when it was only busy, and is trusted again with
its next sign of life; only one that stays silent, or whose port refuses, counts as lost.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.grpc_server import Dial, make_channel
from penstock.types import Epoch
from penstock.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

ASK_AFTER_S = 1.5  # of a worker's silence it is asked directly
DOUBT_AFTER_S = 2.3  # of silence: two reports are overdue
LOST_AFTER_S = 6.0  # of silence
PROBE_INTERVAL_S = 0.4  # between two questions to a router
_CONNECT_TIMEOUT_S = 0.3
_RETRY_S = 0.1

OnDoubt = Callable[[str], None]  # the reason; "" once it is trusted again


class _Lease:
    """One process's signs of life. Its owner must `close` it."""

    def __init__(self, on_doubt: OnDoubt) -> None:
        self._on_doubt = on_doubt
        self._loop = asyncio.get_running_loop()
        self._doubted = False
        self._heard_s = self._loop.time()
        self._timer = self._loop.call_later(DOUBT_AFTER_S, self._doubt)

    def hear(self) -> None:
        self._timer.cancel()
        self._heard_s = self._loop.time()
        self._timer = self._loop.call_later(DOUBT_AFTER_S, self._doubt)
        if self._doubted:
            self._doubted = False
            self._on_doubt("")

    def _doubt(self) -> None:
        self._doubted = True
        self._on_doubt(f"no sign of life for {DOUBT_AFTER_S:g} s")

    @property
    def left_s(self) -> float:
        """Until the silence is a loss; never so little that a question could not be answered."""
        return max(0.1, self._heard_s + LOST_AFTER_S - self._loop.time())

    @property
    def is_over(self) -> bool:
        return self._loop.time() >= self._heard_s + LOST_AFTER_S

    def close(self) -> None:
        self._timer.cancel()


async def follow_worker(
    address: str,
    epoch: Epoch,
    on_load: Callable[[worker_pb2.Load], None],
    on_doubt: OnDoubt,
    dial: Dial = make_channel,
) -> str:
    """Runs while this incarnation answers at `address`; returns the reason when it no longer does."""
    lease = _Lease(on_doubt)

    def hear(load: worker_pb2.Load) -> None:
        lease.hear()
        on_load(load)

    try:
        async with dial(address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            while True:
                reason = await _read_loads(stub, epoch, hear)
                try:
                    answer = await _ask(stub.Describe, worker_pb2.DescribeRequest(), address, lease)
                except grpc.aio.AioRpcError as error:
                    return f"{reason}, and then {_say(error)}"
                if answer.epoch != epoch:
                    return f"another incarnation answers at {address}: epoch {answer.epoch}, not {epoch}"
                lease.hear()
    finally:
        lease.close()


async def _ask(method: Any, request: object, address: str, lease: _Lease) -> Any:
    """The answer, for as long as the silence may last. Raises AioRpcError, at once where nobody listens any more.

    A frozen process breaks connections too, by the pings that it leaves unanswered: that alone is no loss.
    """
    while True:
        waits = not await _refuses(address)
        try:
            return await method(request, timeout=lease.left_s, wait_for_ready=waits)
        except grpc.aio.AioRpcError as error:
            if not waits or lease.is_over or error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
        await asyncio.sleep(_RETRY_S)


async def _refuses(address: str) -> bool:
    """Whether the machine is there and nobody listens: the process is gone. A frozen one's port still connects."""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False


async def _read_loads(
    stub: worker_pb2_grpc.WorkerStub, epoch: Epoch, on_load: Callable[[worker_pb2.Load], None]
) -> str:
    """Why the event stream can no longer be relied on."""
    # From the first event on: a snapshot only where the worker no longer holds them all.
    call = stub.WatchEvents(worker_pb2.WatchEventsRequest(epoch=epoch, next_seq=1))
    try:
        while True:
            async with asyncio.timeout(ASK_AFTER_S):
                batch = await call.read()
            if batch is grpc.aio.EOF:
                return "it ended its event stream"
            if batch.epoch != epoch:
                return f"epoch {batch.epoch} answers in place of {epoch}"
            on_load(batch.load)
    except TimeoutError:
        return f"no sign of life for {ASK_AFTER_S:g} s"
    except grpc.aio.AioRpcError as error:
        return f"its event stream broke: {_say(error)}"
    finally:
        call.cancel()


async def follow_router(address: str, on_doubt: OnDoubt, pid: int = 0, drain_s: float = 0.0) -> str:
    """Runs while a router's health service answers, whatever it says; returns the reason when it no longer does.

    One that was told to end listens no more while its last streams end, for `drain_s` at most. It is known by its `pid`
    on this machine, if that is given.
    """
    lease = _Lease(on_doubt)
    try:
        async with make_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                try:
                    await _ask(stub.Check, health_pb2.HealthCheckRequest(), address, lease)
                except grpc.aio.AioRpcError as error:
                    lease.close()
                    if pid and await _refuses(address):
                        await _outlive(pid, drain_s, on_doubt)
                    return f"its health service does not answer: {_say(error)}"
                lease.hear()
                await asyncio.sleep(PROBE_INTERVAL_S)
    finally:
        lease.close()


async def _outlive(pid: int, timeout_s: float, on_doubt: OnDoubt) -> None:
    """Returns once the process has ended, or when time is up; while it has not, it is in doubt."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    running, ended = asyncio.get_running_loop(), asyncio.Event()
    running.add_reader(process, ended.set)  # readable at its end, and at once of one that nobody has buried
    try:
        if not select.select([process], [], [], 0)[0]:
            on_doubt("it was told to end, and ends with its streams")
        async with asyncio.timeout(timeout_s):
            await ended.wait()
    except TimeoutError:
        log.warning("a router that listens no more has not ended within %g s", timeout_s)
    finally:
        running.remove_reader(process)
        os.close(process)


def _say(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details() or 'no details'}"
