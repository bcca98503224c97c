"""Queues the pushes to one receiver incarnation, keeps those in flight, and decides when each transfer is over.

Pages of interactive requests go before standard ones, and bulk goes last; waiting pushes age in bytes sent
(penstock/scheduling/lane_order.py), so no lane starves another. Bulk fills only part of the link, because a posted push
cannot be overtaken.

Only the sender's thread uses it. It owns no thread, lock or clock. Invariant: a transfer is `over` exactly once, after
its last push has ended in success or failure.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

from kv_transfer.layout.staging import PageSlices, Staging
from kv_transfer.transports.transport import ALL_LAYERS, MAX_PUSH_BYTES, Arrival, LayerGroup, PushHandle, TransportLink
from penstock.errors import TransferError
from penstock.scheduling.lane_order import LaneOrder
from penstock.types import Lane, PageId, TransferKey

MAX_INFLIGHT_BYTES = 64 << 20  # most bytes in flight on a typical link; the rest waits here, as page numbers only
MAX_BULK_BYTES = 16 << 20  # most in flight when a bulk push starts: enough to keep a link busy
# Bytes of later arrivals that may overtake a push of this lane: for bulk, about a second of a typical link.
HANDICAP_BYTES = {Lane.INTERACTIVE: 0, Lane.STANDARD: 128 << 20, Lane.BULK: 1 << 30}


class ReadyEvent(Protocol):
    """Shows when the pages of a push are complete in memory, like a torch.cuda.Event."""

    def query(self) -> bool: ...


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    """A transfer at the sender."""

    key: TransferKey
    lane: Lane = Lane.STANDARD
    num_unfinished: int = 0  # pushes queued or in flight
    finishing: bool = False  # no more pushes will come
    aborted: bool = False
    error: TransferError | None = None

    @property
    def over(self) -> bool:
        return self.num_unfinished == 0 and (self.finishing or self.aborted or self.error is not None)

    @property
    def cut_short(self) -> bool:
        return self.aborted or self.error is not None


@dataclass(slots=True, eq=False)
class QueuedPush:
    """A push that waits for its turn."""

    transfer: OutgoingTransfer
    first_index: int
    src_pages: Sequence[PageId] | Sequence[PageSlices]  # the slices of each page if it must be staged
    dst_pages: Sequence[PageId]
    ready: ReadyEvent | None
    layer_group: LayerGroup = ALL_LAYERS
    order: tuple[float, int] = (0.0, 0)  # pushes are ordered by lane rank, then by arrival


@dataclass(slots=True)
class _Flight:
    transfer: OutgoingTransfer
    push: PushHandle
    pages: Sequence[PageId]  # pages of the pool or staged pages
    layer_group: LayerGroup


@dataclass(slots=True)
class SendQueue:
    page_bytes: int  # size of the receiver's pages
    link: TransportLink | None = None
    staging: Staging | None = None  # set if the receiver's layout differs from ours
    transfers: dict[TransferKey, OutgoingTransfer] = field(default_factory=dict)
    last_progress_s: float = 0.0
    num_pages_sent: int = 0
    _queue: list[QueuedPush] = field(default_factory=list)  # sorted by `order`
    _num_queued: int = 0  # pushes queued since the start
    _aging: LaneOrder = field(default_factory=lambda: LaneOrder(HANDICAP_BYTES))
    _in_flight: deque[_Flight] = field(default_factory=deque)
    _bytes_in_flight: int = 0

    def connect(self, link: TransportLink, staging: Staging | None) -> None:
        """Lets pushes start. `staging` is needed if the receiver's layout differs from ours."""
        self.link, self.staging = link, staging

    @property
    def waits_for_polling(self) -> bool:
        waits_for_gpu = any(queued.ready is not None for queued in self._queue)
        return self.link is not None and (waits_for_gpu or (bool(self._in_flight) and self.link.needs_polling))

    @property
    def busy(self) -> bool:
        return bool(self._in_flight)

    @property
    def _max_push_bytes(self) -> int:
        return self.link.max_push_bytes if self.link is not None and self.staging is None else MAX_PUSH_BYTES

    def add(self, queued: QueuedPush) -> None:
        """Queues a push, cut to the size that a link takes at once. Pushes of a transfer keep their order."""
        step = max(1, self._max_push_bytes // self.page_bytes)
        for start in range(0, len(queued.src_pages), step):
            self._num_queued += 1
            piece = replace(
                queued,
                first_index=queued.first_index + start,
                src_pages=queued.src_pages[start : start + step],
                dst_pages=queued.dst_pages[start : start + step],
                order=(self._aging.rank(queued.transfer.lane), self._num_queued),
            )
            bisect.insort(self._queue, piece, key=lambda waiting: waiting.order)
            queued.transfer.num_unfinished += 1

    def post(self, now_s: float) -> bool:
        """Starts the pushes that may start. Returns whether any did. Raises TransferError if the link is dead."""
        if self.link is None:
            return False
        started = False
        self._drop_cut_short()
        while (queued := self._next_ready()) is not None:
            pages = self._stage(queued)
            if pages is None:
                break
            self._queue.remove(queued)
            if not self._in_flight:
                self.last_progress_s = now_s
            arrival = Arrival(queued.transfer.key, queued.first_index, len(queued.src_pages))
            try:
                push = self.link.push(arrival, pages, queued.dst_pages, queued.layer_group)
            except TransferError as error:
                self._unstage(pages)
                queued.transfer.num_unfinished -= 1
                queued.transfer.error = queued.transfer.error or error
                self.link.check()
                continue
            self._bytes_in_flight += len(pages) * self.page_bytes
            self._aging.advance(len(pages) * self.page_bytes)
            self._in_flight.append(_Flight(queued.transfer, push, pages, queued.layer_group))
            started = True
        return started

    def _next_ready(self) -> QueuedPush | None:
        """Returns the first push whose pages are complete and that there is room for."""
        scale = self._max_push_bytes // MAX_PUSH_BYTES
        if self._bytes_in_flight >= MAX_INFLIGHT_BYTES * scale:
            return None
        not_ready = self._num_queued + 1  # chunks complete in queueing order
        for queued in self._queue:
            if queued.transfer.lane is Lane.BULK and self._bytes_in_flight >= MAX_BULK_BYTES * scale:
                continue
            if queued.ready is None or (queued.order[1] < not_ready and queued.ready.query()):
                return queued
            not_ready = min(not_ready, queued.order[1])
        return None

    def _stage(self, queued: QueuedPush) -> Sequence[PageId] | None:
        """Returns the pages to push; None if they must be staged and there is no room yet."""
        if self.staging is None:
            return cast(Sequence[PageId], queued.src_pages)
        num_held = self._bytes_in_flight // self.page_bytes
        return self.staging.stage(cast(Sequence[PageSlices], queued.src_pages), num_held)

    def _unstage(self, pages: Sequence[PageId]) -> None:
        if self.staging is not None:
            self.staging.release(pages)

    def reap(self, now_s: float) -> None:
        """Collects pushes that have ended. Raises TransferError if the link is dead."""
        still: deque[_Flight] = deque()
        for flight in self._in_flight:
            try:
                ended = flight.push.done()
                self.num_pages_sent += len(flight.pages) if ended and flight.layer_group.is_last else 0
            except TransferError as error:
                flight.transfer.error = flight.transfer.error or error
                ended = True
            if ended:
                self.last_progress_s = now_s
                self._bytes_in_flight -= len(flight.pages) * self.page_bytes
                self._unstage(flight.pages)
                flight.transfer.num_unfinished -= 1
            else:
                still.append(flight)
        self._in_flight = still
        if self.link is not None:
            self.link.check()

    def stalled(self, now_s: float, timeout_s: float) -> bool:
        return self.busy and now_s - self.last_progress_s > timeout_s

    def fail(self, error: TransferError) -> None:
        """Ends every transfer. Nothing is in flight, as the link is closed or could not be opened."""
        for transfer in self.transfers.values():
            transfer.error = transfer.error or error
            transfer.num_unfinished = 0
        self._queue.clear()
        for flight in self._in_flight:
            self._unstage(flight.pages)
        self._in_flight.clear()
        self._bytes_in_flight = 0
        self.link = None

    def pop_over(self) -> list[OutgoingTransfer]:
        """Removes and returns the transfers that are over."""
        self._drop_cut_short()
        over = [transfer for transfer in self.transfers.values() if transfer.over]
        for transfer in over:
            del self.transfers[transfer.key]
        return over

    def _drop_cut_short(self) -> None:
        if not any(queued.transfer.cut_short for queued in self._queue):
            return
        kept: list[QueuedPush] = []
        for queued in self._queue:
            if queued.transfer.cut_short:
                queued.transfer.num_unfinished -= 1
            else:
                kept.append(queued)
        self._queue = kept
