"""Translates gRPC for migrations: `Migrate` and `ListSequences` at the source, `ReceiveSequence` at the target."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import TypeVar

from decode_worker.migrate.client import MigrationTarget
from decode_worker.migrate.incoming import IncomingMigrations
from decode_worker.migrate.outgoing import OutgoingMigrations
from decode_worker.request import DecodeRequest
from engine.step.loop import StepLoop
from kv_transfer.endpoints import KvReceiver
from kv_transfer.session.handshake import check_receiver
from kv_transfer.session.transfer_session import Manifest
from penstock import wire
from penstock.errors import InvalidInput, PenstockError, Unavailable, from_status, to_status
from penstock.rpc.addresses import require_source_address
from penstock.rpc.server import read_start
from penstock.types import Epoch, PageHash, PageId, RequestId, TransferKey, WorkerId
from penstock.v1 import worker_pb2
from worker.call_events import CallEvents
from worker.fence_monitor import FenceMonitor

_MAX_CONCURRENT = 4  # migrations at a time; more would share the link, and each would take longer

ResultT = TypeVar("ResultT")


class SourceStream(CallEvents[worker_pb2.MigrationEvent]):
    """Queues one call's events for the source. Implements `SourceCall`; thread-safe."""

    def __init__(self, offer: bytes, window_slots: Callable[[Sequence[PageId]], list[int]]) -> None:
        super().__init__()
        self._offer = offer
        self._window_slots = window_slots

    def destination(self, num_pages_held: int, pages: list[PageId]) -> None:
        destination = worker_pb2.MigrationDestination(
            num_pages_held=num_pages_held, pages=pages, offer=self._offer, window_slots=self._window_slots(pages)
        )
        self._send(worker_pb2.MigrationEvent(destination=destination))

    def landed(self, num_pages: int) -> None:
        self._send(worker_pb2.MigrationEvent(landed=worker_pb2.MigrationLanded(num_pages=num_pages)))

    def accepted(self) -> None:
        self._send(worker_pb2.MigrationEvent(accepted=worker_pb2.MigrationAccepted()))

    def refused(self, error: PenstockError) -> None:
        self._send(worker_pb2.MigrationEvent(refused=worker_pb2.MigrationRefused(error=to_status(error))))

    def heartbeat(self) -> None:
        self._send(worker_pb2.MigrationEvent(heartbeat=worker_pb2.Heartbeat()))


class MigrationService:
    """Posts calls to the step loop and awaits their outcomes; `DecodeService` exposes it."""

    def __init__(
        self,
        outgoing: OutgoingMigrations,
        incoming: IncomingMigrations,
        receiver: KvReceiver,
        loop: StepLoop,
        fences: FenceMonitor,
        epoch: Epoch,
        address: Callable[[], str],
    ) -> None:
        """`address` returns where this worker listens."""
        self._outgoing = outgoing
        self._incoming = incoming
        self._receiver = receiver
        self._loop = loop
        self._fences = fences
        self._epoch = epoch
        self._address = address

    # At the source.

    async def list_sequences(self) -> worker_pb2.ListSequencesResponse:
        sequences = [
            worker_pb2.RunningSequence(
                request_id=candidate.request_id,
                num_tokens=candidate.num_tokens,
                num_tokens_left=candidate.num_tokens_left,
            )
            for candidate in await self._on_loop(self._outgoing.candidates)
        ]
        return worker_pb2.ListSequencesResponse(sequences=sequences)

    async def migrate(self, request: worker_pb2.MigrateRequest) -> worker_pb2.MigrateResponse:
        if request.epoch == self._epoch:
            raise InvalidInput("epoch", f"is {request.epoch}, this worker's own; name another decode worker")
        own = require_source_address(request.source_address or self._address())
        target = MigrationTarget(WorkerId(request.worker_id), Epoch(request.epoch), request.address, own)
        wanted = {RequestId(name) for name in request.request_ids}
        requests, num_left = await self._on_loop(lambda: self._outgoing.select(wanted, request.max_sequences or None))
        slots = asyncio.Semaphore(_MAX_CONCURRENT)
        response = worker_pb2.MigrateResponse(num_left=num_left)

        async def migrate(chosen: DecodeRequest) -> None:
            async with slots:
                error = await self._migrate(chosen, target)
            if error is None:
                response.migrated.append(chosen.sequence.request_id)
            else:
                response.failed.add(request_id=chosen.sequence.request_id, error=to_status(error))

        await asyncio.gather(*map(migrate, requests))
        return response

    async def _migrate(self, request: DecodeRequest, target: MigrationTarget) -> PenstockError | None:
        """Migrates one request. Returns the error, if any. Every attempt ends with a report, since each stage has a
        time limit.
        """
        reported: asyncio.Future[PenstockError | None] = asyncio.get_running_loop().create_future()
        self._loop.post(lambda: self._outgoing.begin(request, target, lambda error: _set_result(reported, error)))
        return await reported

    async def _on_loop(self, call: Callable[[], ResultT]) -> ResultT:
        done: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._loop.post(lambda: _set_result(done, call()))
        return await done

    # At the target.

    async def receive_sequence(
        self, commands: AsyncIterator[worker_pb2.MigrationCommand]
    ) -> AsyncGenerator[worker_pb2.MigrationEvent, None]:
        start = (await read_start(commands)).start
        key = wire.transfer_key_from_wire(start.transfer)
        check_receiver(key, self._epoch)
        num_ranks = start.num_ranks or 1
        offer = self._receiver.offer(WorkerId(start.worker_id), key.sender_epoch, num_ranks)
        call = SourceStream(offer, self._receiver.window_slots)
        self._loop.post(lambda: self._incoming.on_start(key, start, call))
        reader = asyncio.create_task(self._follow(commands, key, call))
        try:
            async for event in call.events():
                yield event
        finally:
            reader.cancel()
            if not call.closed:
                lost = Unavailable(f"lost decode worker {start.worker_id}")
                self._loop.post(lambda: self._incoming.on_lost(key, lost))
                self._fences.watch(key, start.address)

    async def _follow(
        self, commands: AsyncIterator[worker_pb2.MigrationCommand], key: TransferKey, call: SourceStream
    ) -> None:
        """Delivers the commands after the first."""
        try:
            async for command in commands:
                if command.WhichOneof("command") == "finish":
                    self._finish(key, command.finish)
                elif command.WhichOneof("command") == "heartbeat":
                    self._loop.post(lambda: self._incoming.on_heartbeat(key))
                elif command.WhichOneof("command") == "closed":
                    self._close(key, command.closed)
                    call.closed = True
                    return
        finally:
            call.end()

    def _finish(self, key: TransferKey, finish: worker_pb2.MigrationFinish) -> None:
        pushed = finish.manifest
        hashes = tuple(PageHash(page) for page in pushed.page_hashes)
        manifest = Manifest(pushed.num_tokens, pushed.num_pages, hashes, tuple(pushed.checksums))
        paused_s = finish.paused_ms / 1e3
        self._loop.post(lambda: self._incoming.on_finish(key, finish.state, manifest, paused_s))

    def _close(self, key: TransferKey, closed: worker_pb2.MigrationClosed) -> None:
        error = from_status(closed.error) if closed.HasField("error") else None
        self._loop.post(lambda: self._incoming.on_closed(key, error))


def _set_result(future: asyncio.Future[ResultT], result: ResultT) -> None:
    """Sets the result unless the caller is gone. Called on the step loop."""

    def settle() -> None:
        if not future.done():
            future.set_result(result)

    future.get_loop().call_soon_threadsafe(settle)
