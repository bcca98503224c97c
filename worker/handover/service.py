"""The gRPC service of page hand-over: `HandOver` at a draining worker, `SendPages` at a worker that others pull from,
and `ReceivePages` at the workers that get the pages.

Serves workers of either role. It only translates: `HandoverClient` and `PageIntake` do the work.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence

import grpc.aio

from kv_transfer.session.handshake import check_receiver
from penstock import wire
from penstock.errors import (
    InvalidInput,
    Overloaded,
    PenstockError,
    TransferError,
    TransferRefused,
    Unavailable,
    from_status,
    to_status,
)
from penstock.rpc.addresses import require_source_address
from penstock.rpc.server import read_start, typed_errors
from penstock.types import Epoch, HandoverTarget, PageHash, PageId, TransferKey, WorkerId
from penstock.v1 import worker_pb2, worker_pb2_grpc
from worker.call_events import CallEvents
from worker.fence_monitor import FenceMonitor
from worker.handover.client import HandoverClient, Post, SendOrder
from worker.handover.intake import PageIntake

log = logging.getLogger(__name__)

_MAX_NAMED_PAGES = 65536  # limit of one call
_RETRY_AFTER_S = 1.0


class ReceivePagesCall(CallEvents[worker_pb2.ReceivePagesEvent]):
    """Queues the events of one batch for its source. Thread-safe."""

    def __init__(self, offer: bytes, post: Post) -> None:
        super().__init__()
        self._offer = offer
        self._post = post

    def destination(self, wanted: Sequence[int], pages: Sequence[PageId]) -> None:
        destination = worker_pb2.ReceivePagesDestination(wanted=wanted, pages=pages, offer=self._offer)
        self._send(worker_pb2.ReceivePagesEvent(destination=destination))

    def cached(self, num_pages: int) -> None:
        self._send(worker_pb2.ReceivePagesEvent(cached=worker_pb2.PagesCached(num_pages=num_pages)))

    def refused(self, error: PenstockError) -> None:
        refused = worker_pb2.ReceivePagesRefused(error=to_status(error))
        self._send(worker_pb2.ReceivePagesEvent(refused=refused))

    def compute(self, work: Callable[[], list[int]], then: Callable[[list[int] | None], None]) -> None:
        """Runs `work` on another thread and posts `then` to the step loop, with None if `work` failed."""
        loop = self._event_loop

        def done(future: asyncio.Future[list[int]]) -> None:
            error = None if future.cancelled() else future.exception()
            if error is not None:
                log.error("computing the checksums of a batch failed", exc_info=error)
            result = None if future.cancelled() or error is not None else future.result()
            self._post(lambda: then(result))

        loop.call_soon_threadsafe(lambda: loop.run_in_executor(None, work).add_done_callback(done))


class HandoverService(worker_pb2_grpc.PageHandoverServicer):
    def __init__(
        self,
        client: HandoverClient,
        intake: PageIntake,
        post: Post,
        fences: FenceMonitor,
        epoch: Epoch,
        address: Callable[[], str],
        max_pulls: int,
    ) -> None:
        """`address` returns this worker's address. `max_pulls` bounds the pulls served at once; 0 serves none."""
        self._client = client
        self._intake = intake
        self._post = post
        self._fences = fences
        self._epoch = epoch
        self._address = address
        self._max_pulls = max_pulls
        self._num_pulls = 0

    async def HandOver(
        self, request: worker_pb2.HandOverRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.HandOverResponse:
        async with typed_errors(context):
            own = require_source_address(request.source_address or self._address())
            if any(target.epoch == self._epoch for target in request.targets):
                raise InvalidInput("targets", f"hold {self._epoch}, this worker's own epoch; name other workers")
            targets = [
                HandoverTarget(WorkerId(target.worker_id), Epoch(target.epoch), target.address, target.max_pages)
                for target in request.targets
            ]
            started_s = time.monotonic()
            reports = await self._client.hand_over(targets, request.max_bytes, request.timeout_ms / 1e3, own)
            return worker_pb2.HandOverResponse(
                num_pages=sum(report.num_pages for report in reports),
                num_known=sum(report.num_known for report in reports),
                num_bytes=sum(report.num_sent for report in reports) * self._client.page_bytes,
                elapsed_ms=(time.monotonic() - started_s) * 1e3,
                problems=[report.problem for report in reports if report.problem],
            )

    async def SendPages(
        self, request: worker_pb2.SendPagesRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.SendPagesResponse:
        async with typed_errors(context):
            self._check_pull(request)
            own = require_source_address(request.source_address or self._address())
            asked = request.target
            target = HandoverTarget(WorkerId(asked.worker_id), Epoch(asked.epoch), asked.address, asked.max_pages)
            hashes = [PageHash(page) for page in request.page_hashes]
            order = SendOrder(wire.lane_from_wire(request.lane), request.latest_first, request.batch_ms / 1e3)
            self._num_pulls += 1
            try:
                num_held, report = await self._client.send(target, hashes, request.timeout_ms / 1e3, own, order)
            finally:
                self._num_pulls -= 1
            num_bytes = report.num_sent * self._client.page_bytes
            return worker_pb2.SendPagesResponse(
                num_held=num_held, num_pages=report.num_pages, num_bytes=num_bytes, problem=report.problem
            )

    def _check_pull(self, request: worker_pb2.SendPagesRequest) -> None:
        """Raises PenstockError unless the pull can be served."""
        if request.source_epoch != self._epoch:
            raise TransferError(f"source_epoch is {request.source_epoch}; this is {self._epoch}")
        if request.target.epoch == self._epoch:
            raise InvalidInput("target", f"has {self._epoch}, this worker's own epoch; name another worker")
        if len(request.page_hashes) > _MAX_NAMED_PAGES:
            raise InvalidInput("page_hashes", f"has {len(request.page_hashes)} pages; name at most {_MAX_NAMED_PAGES}")
        if not self._max_pulls:
            raise TransferRefused("transfer.pull is off at this worker")
        if self._num_pulls >= self._max_pulls:
            raise Overloaded(f"{self._num_pulls} pulls are in flight from this worker, its limit", _RETRY_AFTER_S)

    async def ReceivePages(
        self, request_iterator: AsyncIterator[worker_pb2.ReceivePagesCommand], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.ReceivePagesEvent]:
        async with typed_errors(context):
            start = (await read_start(request_iterator)).start
            key = wire.transfer_key_from_wire(start.transfer)
            check_receiver(key, self._epoch)
            source, num_ranks = WorkerId(start.worker_id), max(1, start.num_ranks)  # 0 means not specified
            offer = await asyncio.to_thread(self._intake.offer, source, key.sender_epoch, num_ranks)
            call = ReceivePagesCall(offer, self._post)
            pages = [(PageHash(page.hash), PageHash(page.parent) if page.parent else None) for page in start.pages]
            self._post(lambda: self._intake.begin(key, start.layout_digest, pages, call))
            reader = asyncio.create_task(self._read_commands(request_iterator, key, call))
            try:
                async for event in call.events():
                    yield event
            finally:
                reader.cancel()
                if not call.closed:
                    lost = Unavailable(f"lost the connection to {start.worker_id} while it handed over cached pages")
                    self._post(lambda: self._intake.on_lost(key, lost))
                    self._fences.watch(key, start.address)

    async def _read_commands(
        self, commands: AsyncIterator[worker_pb2.ReceivePagesCommand], key: TransferKey, call: ReceivePagesCall
    ) -> None:
        """Handles the commands after the first, until the source hangs up."""
        try:
            async for command in commands:
                if command.WhichOneof("command") == "finish":
                    self._on_manifest(key, command.finish)
                elif command.WhichOneof("command") == "closed" and not call.closed:
                    call.closed = True
                    self._on_closed(key, command.closed)
        finally:
            call.end()

    def _on_manifest(self, key: TransferKey, manifest: worker_pb2.PrefillPushed) -> None:
        hashes = [PageHash(page) for page in manifest.page_hashes]
        self._post(lambda: self._intake.on_manifest(key, manifest.num_pages, hashes, list(manifest.checksums)))

    def _on_closed(self, key: TransferKey, closed: worker_pb2.ReceivePagesClosed) -> None:
        error = from_status(closed.error) if closed.HasField("error") else None
        self._post(lambda: self._intake.on_closed(key, error))
