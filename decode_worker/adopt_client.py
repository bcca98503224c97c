"""Calls to the decode workers that take sequences over: one call a sequence, its events posted to the step loop.

Runs on the server's event loop. Answers that hold a sequence up are waited for as long as a pause may last; after that
the sequence runs on here, whatever the target may come to say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc
import grpc.aio

from decode_worker.departure import Target
from engine.step_loop import StepLoop
from kv_transfer.session import Manifest
from penstock import wire
from penstock.channels import Channels
from penstock.errors import DeadlineExceeded, PenstockError, Unavailable, from_rpc_error, from_status, to_status
from penstock.types import PageId, TransferKey, WorkerId
from penstock.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

_PAGES_TIMEOUT_S = 5.0  # from the start to the destination; the sequence decodes meanwhile
_CONFIRM_TIMEOUT_S = 2.0  # from the last page to the confirmation; the sequence stands still
_LEAVE_TIMEOUT_S = 5.0  # from `closed` to the end of the call


class DepartureEvents(Protocol):
    """What a target says; called on the step loop."""

    def on_destination(self, key: TransferKey, offer: bytes, num_held: int, pages: Sequence[PageId]) -> None: ...

    def on_landed(self, key: TransferKey, num_pages: int) -> None: ...

    def on_adopted(self, key: TransferKey) -> None: ...

    def on_heartbeat(self, key: TransferKey) -> None: ...

    def on_failed(self, key: TransferKey, error: PenstockError) -> None: ...


@dataclass(slots=True, eq=False)
class _Call:
    commands: asyncio.Queue[worker_pb2.AdoptCommand | None] = field(default_factory=asyncio.Queue)
    timer: asyncio.TimerHandle | None = None
    task: asyncio.Task[None] | None = None
    closed: bool = False

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class AdoptClient:
    """Owns one task for each call. Methods may be called from any thread, but `is_open` from the event loop only."""

    def __init__(
        self,
        loop: StepLoop,
        events: DepartureEvents,
        channels: Channels,
        worker_id: WorkerId,
        num_ranks: int,
    ) -> None:
        self._loop = loop
        self._events = events
        self._channels = channels
        self._worker_id = worker_id
        self._num_ranks = num_ranks
        self._running = asyncio.get_running_loop()
        self._calls: dict[TransferKey, _Call] = {}  # until `close`: the transfer may write
        self._tasks: set[asyncio.Task[None]] = set()

    def is_open(self, key: TransferKey) -> bool:
        return key in self._calls

    def start(self, key: TransferKey, target: Target, state: worker_pb2.SequenceState, num_tokens: int) -> None:
        start = worker_pb2.AdoptStart(
            transfer=wire.transfer_key_to_wire(key),
            state=state,
            num_tokens=num_tokens,
            worker_id=self._worker_id,
            address=target.source_address,
            num_ranks=self._num_ranks,
        )
        self._running.call_soon_threadsafe(self._start, key, target, start)

    def finish(self, key: TransferKey, state: worker_pb2.SequenceState, manifest: Manifest, paused_s: float) -> None:
        pushed = worker_pb2.PrefillPushed(
            num_tokens=manifest.num_tokens,
            page_hashes=manifest.page_hashes,
            num_pages=manifest.num_pages,
            checksums=manifest.checksums,
        )
        finish = worker_pb2.AdoptFinish(state=state, manifest=pushed, paused_ms=paused_s * 1e3)
        self._running.call_soon_threadsafe(self._finish, key, finish)

    def heartbeat(self, key: TransferKey) -> None:
        self._running.call_soon_threadsafe(self._heartbeat, key)

    def close(self, key: TransferKey, error: PenstockError | None) -> None:
        self._running.call_soon_threadsafe(self._close, key, error)

    async def stop(self) -> None:
        for call in self._calls.values():
            call.stop_timer()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # On the event loop.

    def _start(self, key: TransferKey, target: Target, start: worker_pb2.AdoptStart) -> None:
        call = self._calls[key] = _Call()
        call.commands.put_nowait(worker_pb2.AdoptCommand(start=start))
        self._set_timer(key, call, _PAGES_TIMEOUT_S, f"{target.worker_id} gave no pages")
        call.task = asyncio.create_task(self._follow(key, target, call))
        self._tasks.add(call.task)
        call.task.add_done_callback(self._tasks.discard)

    def _finish(self, key: TransferKey, finish: worker_pb2.AdoptFinish) -> None:
        call = self._calls[key]
        call.commands.put_nowait(worker_pb2.AdoptCommand(finish=finish))
        self._set_timer(key, call, _CONFIRM_TIMEOUT_S, "the target did not confirm")

    def _heartbeat(self, key: TransferKey) -> None:
        self._calls[key].commands.put_nowait(worker_pb2.AdoptCommand(heartbeat=worker_pb2.Heartbeat()))

    def _close(self, key: TransferKey, error: PenstockError | None) -> None:
        call = self._calls.pop(key)
        call.closed = True
        call.stop_timer()
        closed = worker_pb2.AdoptClosed(error=to_status(error) if error else None)
        call.commands.put_nowait(worker_pb2.AdoptCommand(closed=closed))
        call.commands.put_nowait(None)
        assert call.task is not None
        leave = self._running.call_later(_LEAVE_TIMEOUT_S, call.task.cancel)
        call.task.add_done_callback(lambda task: leave.cancel())

    def _set_timer(self, key: TransferKey, call: _Call, timeout_s: float, what: str) -> None:
        call.stop_timer()
        error = DeadlineExceeded(f"transfer {key.transfer_id}: {what} within {timeout_s:g} s")
        call.timer = self._running.call_later(timeout_s, self._post_failure, key, error)

    def _post_failure(self, key: TransferKey, error: PenstockError) -> None:
        self._loop.post(lambda: self._events.on_failed(key, error))

    async def _follow(self, key: TransferKey, target: Target, call: _Call) -> None:
        error: PenstockError = Unavailable(f"decode worker {target.worker_id} ended the call early")
        try:
            stub = worker_pb2_grpc.DecodeWorkerStub(self._channels.get(target.address))
            async for event in stub.Adopt(_commands(call)):
                self._deliver(key, call, event)
        except grpc.aio.AioRpcError as failure:
            error = from_rpc_error(failure)
        if not call.closed:
            self._post_failure(key, error)

    def _deliver(self, key: TransferKey, call: _Call, event: worker_pb2.AdoptEvent) -> None:
        events = self._events
        match event.WhichOneof("event"):
            case "destination":
                call.stop_timer()
                destination = event.destination
                pages = [PageId(page) for page in destination.pages]
                self._loop.post(
                    lambda: events.on_destination(key, destination.offer, destination.num_pages_held, pages)
                )
            case "landed":
                self._loop.post(lambda: events.on_landed(key, event.landed.num_pages))
            case "heartbeat":
                self._loop.post(lambda: events.on_heartbeat(key))
            case "adopted":
                call.stop_timer()
                self._loop.post(lambda: events.on_adopted(key))
            case "refused":
                call.stop_timer()
                self._post_failure(key, from_status(event.refused.error))


async def _commands(call: _Call) -> AsyncIterator[worker_pb2.AdoptCommand]:
    while (command := await call.commands.get()) is not None:
        yield command
