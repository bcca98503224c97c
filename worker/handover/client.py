"""Hands cached pages over to other workers: one call per batch, hottest pages first, targets in parallel.

Runs on the server's event loop; `PageSource` owns the pages on the step loop. However a batch ends, its pages stay
referenced until its last write is over.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import grpc.aio

from penstock import wire
from penstock.errors import DeadlineExceeded, PenstockError, TransferError, from_rpc_error, from_status, to_status
from penstock.types import (
    CachedPage,
    Epoch,
    HandoverTarget,
    Lane,
    PageHash,
    PageId,
    TransferId,
    TransferKey,
    WorkerId,
)
from penstock.v1 import worker_pb2, worker_pb2_grpc
from worker.channels import Channels
from worker.handover.policy import batch_size, first_batch_size, next_batch_size
from worker.handover.source import PageSource

_CLOSE_TIMEOUT_S = 2.0  # extra time for a batch in flight when the deadline passes

Call: TypeAlias = "grpc.aio.StreamStreamCall[worker_pb2.ReceivePagesCommand, worker_pb2.ReceivePagesEvent]"
Post = Callable[[Callable[[], None]], None]
ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class HandoverReport:
    """The outcome of one target's share."""

    num_pages: int = 0
    num_known: int = 0
    num_sent: int = 0  # pages sent, even if the target could not use them
    write_s: float = 0.0  # time to write the last batch
    problem: str = ""


@dataclass(frozen=True, slots=True)
class SendOrder:
    """The order and size of batches: by default as pages follow each other, and the largest."""

    lane: Lane = Lane.BULK
    latest_first: bool = False
    batch_s: float = 0.0  # time to write a batch, about; 0: the largest batches

    def take_batch(self, pages: list[CachedPage], size: int) -> list[CachedPage]:
        """Removes the next `size` pages."""
        part = slice(-size, None) if self.latest_first else slice(size)
        batch, pages[part] = pages[part], []
        return batch


@dataclass(slots=True, eq=False)
class _Batch:
    key: TransferKey
    pages: Sequence[CachedPage]
    lane: Lane = Lane.BULK
    commands: asyncio.Queue[worker_pb2.ReceivePagesCommand | None] = field(default_factory=asyncio.Queue)
    sent: asyncio.Future[PenstockError | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    is_pushed: bool = False  # set on the step loop, like `is_over`
    is_over: bool = False  # it must no longer be pushed

    def close(self, error: PenstockError | None = None) -> None:
        closed = worker_pb2.ReceivePagesClosed(error=to_status(error) if error else None)
        self.commands.put_nowait(worker_pb2.ReceivePagesCommand(closed=closed))

    def hang_up(self) -> None:
        """Ends the commands; a batch that is not closed yet is closed with an error."""
        self.close(TransferError("the source abandoned the batch"))
        self.commands.put_nowait(None)


class HandoverClient:
    def __init__(self, source: PageSource, post: Post, channels: Channels, worker_id: WorkerId, epoch: Epoch) -> None:
        """`post` runs a call on the step loop."""
        self._source = source
        self._post = post
        self._channels = channels
        self._worker_id = worker_id
        self._epoch = epoch

    @property
    def page_bytes(self) -> int:
        return self._source.page_bytes

    async def hand_over(
        self, targets: Sequence[HandoverTarget], max_bytes: int, timeout_s: float, own_address: str
    ) -> list[HandoverReport]:
        """Returns one report for each target, in order. The targets reach this worker at `own_address`."""
        deadline_s = time.monotonic() + timeout_s
        max_pages = max_bytes // self.page_bytes
        picked = await self._on_loop(lambda: self._source.pick(targets, max_pages))
        shares = ((target, picked.get(target.epoch, [])) for target in targets)
        return list(
            await asyncio.gather(
                *(self._send_share(target, pages, deadline_s, own_address, SendOrder()) for target, pages in shares)
            )
        )

    async def send(
        self,
        target: HandoverTarget,
        hashes: Sequence[PageHash],
        timeout_s: float,
        own_address: str,
        order: SendOrder,
    ) -> tuple[int, HandoverReport]:
        """Sends these consecutive pages up to the first one that is not cached here. Returns how many that are, and the
        outcome.
        """
        deadline_s = time.monotonic() + timeout_s
        taking = asyncio.ensure_future(self._on_loop(lambda: self._source.take(hashes)))
        try:
            pages = await asyncio.shield(taking)
        except asyncio.CancelledError:  # the caller is gone, but the step loop takes the pages anyway
            taking.add_done_callback(lambda taken: self._post(lambda: self._source.release(taken.result())))
            raise
        return len(pages), await self._send_share(target, pages, deadline_s, own_address, order)

    async def _send_share(
        self,
        target: HandoverTarget,
        pages: list[CachedPage],
        deadline_s: float,
        own_address: str,
        order: SendOrder,
    ) -> HandoverReport:
        report, left = HandoverReport(), list(pages)
        size = first_batch_size(self.page_bytes) if order.batch_s else batch_size(self.page_bytes)
        try:
            while left:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise DeadlineExceeded(f"{len(left)} pages were not started before the deadline")
                num_sent, batch = report.num_sent, order.take_batch(left, size)
                await self._send_batch(target, batch, left_s, own_address, report, order.lane)
                if order.batch_s and report.num_sent > num_sent:
                    size = next_batch_size(report.num_sent - num_sent, report.write_s, order.batch_s, self.page_bytes)
        except PenstockError as error:
            report.problem = f"{target.worker_id}: {error.message}"
        finally:
            if left:
                self._post(lambda: self._source.release(left))
        return report

    async def _send_batch(
        self,
        target: HandoverTarget,
        pages: Sequence[CachedPage],
        left_s: float,
        own_address: str,
        report: HandoverReport,
        lane: Lane,
    ) -> None:
        """Sends one batch and adds the outcome to `report`. Raises PenstockError."""
        batch = _Batch(TransferKey(TransferId(uuid.uuid4().hex), self._epoch, target.epoch), pages, lane)
        start = worker_pb2.ReceivePagesStart(
            transfer=wire.transfer_key_to_wire(batch.key),
            pages=[worker_pb2.CachedPage(hash=page.page_hash, parent=page.parent or b"") for page in pages],
            layout_digest=self._source.layout_digest,
            worker_id=self._worker_id,
            address=own_address,
            num_ranks=self._source.num_ranks,
        )
        batch.commands.put_nowait(worker_pb2.ReceivePagesCommand(start=start))
        async with self._channels.use(target.address) as channel:
            call = worker_pb2_grpc.PageHandoverStub(channel).ReceivePages(_commands(batch))
            try:
                async with asyncio.timeout(left_s):
                    await self._follow(batch, call, report)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
            except TimeoutError:
                raise DeadlineExceeded("a batch did not end within the deadline") from None
            finally:
                self._end(batch, call)

    async def _follow(
        self,
        batch: _Batch,
        call: Call,
        report: HandoverReport,
    ) -> None:
        destination = (await _next(call, "destination")).destination
        wanted = wanted_pages(batch.pages, destination)
        report.num_known += len(batch.pages) - len(wanted)
        if wanted:
            own = [page.page for page in wanted]
            checksums = await asyncio.to_thread(self._source.checksums, own, destination.offer)
            began_s = time.monotonic()
            await self._on_loop(lambda: self._push(batch, destination, own))
            manifest = worker_pb2.PrefillPushed(
                page_hashes=[page.page_hash for page in wanted], num_pages=len(wanted), checksums=checksums
            )
            batch.commands.put_nowait(worker_pb2.ReceivePagesCommand(finish=manifest))
            error = await asyncio.shield(batch.sent)
            if error is not None:
                raise error
            report.num_sent += len(wanted)
            report.write_s = time.monotonic() - began_s
        batch.close()
        report.num_pages += (await _next(call, "cached")).cached.num_pages

    def _push(self, batch: _Batch, destination: worker_pb2.ReceivePagesDestination, own: Sequence[PageId]) -> None:
        """Pushes the batch's pages. Runs on the step loop."""
        if batch.is_over:
            raise TransferError("the batch was abandoned before its pages were pushed")
        event_loop = batch.sent.get_loop()

        def on_sent(error: PenstockError | None) -> None:
            self._source.release(batch.pages)
            event_loop.call_soon_threadsafe(_settle, batch.sent, error)

        pages = [PageId(page) for page in destination.pages]
        self._source.push(batch.key, destination.offer, own, pages, on_sent, batch.lane)
        batch.is_pushed = True

    def _end(self, batch: _Batch, call: Call) -> None:
        """Sends `closed` once the last write is over. A target that misses it asks for the transfer's state.

        The step loop decides when, because a push that was requested earlier may not have reached it yet.
        """
        event_loop = batch.sent.get_loop()

        def stop() -> None:
            batch.is_over = True
            if batch.is_pushed:
                self._source.abort(batch.key)
            else:
                self._source.release(batch.pages)
            event_loop.call_soon_threadsafe(hang_up)

        def hang_up() -> None:
            if batch.is_pushed and not batch.sent.done():
                batch.sent.add_done_callback(lambda sent: batch.hang_up())
                timer = event_loop.call_later(_CLOSE_TIMEOUT_S, call.cancel)
                call.add_done_callback(lambda call: timer.cancel())
            else:
                batch.hang_up()

        self._post(stop)

    async def _on_loop(self, work: Callable[[], ResultT]) -> ResultT:
        """Runs `work` on the step loop and returns its result or raises its PenstockError."""
        event_loop = asyncio.get_running_loop()
        done: asyncio.Future[ResultT] = event_loop.create_future()

        def run() -> None:
            try:
                result = work()
            except PenstockError as error:
                event_loop.call_soon_threadsafe(_fail, done, error)
            else:
                event_loop.call_soon_threadsafe(_settle, done, result)

        self._post(run)
        return await done


async def _next(call: Call, kind: str) -> worker_pb2.ReceivePagesEvent:
    event = await call.read()
    if not isinstance(event, worker_pb2.ReceivePagesEvent):
        raise TransferError(f"the target ended the call without {kind}")
    if event.HasField("refused"):
        raise from_status(event.refused.error)
    if event.WhichOneof("event") != kind:
        raise TransferError(f"the target sent {event.WhichOneof('event')}; expected {kind}")
    return event


def wanted_pages(pages: Sequence[CachedPage], destination: worker_pb2.ReceivePagesDestination) -> list[CachedPage]:
    """Returns the pages that the target asks for. Raises TransferError unless it names each at most once and gives a
    page of its own for each.
    """
    indexes, num_pages = list(destination.wanted), len(destination.pages)
    if len(set(indexes)) != len(indexes) or num_pages != len(indexes) or max(indexes, default=0) >= len(pages):
        raise TransferError(
            f"destination: pages {str(indexes)[:80]} into {num_pages}; want some of {len(pages)} pages, each once, and "
            "as many to write them to"
        )
    return [pages[index] for index in indexes]


async def _commands(batch: _Batch) -> AsyncIterator[worker_pb2.ReceivePagesCommand]:
    while (command := await batch.commands.get()) is not None:
        yield command


def _settle(future: asyncio.Future[ResultT], result: ResultT) -> None:
    if not future.done():  # otherwise its waiter was cancelled
        future.set_result(result)


def _fail(future: asyncio.Future[ResultT], error: PenstockError) -> None:
    if not future.done():
        future.set_exception(error)
