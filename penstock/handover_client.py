"""Calls that hand cached pages over to other workers: one call a batch, hottest pages first, each target on its own.

Runs on the server's event loop, beside the step loop that owns the pages (`Source`). Whatever ends a batch, its pages
are referenced until nothing of it is written any more.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import grpc.aio

from penstock import wire
from penstock.channels import Channels
from penstock.errors import DeadlineExceeded, PenstockError, TransferError, from_rpc_error, from_status, to_status
from penstock.types import CachedPage, Epoch, HandoverTarget, PageId, TransferId, TransferKey, WorkerId
from penstock.v1 import worker_pb2, worker_pb2_grpc

BATCH_BYTES = 32 << 20
BATCH_PAGES = 256
_LEAVE_TIMEOUT_S = 2.0  # for what is under way when time is up

Post = Callable[[Callable[[], None]], None]
ResultT = TypeVar("ResultT")


class Source(Protocol):
    """`kv_transfer.page_source.PageSource`; called on the step loop, but for `checksums`."""

    @property
    def page_bytes(self) -> int: ...

    @property
    def layout_digest(self) -> str: ...

    @property
    def num_ranks(self) -> int: ...

    def pick(self, targets: Sequence[HandoverTarget], max_pages: int) -> Mapping[Epoch, list[CachedPage]]: ...

    def release(self, pages: Sequence[CachedPage]) -> None: ...

    def push(
        self,
        key: TransferKey,
        offer: bytes,
        src_pages: Sequence[PageId],
        dst_pages: Sequence[PageId],
        on_sent: Callable[[PenstockError | None], None],
    ) -> None: ...

    def checksums(self, pages: Sequence[PageId], offer: bytes) -> list[int]: ...

    def abort(self, key: TransferKey) -> None: ...


@dataclass(slots=True)
class Handed:
    """What became of one target's share."""

    num_pages: int = 0
    num_known: int = 0
    num_moved: int = 0  # over the wire, whether or not they were of use
    problem: str = ""


@dataclass(slots=True, eq=False)
class _Batch:
    key: TransferKey
    pages: Sequence[CachedPage]
    commands: asyncio.Queue[worker_pb2.TakeCommand | None] = field(default_factory=asyncio.Queue)
    sent: asyncio.Future[PenstockError | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    is_pushed: bool = False  # set on the step loop

    def close(self, error: PenstockError | None = None) -> None:
        closed = worker_pb2.TakeClosed(error=to_status(error) if error else None)
        self.commands.put_nowait(worker_pb2.TakeCommand(closed=closed))


class HandoverClient:
    def __init__(self, source: Source, post: Post, channels: Channels, worker_id: WorkerId, epoch: Epoch) -> None:
        """`post` runs a call on the step loop."""
        self._source = source
        self._post = post
        self._channels = channels
        self._worker_id = worker_id
        self._epoch = epoch
        self._batch_pages = max(1, min(BATCH_PAGES, BATCH_BYTES // source.page_bytes))

    @property
    def page_bytes(self) -> int:
        return self._source.page_bytes

    async def hand_over(
        self, targets: Sequence[HandoverTarget], max_bytes: int, timeout_s: float, own_address: str
    ) -> list[Handed]:
        """Of each target, in their order. `own_address` is where the others reach this worker."""
        deadline_s = time.monotonic() + timeout_s
        max_pages = max_bytes // self.page_bytes
        picked = await self._on_loop(lambda: self._source.pick(targets, max_pages))
        return list(
            await asyncio.gather(
                *(self._send_all(one, picked.get(one.epoch, []), deadline_s, own_address) for one in targets)
            )
        )

    async def _send_all(
        self, target: HandoverTarget, pages: list[CachedPage], deadline_s: float, own_address: str
    ) -> Handed:
        handed, begun = Handed(), 0
        try:
            while begun < len(pages):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise DeadlineExceeded(f"time is up for {len(pages) - begun} pages")
                part = pages[begun : begun + self._batch_pages]
                begun += len(part)
                await self._send(target, part, left_s, own_address, handed)
        except PenstockError as error:
            handed.problem = f"{target.worker_id}: {error.message}"
        finally:
            rest = pages[begun:]
            if rest:
                self._post(lambda: self._source.release(rest))
        return handed

    async def _send(
        self, target: HandoverTarget, pages: Sequence[CachedPage], left_s: float, own_address: str, handed: Handed
    ) -> None:
        """One batch. Raises PenstockError."""
        batch = _Batch(TransferKey(TransferId(uuid.uuid4().hex), self._epoch, target.epoch), pages)
        start = worker_pb2.TakeStart(
            transfer=wire.transfer_key_to_wire(batch.key),
            pages=[worker_pb2.CachedPage(hash=one.page_hash, parent=one.parent or b"") for one in pages],
            layout_digest=self._source.layout_digest,
            worker_id=self._worker_id,
            address=own_address,
            num_ranks=self._source.num_ranks,
        )
        batch.commands.put_nowait(worker_pb2.TakeCommand(start=start))
        call = worker_pb2_grpc.PageHandoverStub(self._channels.get(target.address)).Take(_commands(batch))
        try:
            async with asyncio.timeout(left_s):
                await self._follow(batch, call, handed)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except TimeoutError:
            raise DeadlineExceeded("time is up") from None
        finally:
            self._post(lambda: None if batch.is_pushed else self._source.release(pages))
            self._end(batch, call)

    async def _follow(
        self,
        batch: _Batch,
        call: grpc.aio.StreamStreamCall[worker_pb2.TakeCommand, worker_pb2.TakeEvent],
        handed: Handed,
    ) -> None:
        destination = (await _next(call, "destination")).destination
        wanted = [batch.pages[index] for index in destination.wanted]
        handed.num_known += len(batch.pages) - len(wanted)
        if wanted:
            own = [one.page for one in wanted]
            checksums = await asyncio.to_thread(self._source.checksums, own, destination.offer)
            await self._on_loop(lambda: self._push(batch, destination, own))
            manifest = worker_pb2.PrefillPushed(
                page_hashes=[one.page_hash for one in wanted], num_pages=len(wanted), checksums=checksums
            )
            batch.commands.put_nowait(worker_pb2.TakeCommand(finish=manifest))
            error = await asyncio.shield(batch.sent)
            if error is not None:
                raise error
            handed.num_moved += len(wanted)
        batch.close()
        handed.num_pages += (await _next(call, "taken")).taken.num_pages

    def _push(self, batch: _Batch, destination: worker_pb2.TakeDestination, own: Sequence[PageId]) -> None:
        """On the step loop."""
        running = batch.sent.get_loop()

        def on_sent(error: PenstockError | None) -> None:
            self._source.release(batch.pages)
            running.call_soon_threadsafe(_settle, batch.sent, error)

        self._source.push(batch.key, destination.offer, own, [PageId(page) for page in destination.pages], on_sent)
        batch.is_pushed = True

    def _end(
        self, batch: _Batch, call: grpc.aio.StreamStreamCall[worker_pb2.TakeCommand, worker_pb2.TakeEvent]
    ) -> None:
        """Says `closed` once nothing is written any more; a target that does not hear it finds out by itself."""
        if batch.is_pushed and not batch.sent.done():
            self._post(lambda: self._source.abort(batch.key))
            batch.sent.add_done_callback(lambda sent: _leave(batch))
            leave = asyncio.get_running_loop().call_later(_LEAVE_TIMEOUT_S, call.cancel)
            call.add_done_callback(lambda call: leave.cancel())
        else:
            _leave(batch)

    async def _on_loop(self, work: Callable[[], ResultT]) -> ResultT:
        running = asyncio.get_running_loop()
        done: asyncio.Future[ResultT] = running.create_future()

        def run() -> None:
            try:
                result = work()
            except PenstockError as error:
                running.call_soon_threadsafe(_fail, done, error)
            else:
                running.call_soon_threadsafe(_settle, done, result)

        self._post(run)
        return await done


def _leave(batch: _Batch) -> None:
    batch.close(TransferError("the source gave the batch up"))  # without effect on one that is closed already
    batch.commands.put_nowait(None)


async def _next(
    call: grpc.aio.StreamStreamCall[worker_pb2.TakeCommand, worker_pb2.TakeEvent], kind: str
) -> worker_pb2.TakeEvent:
    event = await call.read()
    if not isinstance(event, worker_pb2.TakeEvent):
        raise TransferError(f"the target ended the call without {kind}")
    if event.HasField("refused"):
        raise from_status(event.refused.error)
    if event.WhichOneof("event") != kind:
        raise TransferError(f"the target said {event.WhichOneof('event')}; expected {kind}")
    return event


async def _commands(batch: _Batch) -> AsyncIterator[worker_pb2.TakeCommand]:
    while (command := await batch.commands.get()) is not None:
        yield command


def _settle(future: asyncio.Future[ResultT], result: ResultT) -> None:
    """The caller may have gone meanwhile."""
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[ResultT], error: PenstockError) -> None:
    if not future.done():
        future.set_exception(error)
