"""gRPC of cached pages that change workers: `HandOver` at the one that leaves, `Take` at those that stay.

Translates and nothing else, for workers of either role; `kv_transfer.page_source` and `kv_transfer.page_intake` do what
is asked, on the step loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

import grpc.aio

from penstock import wire
from penstock.addresses import is_every_interface
from penstock.errors import InvalidInput, PenstockError, TransferError, Unavailable, from_status, to_status
from penstock.fence_keeper import FenceKeeper
from penstock.grpc_server import read_start, typed_errors
from penstock.handover_client import HandoverClient, Post
from penstock.types import Epoch, HandoverTarget, PageHash, PageId, TransferKey, WorkerId
from penstock.v1 import worker_pb2, worker_pb2_grpc


class Intake(Protocol):
    """`kv_transfer.page_intake.PageIntake`; called on the step loop, but for `offer`, which blocks."""

    def offer(self, peer: WorkerId, epoch: Epoch, num_ranks: int) -> bytes: ...

    def ask(
        self,
        key: TransferKey,
        layout_digest: str,
        pages: Sequence[tuple[PageHash, PageHash | None]],
        call: TakeCall,
    ) -> None: ...

    def on_told(
        self, key: TransferKey, num_pages: int, page_hashes: Sequence[PageHash], checksums: Sequence[int]
    ) -> None: ...

    def on_closed(self, key: TransferKey, error: PenstockError | None) -> None: ...

    def on_lost(self, key: TransferKey, error: PenstockError) -> None: ...


class TakeCall:
    """One batch's events on their way to the source. Methods may be called from any thread."""

    def __init__(self, offer: bytes, post: Post) -> None:
        self._offer = offer
        self._post = post
        self._running = asyncio.get_running_loop()
        self._events: asyncio.Queue[worker_pb2.TakeEvent | None] = asyncio.Queue()
        self.closed = False  # the source has said that it writes no more

    def destination(self, wanted: Sequence[int], pages: Sequence[PageId]) -> None:
        destination = worker_pb2.TakeDestination(wanted=wanted, pages=pages, offer=self._offer)
        self._send(worker_pb2.TakeEvent(destination=destination))

    def taken(self, num_pages: int) -> None:
        self._send(worker_pb2.TakeEvent(taken=worker_pb2.TakeTaken(num_pages=num_pages)))

    def refused(self, error: PenstockError) -> None:
        self._send(worker_pb2.TakeEvent(refused=worker_pb2.TakeRefused(error=to_status(error))))

    def compute(self, work: Callable[[], list[int]], then: Callable[[list[int]], None]) -> None:
        """Runs `work` on some thread and posts `then` to the step loop."""

        def done(future: asyncio.Future[list[int]]) -> None:
            result = [] if future.cancelled() or future.exception() is not None else future.result()
            self._post(lambda: then(result))

        self._running.call_soon_threadsafe(lambda: self._running.run_in_executor(None, work).add_done_callback(done))

    def end(self) -> None:
        self._send(None)

    async def events(self) -> AsyncIterator[worker_pb2.TakeEvent]:
        # No deadline here: the source ends every call, and keepalive pings notice a dead one.
        while (event := await self._events.get()) is not None:
            yield event

    def _send(self, event: worker_pb2.TakeEvent | None) -> None:
        self._running.call_soon_threadsafe(self._events.put_nowait, event)


class HandoverService(worker_pb2_grpc.PageHandoverServicer):
    def __init__(
        self,
        client: HandoverClient,
        intake: Intake,
        post: Post,
        fences: FenceKeeper,
        epoch: Epoch,
        address: Callable[[], str],
    ) -> None:
        """`address` is where this worker listens."""
        self._client = client
        self._intake = intake
        self._post = post
        self._fences = fences
        self._epoch = epoch
        self._address = address

    async def HandOver(
        self, request: worker_pb2.HandOverRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.HandOverResponse:
        async with typed_errors(context):
            own = request.source_address or self._address()
            if is_every_interface(own.rpartition(":")[0]):
                raise InvalidInput(
                    "source_address",
                    f"is {own!r}, which nobody can call; name the address at which others reach this worker",
                )
            if any(one.epoch == self._epoch for one in request.targets):
                raise InvalidInput("targets", f"hold {self._epoch}, this very worker's epoch; name other workers")
            targets = [
                HandoverTarget(WorkerId(one.worker_id), Epoch(one.epoch), one.address, one.max_pages)
                for one in request.targets
            ]
            began_s = time.monotonic()
            handed = await self._client.hand_over(targets, request.max_bytes, request.timeout_ms / 1e3, own)
            return worker_pb2.HandOverResponse(
                num_pages=sum(one.num_pages for one in handed),
                num_known=sum(one.num_known for one in handed),
                num_bytes=sum(one.num_moved for one in handed) * self._client.page_bytes,
                elapsed_ms=(time.monotonic() - began_s) * 1e3,
                problems=[one.problem for one in handed if one.problem],
            )

    async def Take(
        self, request_iterator: AsyncIterator[worker_pb2.TakeCommand], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.TakeEvent]:
        async with typed_errors(context):
            start = (await read_start(request_iterator)).start
            key = wire.transfer_key_from_wire(start.transfer)
            if key.receiver_epoch != self._epoch:
                raise TransferError(
                    f"transfer {key.transfer_id}: for epoch {key.receiver_epoch}, this is {self._epoch}"
                )
            source, num_ranks = WorkerId(start.worker_id), max(1, start.num_ranks)  # 0: one that does not say
            offer = await asyncio.to_thread(self._intake.offer, source, key.sender_epoch, num_ranks)
            call = TakeCall(offer, self._post)
            pages = [(PageHash(one.hash), PageHash(one.parent) if one.parent else None) for one in start.pages]
            self._post(lambda: self._intake.ask(key, start.layout_digest, pages, call))
            reader = asyncio.create_task(self._follow(request_iterator, key, call))
            try:
                async for event in call.events():
                    yield event
            finally:
                reader.cancel()
                if not call.closed:
                    lost = Unavailable(f"lost {start.worker_id}, whose cached pages were to come")
                    self._post(lambda: self._intake.on_lost(key, lost))
                    self._fences.watch(key, start.address)

    async def _follow(self, commands: AsyncIterator[worker_pb2.TakeCommand], key: TransferKey, call: TakeCall) -> None:
        """Commands after the first, until the source says no more."""
        try:
            async for command in commands:
                if command.WhichOneof("command") == "finish":
                    self._tell(key, command.finish)
                elif command.WhichOneof("command") == "closed" and not call.closed:
                    call.closed = True
                    self._close(key, command.closed)
        finally:
            call.end()

    def _tell(self, key: TransferKey, told: worker_pb2.PrefillPushed) -> None:
        hashes = [PageHash(page) for page in told.page_hashes]
        self._post(lambda: self._intake.on_told(key, told.num_pages, hashes, list(told.checksums)))

    def _close(self, key: TransferKey, closed: worker_pb2.TakeClosed) -> None:
        error = from_status(closed.error) if closed.HasField("error") else None
        self._post(lambda: self._intake.on_closed(key, error))
