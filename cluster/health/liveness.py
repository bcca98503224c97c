"""Follows over gRPC whether a worker or a router still answers, since Ray cannot see that a process is frozen.

A worker sends its load at least once a second on its event stream, and that stream is its lease. Silence has two
degrees. A process in *doubt* gets no new work, which costs little if it was only busy, and is trusted again at its next
sign of life; a process that stays silent, or whose port refuses, counts as lost.
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

from cluster.health.silence_policy import TICK_S, SilenceClock
from penstock.rpc.server import Dial, make_channel
from penstock.types import Epoch
from penstock.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

ASK_AFTER_S = 1.5  # of a worker's silence it is asked directly
PROBE_INTERVAL_S = 0.4  # between two probes of a router
_CONNECT_TIMEOUT_S = 0.3
_RETRY_S = 0.1
# A deadline that passes before the lease is over passed while this process stood still.
_MAY_LIVE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

OnDoubt = Callable[[str], None]  # takes the reason, or "" once the process is trusted again


class _Lease:
    """The observed silence since one process's last sign of life. Its owner must `close` it."""

    def __init__(self, on_doubt: OnDoubt) -> None:
        self._on_doubt = on_doubt
        self._loop = asyncio.get_running_loop()
        self._doubted = False
        self._silence = SilenceClock(self._loop.time())
        self._timer = self._loop.call_later(TICK_S, self._look)

    def renew(self) -> None:
        self._silence.hear(self._loop.time())
        if self._doubted:
            self._doubted = False
            self._on_doubt("")

    def _look(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._look)
        self._silence.look(self._loop.time())
        if (doubt := self._silence.doubt) and not self._doubted:
            self._doubted = True
            self._on_doubt(doubt)

    @property
    def left_s(self) -> float:
        return self._silence.left_s

    @property
    def is_over(self) -> bool:
        return self._silence.is_loss

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
        lease.renew()
        on_load(load)

    try:
        async with dial(address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            while True:
                reason = await _read_loads(stub, epoch, hear)
                try:
                    answer = await _ask(stub.Describe, worker_pb2.DescribeRequest(), address, lease)
                except grpc.aio.AioRpcError as error:
                    return f"{reason}, and then {_describe(error)}"
                if answer.epoch != epoch:
                    return f"another incarnation answers at {address}: epoch {answer.epoch}, not {epoch}"
                lease.renew()
    finally:
        lease.close()


async def _ask(method: Any, request: object, address: str, lease: _Lease) -> Any:
    """Returns the answer, retrying until the lease is over. Raises AioRpcError, at once if nothing listens any more.

    A frozen process breaks connections too, since it leaves pings unanswered: a broken connection alone is not a loss.
    """
    while True:
        waits = not await _refuses(address)
        try:
            return await method(request, timeout=lease.left_s, wait_for_ready=waits)
        except grpc.aio.AioRpcError as error:
            if not waits or lease.is_over or error.code() not in _MAY_LIVE:
                raise
        await asyncio.sleep(_RETRY_S)


async def _refuses(address: str) -> bool:
    """Returns whether the machine answers and nothing listens: the process is gone. A frozen one's port connects."""
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
    """Returns why the event stream can no longer be relied on."""
    # Asks for all events from the first: the worker sends a snapshot only if it no longer holds them all.
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
        return f"its event stream broke: {_describe(error)}"
    finally:
        call.cancel()


async def follow_router(address: str, on_doubt: OnDoubt, pid: int = 0, drain_s: float = 0.0) -> str:
    """Runs while a router's health service answers, whatever it says; returns the reason when it no longer does.

    A router that was asked to end stops listening while its last streams end, for `drain_s` at most. With its `pid` on
    this machine, its process is followed until then; 0: the router runs elsewhere.
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
                        await _wait_for_exit(pid, drain_s, on_doubt)
                    return f"its health service does not answer: {_describe(error)}"
                lease.renew()
                await asyncio.sleep(PROBE_INTERVAL_S)
    finally:
        lease.close()


async def _wait_for_exit(pid: int, timeout_s: float, on_doubt: OnDoubt) -> None:
    """Returns once the process has ended, or after `timeout_s`; until then the process is in doubt."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    running, ended = asyncio.get_running_loop(), asyncio.Event()
    running.add_reader(process, ended.set)  # readable at its end, and at once for a zombie
    try:
        if not _is_readable(process):
            on_doubt("it was asked to end, and ends with its streams")
        async with asyncio.timeout(timeout_s):
            await ended.wait()
    except TimeoutError:
        log.warning("a router that no longer listens has not ended within %g s", timeout_s)
    finally:
        running.remove_reader(process)
        os.close(process)


def _is_readable(descriptor: int) -> bool:
    """Returns at once; takes descriptors of any number, unlike `select.select`."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _describe(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details() or 'no details'}"
