"""What a sender still owes one receiver incarnation: pushes in order, what is under way, and each transfer's fate.

Pages of interactive requests go before standard ones, bulk goes last, and what waits ages in bytes sent
(penstock/aging.py), so that no lane holds another one up for ever. Bulk fills a part of the link only: what is posted
cannot be overtaken any more.

The sender's thread alone uses it. It decides what may be posted, what is over and what is stuck; it owns no thread, no
lock and no clock. Invariant: a transfer is `over` exactly once, after its last push has ended one way or the other.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from kv_transfer.staging import PageParts, Staging
from kv_transfer.transport import MAX_PUSH_BYTES, WHOLE, Arrival, Link, Part, Push
from penstock.aging import Aging
from penstock.errors import TransferError
from penstock.types import Lane, PageId, TransferKey

MAX_INFLIGHT_BYTES = 64 << 20  # under way on a link of common speed; the rest waits here, as page numbers only
MAX_BULK_BYTES = 16 << 20  # under way when a bulk push starts: enough to keep a link busy, and soon over
# Bytes that may go out for later arrivals first: a second or so of a common link for bulk.
HANDICAP_BYTES = {Lane.INTERACTIVE: 0, Lane.STANDARD: 128 << 20, Lane.BULK: 1 << 30}


class Gate(Protocol):
    """A torch.cuda.Event, or anything that says when the pages of a push are complete in memory."""

    def query(self) -> bool: ...


@dataclass(slots=True, eq=False)
class Outgoing:
    """One transfer at the sender."""

    key: TransferKey
    lane: Lane = Lane.STANDARD
    num_unfinished: int = 0  # pushes queued or under way
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
class Item:
    """A push that waits for its turn."""

    transfer: Outgoing
    first_index: int
    src_pages: Sequence[PageId] | Sequence[PageParts]  # what each page is made of, where it must be staged
    dst_pages: Sequence[PageId]
    gate: Gate | None
    part: Part = WHOLE
    rank: tuple[float, int] = (0.0, 0)  # by which pushes wait; the second counts the order of arrival


@dataclass(slots=True)
class _Flight:
    transfer: Outgoing
    push: Push
    pages: Sequence[PageId]  # of the pool, or staged
    part: Part


@dataclass(slots=True)
class Outbox:
    page_bytes: int  # of the receiver's pages
    link: Link | None = None
    staging: Staging | None = None  # where its layout is not ours
    transfers: dict[TransferKey, Outgoing] = field(default_factory=dict)
    last_progress_s: float = 0.0
    num_pages_sent: int = 0
    _queue: list[Item] = field(default_factory=list)  # by rank
    _num_queued: int = 0  # so far
    _aging: Aging = field(default_factory=lambda: Aging(HANDICAP_BYTES))
    _flights: deque[_Flight] = field(default_factory=deque)
    _bytes_in_flight: int = 0

    @property
    def waits_for_polling(self) -> bool:
        gated = any(item.gate is not None for item in self._queue)
        return self.link is not None and (gated or (bool(self._flights) and self.link.needs_polling))

    @property
    def busy(self) -> bool:
        return bool(self._flights)

    @property
    def _max_push_bytes(self) -> int:
        return self.link.max_push_bytes if self.link is not None and self.staging is None else MAX_PUSH_BYTES

    def add(self, item: Item) -> None:
        """Queues a push, in parts that a link takes. Within a transfer they keep their order: ranks only grow."""
        step = max(1, self._max_push_bytes // self.page_bytes)
        for start in range(0, len(item.src_pages), step):
            src, dst = item.src_pages[start : start + step], item.dst_pages[start : start + step]
            self._num_queued += 1
            rank = self._aging.rank(item.transfer.lane), self._num_queued
            part = Item(item.transfer, item.first_index + start, src, dst, item.gate, item.part, rank)
            bisect.insort(self._queue, part, key=lambda one: one.rank)
            item.transfer.num_unfinished += 1

    def post(self, now_s: float) -> bool:
        """Starts what may start; says whether there was anything. Raises TransferError when the link is dead."""
        if self.link is None:
            return False
        started = False
        self._drop_cut_short()
        while (item := self._next_ready()) is not None:
            pages = self._stage(item)
            if pages is None:
                break
            self._queue.remove(item)
            if not self._flights:
                self.last_progress_s = now_s
            arrival = Arrival(item.transfer.key, item.first_index, len(item.src_pages))
            try:
                push = self.link.push(arrival, pages, item.dst_pages, item.part)
            except TransferError as error:
                self._unstage(pages)
                item.transfer.num_unfinished -= 1
                item.transfer.error = item.transfer.error or error
                self.link.check()
                continue
            self._bytes_in_flight += len(pages) * self.page_bytes
            self._aging.advance(len(pages) * self.page_bytes)
            self._flights.append(_Flight(item.transfer, push, pages, item.part))
            started = True
        return started

    def _next_ready(self) -> Item | None:
        """The first one that there is room for and whose pages are complete."""
        scale = self._max_push_bytes // MAX_PUSH_BYTES
        if self._bytes_in_flight >= MAX_INFLIGHT_BYTES * scale:
            return None
        not_ready = self._num_queued + 1  # chunks complete in the order in which they were queued
        for item in self._queue:
            if item.transfer.lane is Lane.BULK and self._bytes_in_flight >= MAX_BULK_BYTES * scale:
                continue
            if item.gate is None or (item.rank[1] < not_ready and item.gate.query()):
                return item
            not_ready = min(not_ready, item.rank[1])
        return None

    def _stage(self, item: Item) -> Sequence[PageId] | None:
        """The pages to push; None where they must be staged and there is no room for them now."""
        if self.staging is None:
            return cast(Sequence[PageId], item.src_pages)
        num_held = self._bytes_in_flight // self.page_bytes
        return self.staging.stage(cast(Sequence[PageParts], item.src_pages), num_held)

    def _unstage(self, pages: Sequence[PageId]) -> None:
        if self.staging is not None:
            self.staging.release(pages)

    def reap(self, now_s: float) -> None:
        """Takes note of pushes that have ended. Raises TransferError when the link is dead."""
        still: deque[_Flight] = deque()
        for flight in self._flights:
            try:
                ended = flight.push.done()
                self.num_pages_sent += len(flight.pages) if ended and flight.part.is_last else 0
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
        self._flights = still
        if self.link is not None:
            self.link.check()

    def stalled(self, now_s: float, timeout_s: float) -> bool:
        return self.busy and now_s - self.last_progress_s > timeout_s

    def fail(self, error: TransferError) -> None:
        """The link is closed or never came to be: every transfer ends, with nothing under way."""
        for transfer in self.transfers.values():
            transfer.error = transfer.error or error
            transfer.num_unfinished = 0
        self._queue.clear()
        for flight in self._flights:
            self._unstage(flight.pages)
        self._flights.clear()
        self._bytes_in_flight = 0
        self.link = None

    def take_over(self) -> list[Outgoing]:
        """Transfers that are over, once each."""
        self._drop_cut_short()
        over = [transfer for transfer in self.transfers.values() if transfer.over]
        for transfer in over:
            del self.transfers[transfer.key]
        return over

    def _drop_cut_short(self) -> None:
        if not any(item.transfer.cut_short for item in self._queue):
            return
        kept: list[Item] = []
        for item in self._queue:
            if item.transfer.cut_short:
                item.transfer.num_unfinished -= 1
            else:
                kept.append(item)
        self._queue = kept
