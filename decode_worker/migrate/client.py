"""Calls the decode workers that receive migrating sequences: one call per sequence, with its events posted to the step
loop.

Runs on the server's event loop. While the sequence is paused, it waits for an answer only as long as a pause may last;
after that the sequence resumes here, even if the target answers later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc
import grpc.aio

from engine.step.loop import StepLoop
from kv_transfer.session.transfer_session import Manifest
from penstock import wire
from penstock.errors import DeadlineExceeded, PenstockError, Unavailable, from_rpc_error, from_status, to_status
from penstock.process.task_set import TaskSet
from penstock.types import Epoch, PageId, TransferKey, WorkerId
from penstock.v1 import worker_pb2, worker_pb2_grpc
from worker.channels import Channels

log = logging.getLogger(__name__)

_DESTINATION_TIMEOUT_S = 5.0  # from the start to the destination; the sequence decodes meanwhile
_CONFIRM_TIMEOUT_S = 2.0  # from the last page to the confirmation; the sequence is paused
_CLOSE_TIMEOUT_S = 5.0  # from `closed` to the end of the call


@dataclass(frozen=True, slots=True)
class MigrationTarget:
    """The decode worker that receives sequences."""

    worker_id: WorkerId
    epoch: Epoch
    address: str
    source_address: str  # the address at which the target reaches this worker


class TargetEvents(Protocol):
    """Receives the target's messages; called on the step loop."""

    def on_destination(
        self, key: TransferKey, offer: bytes, num_held: int, pages: Sequence[PageId], window_slots: Sequence[int] = ()
    ) -> None: ...

    def on_landed(self, key: TransferKey, num_pages: int) -> None: ...

    def on_accepted(self, key: TransferKey) -> None: ...

    def on_heartbeat(self, key: TransferKey) -> None: ...

    def on_failed(self, key: TransferKey, error: PenstockError) -> None: ...


@dataclass(slots=True, eq=False)
class _Call:
    target: MigrationTarget
    events: TargetEvents
    commands: asyncio.Queue[worker_pb2.MigrationCommand | None] = field(default_factory=asyncio.Queue)
    timer: asyncio.TimerHandle | None = None
    task: asyncio.Task[None] | None = None
    closed: bool = False

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class MigrationClient:
    """Owns one task for each call. Methods are thread-safe except `is_open`, which only the event loop may call."""

    def __init__(self, loop: StepLoop, channels: Channels, worker_id: WorkerId, num_ranks: int) -> None:
        """`num_ranks` is the number of processes that this worker's model is split between."""
        self._loop = loop
        self._channels = channels
        self._worker_id = worker_id
        self._num_ranks = num_ranks
        self._running = asyncio.get_running_loop()
        self._calls: dict[TransferKey, _Call] = {}  # until `close`, the transfer may write
        self._tasks = TaskSet()

    def is_open(self, key: TransferKey) -> bool:
        return key in self._calls

    def start(
        self,
        key: TransferKey,
        target: MigrationTarget,
        state: worker_pb2.SequenceState,
        num_tokens: int,
        num_dropped_tokens: int,
        events: TargetEvents,
    ) -> None:
        """Opens the call; `events` receives the target's answers on the step loop."""
        start = worker_pb2.MigrationStart(
            transfer=wire.transfer_key_to_wire(key),
            state=state,
            num_tokens=num_tokens,
            worker_id=self._worker_id,
            address=target.source_address,
            num_ranks=self._num_ranks,
            num_dropped_tokens=num_dropped_tokens,
        )
        self._running.call_soon_threadsafe(self._start, key, target, start, events)

    def finish(self, key: TransferKey, state: worker_pb2.SequenceState, manifest: Manifest, paused_s: float) -> None:
        pushed = worker_pb2.PrefillPushed(
            num_tokens=manifest.num_tokens,
            page_hashes=manifest.page_hashes,
            num_pages=manifest.num_pages,
            checksums=manifest.checksums,
        )
        finish = worker_pb2.MigrationFinish(state=state, manifest=pushed, paused_ms=paused_s * 1e3)
        self._running.call_soon_threadsafe(self._finish, key, finish)

    def heartbeat(self, key: TransferKey) -> None:
        self._running.call_soon_threadsafe(self._heartbeat, key)

    def close(self, key: TransferKey, error: PenstockError | None) -> None:
        """Sends `closed`, with `error` unless the sequence migrated, and ends the call."""
        self._running.call_soon_threadsafe(self._close, key, error)

    async def stop(self) -> None:
        for call in self._calls.values():
            call.stop_timer()
        await self._tasks.close()

    # Called on the event loop only.

    def _start(
        self, key: TransferKey, target: MigrationTarget, start: worker_pb2.MigrationStart, events: TargetEvents
    ) -> None:
        call = self._calls[key] = _Call(target, events)
        call.commands.put_nowait(worker_pb2.MigrationCommand(start=start))
        self._set_timer(key, call, _DESTINATION_TIMEOUT_S, f"{target.worker_id} reserved no pages")
        call.task = self._tasks.start(self._follow(key, call))

    def _finish(self, key: TransferKey, finish: worker_pb2.MigrationFinish) -> None:
        call = self._calls[key]
        call.commands.put_nowait(worker_pb2.MigrationCommand(finish=finish))
        self._set_timer(key, call, _CONFIRM_TIMEOUT_S, "the target did not confirm")

    def _heartbeat(self, key: TransferKey) -> None:
        self._calls[key].commands.put_nowait(worker_pb2.MigrationCommand(heartbeat=worker_pb2.Heartbeat()))

    def _close(self, key: TransferKey, error: PenstockError | None) -> None:
        call = self._calls.pop(key)
        call.closed = True
        call.stop_timer()
        closed = worker_pb2.MigrationClosed(error=to_status(error) if error else None)
        call.commands.put_nowait(worker_pb2.MigrationCommand(closed=closed))
        call.commands.put_nowait(None)
        assert call.task is not None
        cancel = self._running.call_later(_CLOSE_TIMEOUT_S, call.task.cancel)
        call.task.add_done_callback(lambda task: cancel.cancel())

    def _set_timer(self, key: TransferKey, call: _Call, timeout_s: float, problem: str) -> None:
        call.stop_timer()
        error = DeadlineExceeded(f"transfer {key.transfer_id}: {problem} within {timeout_s:g} s")
        call.timer = self._running.call_later(timeout_s, self._post_failure, key, call, error)

    def _post_failure(self, key: TransferKey, call: _Call, error: PenstockError) -> None:
        self._loop.post(lambda: call.events.on_failed(key, error))

    async def _follow(self, key: TransferKey, call: _Call) -> None:
        error: PenstockError = Unavailable(f"decode worker {call.target.worker_id} ended the call early")
        try:
            async with self._channels.use(call.target.address) as channel:
                async for event in worker_pb2_grpc.DecodeWorkerStub(channel).ReceiveSequence(_commands(call)):
                    self._deliver(key, call, event)
        except grpc.aio.AioRpcError as failure:
            error = from_rpc_error(failure)
        if not call.closed:
            self._post_failure(key, call, error)

    def _deliver(self, key: TransferKey, call: _Call, event: worker_pb2.MigrationEvent) -> None:
        events = call.events
        match event.WhichOneof("event"):
            case "destination":
                call.stop_timer()
                destination = event.destination
                pages, slots = [PageId(page) for page in destination.pages], list(destination.window_slots)
                self._loop.post(
                    lambda: events.on_destination(key, destination.offer, destination.num_pages_held, pages, slots)
                )
            case "landed":
                self._loop.post(lambda: events.on_landed(key, event.landed.num_pages))
            case "heartbeat":
                self._loop.post(lambda: events.on_heartbeat(key))
            case "accepted":
                call.stop_timer()
                self._loop.post(lambda: events.on_accepted(key))
            case "refused":
                call.stop_timer()
                self._post_failure(key, call, from_status(event.refused.error))


async def _commands(call: _Call) -> AsyncIterator[worker_pb2.MigrationCommand]:
    while (command := await call.commands.get()) is not None:
        yield command
