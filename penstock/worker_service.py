"""What every worker answers whatever its role: who it is, what its cache holds, whether a transfer may still write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import grpc.aio

from penstock import wire
from penstock.kv_events import KvEventBatch, KvEventLog, encode_events, split_snapshot
from penstock.ticket_log import TicketLog
from penstock.types import TransferKey, WorkerLoad
from penstock.v1 import worker_pb2, worker_pb2_grpc

_MIN_INTERVAL_S = 0.02  # between two batches of one watcher: a burst of steps becomes one message
_SNAPSHOT_PAGES = 8192  # of one message: a reader has it applied within some milliseconds
_HEARTBEAT_S = 1.0  # a batch is sent at least this often, so that a watcher sees load and life


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Thin over what the worker's step loop publishes. `notify` may be called from any thread."""

    def __init__(
        self,
        description: worker_pb2.WorkerDescription,
        events: KvEventLog,
        load: Callable[[], WorkerLoad],
        is_transfer_open: Callable[[TransferKey], bool],
        check_up: Callable[[], worker_pb2.CheckupResponse] = worker_pb2.CheckupResponse,
        tickets: TicketLog | None = None,
    ) -> None:
        """`check_up` blocks, and runs in a thread."""
        self._check_up = check_up
        self._description = description
        self._events = events
        self._load = load
        self._is_transfer_open = is_transfer_open
        self._tickets = TicketLog() if tickets is None else tickets
        self._tickets.on_change = self._wake
        self._loop = asyncio.get_running_loop()
        self._watchers: set[asyncio.Event] = set()
        self._notified = False
        self._leaving = False
        self._closed = False

    @property
    def load(self) -> WorkerLoad:
        return replace(self._load(), leaving=True) if self._leaving else self._load()

    def leave(self) -> None:
        """Tells watchers that this worker wants no new work."""
        self._leaving = True
        self._wake()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Until it holds no request, and no page of it is held or may be written; False when time is up."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            async with asyncio.timeout(timeout_s):
                while not _is_idle(self._load()):
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            return _is_idle(self._load())
        finally:
            self._watchers.discard(changed)
        return True

    def close(self) -> None:
        """Ends every watch, so that the server's end need not wait for them."""
        self._closed = True
        self._wake()

    def notify(self) -> None:
        """Load or cache changed: watchers are told soon."""
        if not self._notified and self._watchers:
            self._notified = True
            self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._notified = False
        for watcher in self._watchers:
            watcher.set()

    async def Describe(
        self, request: worker_pb2.DescribeRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.WorkerDescription:
        return self._description

    async def TransferState(
        self, request: worker_pb2.TransferStateRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.TransferStateResponse:
        key = wire.transfer_key_from_wire(request.transfer)
        return worker_pb2.TransferStateResponse(epoch=self._description.epoch, open=self._is_transfer_open(key))

    async def Checkup(
        self, request: worker_pb2.CheckupRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.CheckupResponse:
        return await asyncio.to_thread(self._check_up)

    async def WatchEvents(
        self, request: worker_pb2.WatchEventsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.EventBatch]:
        epoch = self._description.epoch
        # Sequence number 0 is never held, so a watcher of an earlier incarnation starts with a snapshot.
        next_seq = request.next_seq if request.epoch == epoch else 0
        told = 0  # of the watcher's tickets
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            while True:
                closed = self._closed  # what has changed until then is told
                batch = self._events.read(next_seq)
                next_seq = batch.next_seq
                tickets, told = self._tickets.since(request.router, told)
                for part in split_snapshot(batch, _SNAPSHOT_PAGES):
                    yield self._message(part, tickets)
                    tickets = []
                if closed:
                    return
                await asyncio.sleep(_MIN_INTERVAL_S)
                await _wait(changed, _HEARTBEAT_S)
                changed.clear()
        finally:
            self._watchers.discard(changed)

    def _message(self, batch: KvEventBatch, tickets: Sequence[worker_pb2.TicketState]) -> worker_pb2.EventBatch:
        return worker_pb2.EventBatch(
            epoch=self._description.epoch,
            first_seq=batch.first_seq,
            num_events=len(batch.events) + batch.num_merged,
            snapshot=batch.snapshot,
            more=batch.more,
            part=batch.part,
            payload=encode_events(batch.events),
            num_strays=batch.num_strays,
            load=wire.load_to_wire(self.load),
            tickets=tickets,
        )


def _is_idle(load: WorkerLoad) -> bool:
    return load.num_open == 0 and load.free_pages == load.total_pages


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return  # the heartbeat is due
