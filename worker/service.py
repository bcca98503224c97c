"""The gRPC service of workers of either role: description, KV events, load and open transfers.

It translates what the step loop publishes; it computes and decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import grpc.aio

from penstock import wire
from penstock.kv.events import KvEventBatch, KvEventLog, encode_events, split_snapshot
from penstock.types import Epoch, TransferKey, WorkerLoad
from penstock.v1 import worker_pb2, worker_pb2_grpc
from worker.pull.store.announcer import RunAnnouncer
from worker.ticket_log import TicketLog

_MIN_INTERVAL_S = 0.02  # pause between two batches for a watcher, so that a burst becomes one message
_SNAPSHOT_PAGES = 8192  # pages in one message, which a reader applies within milliseconds
_HEARTBEAT_S = 1.0  # longest pause between two batches, which show a watcher load and liveness


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Serves watchers. `notify` may be called from any thread, everything else on the event loop."""

    def __init__(
        self,
        description: worker_pb2.WorkerDescription,
        events: KvEventLog,
        load: Callable[[], WorkerLoad],
        is_transfer_open: Callable[[TransferKey], bool],
        check_up: Callable[[], worker_pb2.CheckupResponse] = worker_pb2.CheckupResponse,
        tickets: TicketLog | None = None,
        on_gone: Callable[[list[Epoch]], None] = lambda epochs: None,
        announcer: RunAnnouncer | None = None,
    ) -> None:
        """`check_up` blocks and runs in a thread. `on_gone` takes incarnations whose machines are dead. `announcer`
        knows what the worker's shared store holds, if it has one.
        """
        self._announcer = announcer
        self._on_gone = on_gone
        self._check_up = check_up
        self._description = description
        self._events = events
        self._load = load
        self._is_transfer_open = is_transfer_open
        self._tickets = TicketLog() if tickets is None else tickets
        self._tickets.subscribe(self._wake)
        self._loop = asyncio.get_running_loop()
        self._watchers: set[asyncio.Event] = set()
        self._num_routers = 0  # among the watchers
        self._notified = False
        self._leaving = False
        self._closed = False

    @property
    def load(self) -> WorkerLoad:
        return replace(self._load(), leaving=True) if self._leaving else self._load()

    def leave(self) -> None:
        """Informs watchers that this worker takes no new work."""
        self._leaving = True
        self._wake()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no request is open and no page is held or may be written. Returns False after `timeout_s`."""
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
        """Ends every watch, so that the server's shutdown does not wait for them."""
        self._closed = True
        self._wake()
        if self._announcer is not None:
            self._announcer.close()

    def notify(self) -> None:
        """Wakes the watchers after a change of load or cache."""
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

    async def NoteGone(
        self, request: worker_pb2.NoteGoneRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.NoteGoneResponse:
        self._on_gone([Epoch(epoch) for epoch in request.epochs if epoch != self._description.epoch])
        return worker_pb2.NoteGoneResponse()

    async def Checkup(
        self, request: worker_pb2.CheckupRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.CheckupResponse:
        return await asyncio.to_thread(self._check_up)

    async def WatchEvents(
        self, request: worker_pb2.WatchEventsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.EventBatch]:
        epoch = self._description.epoch
        # The log never holds number 0, so a watcher of an earlier incarnation starts with a snapshot.
        next_seq = request.next_seq if request.epoch == epoch else 0
        tickets_version = 0
        changed = asyncio.Event()
        self._watchers.add(changed)
        self._num_routers += bool(request.router)
        try:
            while True:
                closed = self._closed  # read first, so that every change before `close` is sent
                batch = self._events.read(next_seq)
                next_seq = batch.next_seq
                tickets, tickets_version = self._tickets.since(request.router, tickets_version)
                for part in split_snapshot(batch, _SNAPSHOT_PAGES):
                    yield self._message(part, tickets)
                    tickets = []
                if closed:
                    return
                await asyncio.sleep(_MIN_INTERVAL_S)
                with contextlib.suppress(TimeoutError):  # then the heartbeat is due
                    async with asyncio.timeout(_HEARTBEAT_S):
                        await changed.wait()
                changed.clear()
        finally:
            self._watchers.discard(changed)
            if request.router:
                self._num_routers -= 1
                self._wake()  # a controller that drains this worker waits for its last router to leave

    async def WatchStore(
        self, request: worker_pb2.WatchStoreRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.StoredRuns]:
        if self._announcer is not None:
            async for runs in self._announcer.changes():
                yield runs

    def _message(self, batch: KvEventBatch, tickets: Sequence[worker_pb2.TicketState]) -> worker_pb2.EventBatch:
        load = wire.load_to_wire(self.load)
        load.num_routers = self._num_routers
        return worker_pb2.EventBatch(
            epoch=self._description.epoch,
            first_seq=batch.first_seq,
            num_events=len(batch.events) + batch.num_merged,
            snapshot=batch.snapshot,
            more=batch.more,
            part=batch.part,
            payload=encode_events(batch.events),
            num_strays=batch.num_strays,
            load=load,
            tickets=tickets,
        )


def _is_idle(load: WorkerLoad) -> bool:
    return load.num_open == 0 and load.free_pages == load.total_pages
