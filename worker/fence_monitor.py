"""Finds out when a transfer with a broken call can no longer write, so that its fenced pages may be reused.

Elapsed time proves nothing: a frozen sender writes when it wakes. Proof is one of these:

* the sender says that the transfer is closed, another incarnation answers at its address, or that address refuses
  connections;
* the sender does not answer and can no longer write into this pool itself: it never connected over a one-sided
  transport or, on this host, the kernel has closed its connection. (Over other transports this worker copies the pages,
  and only into open transfers.) From then on the sender is refused one-sided connections;
* over RDMA, the controller reports that the sender's machine is dead, and this worker has revoked its access to the
  pool's memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from typing import Protocol

import grpc
import grpc.aio

from penstock import wire
from penstock.errors import PenstockError, refuses_connections
from penstock.process.task_set import TaskSet
from penstock.types import Epoch, TransferKey
from penstock.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

MAX_GONE = 1024  # most incarnations remembered as gone
_CALL_TIMEOUT_S = 2.0
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_NUM_REFUSALS = 2  # this many refusals in a row show that the process at an address is gone
_NUM_SILENT = 3  # the sender is cut off after this many attempts in a row without an answer

UseChannel = Callable[[str], AbstractAsyncContextManager[grpc.aio.Channel]]


class WriteAccess(Protocol):
    """Ends other workers' access to this worker's pool; `KvReceiver` implements it. Calls may block, and return whether
    the incarnation surely writes no more.
    """

    def cut_off(self, epoch: Epoch) -> bool: ...

    def tear_down(self, epoch: Epoch) -> bool: ...


class FenceMonitor:
    """Runs one task for each lost transfer and calls `on_quiesced` once for each. Runs on the server's event loop."""

    def __init__(
        self,
        use_channel: UseChannel,
        on_quiesced: Callable[[TransferKey], None],
        write_access: Callable[[], WriteAccess],
        first_pause_s: float = _FIRST_PAUSE_S,
    ) -> None:
        self._use_channel = use_channel
        self._on_quiesced = on_quiesced
        self._write_access = write_access
        self._first_pause_s = first_pause_s
        self._tasks = TaskSet()
        self._gone: OrderedDict[Epoch, None] = OrderedDict()
        self._news = asyncio.Event()  # set and replaced when more incarnations are known to be gone

    @property
    def num_watched(self) -> int:
        return len(self._tasks)

    def watch(self, key: TransferKey, address: str) -> None:
        """Starts to ask the sender at `address` about the transfer."""
        self._tasks.start(self._watch(key, address))

    def on_gone(self, epochs: Iterable[Epoch]) -> None:
        """Records that, according to the controller, the machines of these incarnations are dead."""
        for epoch in epochs:
            self._gone[epoch] = None
            self._gone.move_to_end(epoch)
        while len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)
        self._news.set()
        self._news = asyncio.Event()

    async def close(self) -> None:
        await self._tasks.close()

    async def _watch(self, key: TransferKey, address: str) -> None:
        proof = await self._find_proof(key, address)
        log.info("lifted the fence of transfer %s, which can no longer write: %s", key.transfer_id, proof)
        self._on_quiesced(key)

    async def _find_proof(self, key: TransferKey, address: str) -> str:
        """Waits for proof that the transfer can no longer write, and returns it."""
        epoch = key.sender_epoch
        pause_s, num_refusals, num_silent = self._first_pause_s, 0, 0
        while True:
            news = self._news
            if epoch in self._gone and await self._ends_access(self._write_access().tear_down, epoch):
                return "its sender's machine is dead, and has no connection to this pool"
            try:
                if not await self._may_write(key, address):
                    return "its sender has closed it, or is another incarnation"
                num_refusals = num_silent = 0
            except grpc.aio.AioRpcError as error:
                num_silent += 1
                num_refusals = num_refusals + 1 if refuses_connections(error) else 0
                if num_refusals >= _NUM_REFUSALS:
                    return "nothing listens at its sender's address"
                if num_refusals:
                    pause_s = self._first_pause_s
            if num_silent >= _NUM_SILENT and await self._ends_access(self._write_access().cut_off, epoch):
                return "its sender is silent, and has no connection to this pool"
            await _wait(news, pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _ends_access(self, end_access: Callable[[Epoch], bool], epoch: Epoch) -> bool:
        """Calls `end_access` on another thread. Returns whether the epoch surely writes no more; False if it fails."""
        try:
            return await asyncio.to_thread(end_access, epoch)
        except PenstockError as error:
            log.error("epoch %d may still write to this pool: its connections could not be closed: %s", epoch, error)
            return False

    async def _may_write(self, key: TransferKey, address: str) -> bool:
        request = worker_pb2.TransferStateRequest(transfer=wire.transfer_key_to_wire(key))
        async with self._use_channel(address) as channel:
            state = await worker_pb2_grpc.WorkerStub(channel).TransferState(request, timeout=_CALL_TIMEOUT_S)
        return state.epoch == key.sender_epoch and state.open


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Waits for the event, or until it is time to ask again."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
