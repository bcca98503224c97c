"""What a sender still owes one receiver incarnation: pushes in order, what is under way, and each transfer's fate.

The sender's thread alone uses it. It decides what may be posted, what is over and what is stuck; it owns no thread, no
lock and no clock. Invariant: a transfer is `over` exactly once, after its last push has ended one way or the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from kv_transfer.staging import PageParts, Staging
from kv_transfer.transport import MAX_PUSH_BYTES, Arrival, Link, Push
from penstock.errors import TransferError
from penstock.types import PageId, TransferKey

MAX_INFLIGHT_BYTES = 64 << 20  # under way on one link; the rest waits here, as page numbers only


class Gate(Protocol):
    """A torch.cuda.Event, or anything that says when the pages of a push are complete in memory."""

    def query(self) -> bool: ...


@dataclass(slots=True, eq=False)
class Outgoing:
    """One transfer at the sender."""

    key: TransferKey
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


@dataclass(slots=True)
class Item:
    """A push that waits for its turn."""

    transfer: Outgoing
    first_index: int
    src_pages: Sequence[PageId] | Sequence[PageParts]  # what each page is made of, where it must be staged
    dst_pages: Sequence[PageId]
    gate: Gate | None


@dataclass(slots=True)
class _Flight:
    transfer: Outgoing
    push: Push
    pages: Sequence[PageId]  # of the pool, or staged


@dataclass(slots=True)
class Outbox:
    page_bytes: int  # of the receiver's pages
    link: Link | None = None
    staging: Staging | None = None  # where its layout is not ours
    transfers: dict[TransferKey, Outgoing] = field(default_factory=dict)
    last_progress_s: float = 0.0
    num_pages_sent: int = 0
    _queue: deque[Item] = field(default_factory=deque)
    _flights: deque[_Flight] = field(default_factory=deque)
    _bytes_in_flight: int = 0

    @property
    def waits_for_polling(self) -> bool:
        gated = bool(self._queue) and self._queue[0].gate is not None
        return self.link is not None and (gated or (bool(self._flights) and self.link.needs_polling))

    @property
    def busy(self) -> bool:
        return bool(self._flights)

    def add(self, item: Item) -> None:
        """Queues a push, in parts that a link takes."""
        step = max(1, MAX_PUSH_BYTES // self.page_bytes)
        for start in range(0, len(item.src_pages), step):
            src, dst = item.src_pages[start : start + step], item.dst_pages[start : start + step]
            self._queue.append(Item(item.transfer, item.first_index + start, src, dst, item.gate))
            item.transfer.num_unfinished += 1

    def post(self, now_s: float) -> bool:
        """Starts what may start; says whether there was anything. Raises TransferError when the link is dead."""
        if self.link is None:
            return False
        started = False
        self._drop_cut_short()
        while self._queue and self._bytes_in_flight < MAX_INFLIGHT_BYTES:
            item = self._queue[0]
            if item.gate is not None and not item.gate.query():
                break  # pages of one chunk are complete in order, so what follows is not ready either
            pages = self._stage(item)
            if pages is None:
                break
            self._queue.popleft()
            if not self._flights:
                self.last_progress_s = now_s
            arrival = Arrival(item.transfer.key, item.first_index, len(item.src_pages))
            try:
                push = self.link.push(arrival, pages, item.dst_pages)
            except TransferError as error:
                self._unstage(pages)
                item.transfer.num_unfinished -= 1
                item.transfer.error = item.transfer.error or error
                self.link.check()
                continue
            self._bytes_in_flight += len(pages) * self.page_bytes
            self._flights.append(_Flight(item.transfer, push, pages))
            started = True
        return started

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
                self.num_pages_sent += len(flight.pages) if ended else 0
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
        kept: deque[Item] = deque()
        for item in self._queue:
            if item.transfer.cut_short:
                item.transfer.num_unfinished -= 1
            else:
                kept.append(item)
        self._queue = kept
