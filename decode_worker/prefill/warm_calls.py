"""Keeps a call open in advance to each recently used prefill worker, so that the next prefill starts with one message.

Opening a call takes several handovers between the threads of gRPC and of the event loops at both ends, which is a large
part of the time of a remote prefill on an idle system. An opened call has no effect at either end until its start
command is sent, and is cancelled if the command does not come soon. Runs on the server's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import grpc.aio

from penstock.process.task_set import TaskSet
from penstock.v1 import worker_pb2, worker_pb2_grpc
from worker.channels import Channels

_WARM_S = 5.0  # shorter than a prefill worker waits for the start command
_MAX_WARM = 64  # most prefill workers with an opened call

Commands = asyncio.Queue[worker_pb2.PrefillCommand | None]  # None ends the caller's side of the call


class PrefillCall(Protocol):
    """A gRPC call to a prefill worker (`grpc.aio.StreamStreamCall`)."""

    def __aiter__(self) -> AsyncIterator[worker_pb2.PrefillEvent]: ...

    def done(self) -> bool: ...

    def cancel(self) -> bool: ...


def open_call(channel: grpc.aio.Channel, commands: Commands) -> PrefillCall:
    """Opens a call that sends `commands` as they come."""
    call: PrefillCall = worker_pb2_grpc.PrefillWorkerStub(channel).Prefill(_requests(commands))
    return call


async def _requests(commands: Commands) -> AsyncIterator[worker_pb2.PrefillCommand]:
    while (command := await commands.get()) is not None:
        yield command


class WarmCall:
    """An opened call without a start command. A task of `WarmCalls` holds its channel until `take_over`."""

    def __init__(self) -> None:
        self.commands: Commands = asyncio.Queue()
        self.taken = asyncio.Event()
        self.call: PrefillCall | None = None

    def take_over(self) -> PrefillCall:
        """Returns the call to its new owner, which holds the channel itself from now on."""
        self.taken.set()
        assert self.call is not None
        return self.call


class WarmCalls:
    """Owns the opened calls by address, and a task for each."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels
        self._ready: dict[str, WarmCall] = {}
        self._tasks = TaskSet()

    def take(self, address: str) -> WarmCall | None:
        """Returns the opened call to a worker for the caller's use, if there is one that works."""
        warm = self._ready.pop(address, None)
        if warm is None or warm.call is None or warm.call.done():
            return None
        return warm

    def keep(self, address: str) -> None:
        """Opens a call to a worker that is likely to be called again soon, unless there is one."""
        if address not in self._ready and len(self._ready) < _MAX_WARM:
            warm = self._ready[address] = WarmCall()
            self._tasks.start(self._hold(address, warm))

    async def close(self) -> None:
        await self._tasks.close()

    async def _hold(self, address: str, warm: WarmCall) -> None:
        async with self._channels.use(address) as channel:
            warm.call = open_call(channel, warm.commands)
            try:
                async with asyncio.timeout(_WARM_S):
                    await warm.taken.wait()
            except TimeoutError:
                pass
            finally:
                if self._ready.get(address) is warm:
                    del self._ready[address]
                    warm.commands.put_nowait(None)
                    warm.call.cancel()
