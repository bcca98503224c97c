"""Finds out when a transfer whose call broke can no longer write, so that its fenced pages may be used again.

Time proves nothing: a frozen sender writes when it wakes. What does prove it: the sender says that the transfer is
closed, another incarnation answers in its place, or nobody listens at its address any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc
import grpc.aio

from penstock import wire
from penstock.errors import nobody_listens
from penstock.types import TransferKey
from penstock.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

_ASK_TIMEOUT_S = 2.0
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
_REFUSALS = 2  # in a row, that show that the process behind an address is gone


class FenceKeeper:
    """One task for each lost transfer; `on_quiesced` is called once for each."""

    def __init__(self, channel: Callable[[str], grpc.aio.Channel], on_quiesced: Callable[[TransferKey], None]) -> None:
        self._channel = channel
        self._on_quiesced = on_quiesced
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, key: TransferKey, address: str) -> None:
        task = asyncio.create_task(self._ask_until_known(key, address))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _ask_until_known(self, key: TransferKey, address: str) -> None:
        pause_s = _FIRST_PAUSE_S
        refusals = 0
        while True:
            try:
                if not await self._may_write(key, address):
                    break
                refusals = 0
            except grpc.aio.AioRpcError as error:
                refusals = refusals + 1 if nobody_listens(error) else 0
                if refusals >= _REFUSALS:
                    break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        log.info("transfer %s is quiet: its fence is lifted", key.transfer_id)
        self._on_quiesced(key)

    async def _may_write(self, key: TransferKey, address: str) -> bool:
        stub = worker_pb2_grpc.WorkerStub(self._channel(address))
        request = worker_pb2.TransferStateRequest(transfer=wire.transfer_key_to_wire(key))
        state = await stub.TransferState(request, timeout=_ASK_TIMEOUT_S)
        return state.epoch == key.sender_epoch and state.open
