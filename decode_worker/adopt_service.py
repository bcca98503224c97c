"""gRPC handlers of sequences that move: `Migrate` at the source, `Adopt` at the target. Translate and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import TypeVar

from decode_worker.adoptions import Adoptions
from decode_worker.departure import Target
from decode_worker.departures import Departures
from decode_worker.request import DecodeRequest
from engine.step_loop import StepLoop
from kv_transfer.group_receiver import GroupReceiver
from kv_transfer.session import Manifest
from penstock import wire
from penstock.addresses import is_every_interface
from penstock.errors import (
    InvalidInput,
    PenstockError,
    TransferError,
    Unavailable,
    from_status,
    to_status,
)
from penstock.fence_keeper import FenceKeeper
from penstock.grpc_server import read_start
from penstock.types import Epoch, PageHash, PageId, RequestId, TransferKey, WorkerId
from penstock.v1 import worker_pb2

_AT_A_TIME = 4  # sequences that move side by side: more would share the wire, and each be longer on its way

ResultT = TypeVar("ResultT")


class AdoptCall:
    """One call's events on their way to the source; a `SourceCall`. Methods may be called from any thread."""

    def __init__(self, offer: bytes) -> None:
        self._offer = offer
        self._running = asyncio.get_running_loop()
        self._events: asyncio.Queue[worker_pb2.AdoptEvent | None] = asyncio.Queue()
        self.closed = False  # the source has said that it writes no more

    def destination(self, num_pages_held: int, pages: list[PageId]) -> None:
        destination = worker_pb2.AdoptDestination(num_pages_held=num_pages_held, pages=pages, offer=self._offer)
        self._send(worker_pb2.AdoptEvent(destination=destination))

    def landed(self, num_pages: int) -> None:
        self._send(worker_pb2.AdoptEvent(landed=worker_pb2.AdoptLanded(num_pages=num_pages)))

    def adopted(self) -> None:
        self._send(worker_pb2.AdoptEvent(adopted=worker_pb2.AdoptAdopted()))

    def refused(self, error: PenstockError) -> None:
        self._send(worker_pb2.AdoptEvent(refused=worker_pb2.AdoptRefused(error=to_status(error))))

    def heartbeat(self) -> None:
        self._send(worker_pb2.AdoptEvent(heartbeat=worker_pb2.Heartbeat()))

    def end(self) -> None:
        self._send(None)

    async def events(self) -> AsyncIterator[worker_pb2.AdoptEvent]:
        # No deadline here: the source ends every call, and keepalive pings notice a dead one.
        while (event := await self._events.get()) is not None:
            yield event

    def _send(self, event: worker_pb2.AdoptEvent | None) -> None:
        self._running.call_soon_threadsafe(self._events.put_nowait, event)


class AdoptService:
    def __init__(
        self,
        departures: Departures,
        adoptions: Adoptions,
        receiver: GroupReceiver,
        loop: StepLoop,
        fences: FenceKeeper,
        epoch: Epoch,
        address: Callable[[], str],
    ) -> None:
        """`address` is where this worker listens."""
        self._departures = departures
        self._adoptions = adoptions
        self._receiver = receiver
        self._loop = loop
        self._fences = fences
        self._epoch = epoch
        self._address = address

    # At the source.

    async def list_sequences(self) -> worker_pb2.ListSequencesResponse:
        found = await self._on_loop(self._departures.candidates)
        sequences = [
            worker_pb2.RunningSequence(
                request_id=one.request_id, num_tokens=one.num_tokens, num_tokens_left=one.num_tokens_left
            )
            for one in found
        ]
        return worker_pb2.ListSequencesResponse(sequences=sequences)

    async def migrate(self, request: worker_pb2.MigrateRequest) -> worker_pb2.MigrateResponse:
        if request.epoch == self._epoch:
            raise InvalidInput("epoch", f"is {request.epoch}, this very worker's; name another decode worker")
        own = request.source_address or self._address()
        if is_every_interface(own.rpartition(":")[0]):
            raise InvalidInput(
                "source_address",
                f"is {own!r}, which nobody can call; name the address at which others reach this worker",
            )
        target = Target(WorkerId(request.worker_id), Epoch(request.epoch), request.address, own)
        wanted = {RequestId(one) for one in request.request_ids}
        chosen, num_left = await self._on_loop(lambda: self._departures.select(wanted, request.max_sequences or None))
        slots = asyncio.Semaphore(_AT_A_TIME)
        response = worker_pb2.MigrateResponse(num_left=num_left)

        async def move(one: DecodeRequest) -> None:
            async with slots:
                error = await self._move(one, target)
            if error is None:
                response.moved.append(one.sequence.request_id)
            else:
                response.failed.add(request_id=one.sequence.request_id, error=to_status(error))

        await asyncio.gather(*(move(one) for one in chosen))
        return response

    async def _move(self, request: DecodeRequest, target: Target) -> PenstockError | None:
        """Bounded by the limits of each stage: every departure reports."""
        reported: asyncio.Future[PenstockError | None] = asyncio.get_running_loop().create_future()
        self._loop.post(lambda: self._departures.begin(request, target, lambda error: _set_result(reported, error)))
        return await reported

    async def _on_loop(self, call: Callable[[], ResultT]) -> ResultT:
        done: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._loop.post(lambda: _set_result(done, call()))
        return await done

    # At the target.

    async def adopt(
        self, commands: AsyncIterator[worker_pb2.AdoptCommand]
    ) -> AsyncGenerator[worker_pb2.AdoptEvent, None]:
        start = (await read_start(commands)).start
        key = wire.transfer_key_from_wire(start.transfer)
        if key.receiver_epoch != self._epoch:
            raise TransferError(f"transfer {key.transfer_id}: for epoch {key.receiver_epoch}, this is {self._epoch}")
        num_ranks = start.num_ranks or 1
        call = AdoptCall(self._receiver.offer(WorkerId(start.worker_id), key.sender_epoch, num_ranks))
        self._loop.post(lambda: self._adoptions.ask(key, start, call))
        reader = asyncio.create_task(self._follow(commands, key, call))
        try:
            async for event in call.events():
                yield event
        finally:
            reader.cancel()
            if not call.closed:
                lost = Unavailable(f"lost decode worker {start.worker_id}")
                self._loop.post(lambda: self._adoptions.on_lost(key, lost))
                self._fences.watch(key, start.address)

    async def _follow(
        self, commands: AsyncIterator[worker_pb2.AdoptCommand], key: TransferKey, call: AdoptCall
    ) -> None:
        """Commands after the first."""
        try:
            async for command in commands:
                if command.WhichOneof("command") == "finish":
                    self._finish(key, command.finish)
                elif command.WhichOneof("command") == "heartbeat":
                    self._loop.post(lambda: self._adoptions.on_heartbeat(key))
                elif command.WhichOneof("command") == "closed":
                    self._close(key, command.closed)
                    call.closed = True
                    return
        finally:
            call.end()

    def _finish(self, key: TransferKey, finish: worker_pb2.AdoptFinish) -> None:
        told = finish.manifest
        hashes = tuple(PageHash(page) for page in told.page_hashes)
        manifest = Manifest(told.num_tokens, told.num_pages, hashes, tuple(told.checksums))
        paused_s = finish.paused_ms / 1e3
        self._loop.post(lambda: self._adoptions.on_finish(key, finish.state, manifest, paused_s))

    def _close(self, key: TransferKey, closed: worker_pb2.AdoptClosed) -> None:
        error = from_status(closed.error) if closed.HasField("error") else None
        self._loop.post(lambda: self._adoptions.on_closed(key, error))


def _set_result(future: asyncio.Future[ResultT], result: ResultT) -> None:
    """From the step loop. The caller may have gone meanwhile."""

    def settle() -> None:
        if not future.done():
            future.set_result(result)

    future.get_loop().call_soon_threadsafe(settle)
