"""The sender's link to a receiver's pool that it has in its own address space: pushes, copied in order and announced.

What a DirectSender (direct.py) gives to its caller, who owns it. Three threads meet here. The caller's pushes, and
makes a small push itself where none is before it; the copying thread makes all others; the watching one waits for the
receiver's end. `_writing` keeps the copies, and the unmapping of the pool, one after the other. Of the two counters
the caller's thread alone writes `_num_queued`, the copying one `_num_made`. An error ends the link once: the first one
stays, and whoever asks next raises it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.channel import Channel
from kv_transfer.pages import PageBuffer
from kv_transfer.transport import MAX_PUSH_BYTES, WHOLE, Arrival, Part, Push, notice
from penstock.errors import TransferError
from penstock.types import PageId

MAX_INLINE_BYTES = 4 << 20  # 0.25 ms of copying; waking the copying thread takes a fifth of that
MAX_CUDA_PUSH_BYTES = 256 << 20  # a launch costs what copying this much on one device does, or a tenth over PCIe
MAX_SHARED_NOTICE = 4  # pushes: a notice takes a tenth of the time that copying one of them does

log = logging.getLogger(__name__)


class MappedPool(Protocol):
    """A receiver's pool in this process. Its calls never overlap."""

    num_pages: int

    def write(
        self, source: PageBuffer, src_pages: Sequence[PageId], dst_pages: Sequence[PageId], part: Part = WHOLE
    ) -> None:
        """Copies source's src_pages[i], or that part of it, into dst_pages[i]. Blocks until whoever reads the pool next
        sees the bytes."""

    def close(self) -> None:
        """Unmaps the pool; nothing is written after it."""


@dataclass(slots=True, eq=False)
class _DirectPush:
    link: DirectLink
    arrival: Arrival
    src_pages: Sequence[PageId]
    dst_pages: Sequence[PageId]
    part: Part
    landed: bool = False

    def done(self) -> bool:
        if not self.landed:
            self.link.check()
        return self.landed


class DirectLink:
    """Writes into one receiver's pool: a thread that copies, and one that notices the receiver's end."""

    needs_polling = False
    takes_parts = True

    def __init__(
        self, name: str, pages: PageBuffer, target: MappedPool, channel: Channel, wake: Callable[[], None]
    ) -> None:
        self._name = name
        # A GPU computes on while pages move. A CPU moves a chunk's in half a percent of the time that it computes them.
        self.gains_from_parts = pages.is_cuda
        self.max_push_bytes = MAX_CUDA_PUSH_BYTES if pages.is_cuda else MAX_PUSH_BYTES
        self._pages = pages
        self._target: MappedPool | None = target
        self._num_target_pages = target.num_pages
        self._channel = channel
        self._wake = wake
        self._error: TransferError | None = None
        self._writing = threading.Lock()  # held while a push is copied: a few milliseconds at most
        self._num_queued = self._num_made = 0  # by the copying thread; each written by one thread alone
        self._max_inline_bytes = 0 if pages.is_cuda else MAX_INLINE_BYTES
        self._waiting: queue.SimpleQueue[_DirectPush | None] = queue.SimpleQueue()
        self.threads = [
            threading.Thread(target=self._copy_pushes, name="kv-copy", daemon=True),
            threading.Thread(target=self._watch, name="kv-watch", daemon=True),
        ]
        for thread in self.threads:
            thread.start()

    def push(
        self, arrival: Arrival, src_pages: Sequence[PageId], dst_pages: Sequence[PageId], part: Part = WHOLE
    ) -> Push:
        self.check()
        if max(dst_pages) >= self._num_target_pages:
            raise TransferError(f"destination page {max(dst_pages)}: the receiver has {self._num_target_pages}")
        started = _DirectPush(self, arrival, src_pages, dst_pages, part)
        if self._may_inline(len(src_pages)):
            _ = self._copy(started) and self._announce([started])
        else:
            self._num_queued += 1
            self._waiting.put(started)
        return started

    def _may_inline(self, num_pages: int) -> bool:
        """Only the caller's thread adds pushes, so a small one that finds none before it can be made here and now. Not
        so where the receiver has stopped reading: for that only the copying thread may wait."""
        small = num_pages * self._pages.page_bytes <= self._max_inline_bytes
        return small and self._num_queued == self._num_made and self._channel.has_room()

    def check(self) -> None:
        if self._error is not None:
            raise TransferError(self._error.message)

    def close(self) -> None:
        self._fail(TransferError("closed"))
        with self._writing:
            target, self._target = self._target, None
            if target is not None:
                target.close()

    def _fail(self, error: TransferError) -> None:
        if self._error is None:
            self._error = TransferError(f"{self._name} link: {error}")
        self._channel.close()
        self._waiting.put(None)
        self._wake()

    def _copy_pushes(self) -> None:
        push = self._waiting.get()
        while push is not None and self._error is None:
            made: list[_DirectPush] = []
            while push is not None and _is_next(push, made):
                if not self._copy(push):
                    return
                made.append(push)
                push = self._take_waiting()
            if not self._announce(made):
                return
            self._num_made += len(made)
            self._wake()
            if push is None and self._error is None:
                push = self._waiting.get()

    def _take_waiting(self) -> _DirectPush | None:
        try:
            return self._waiting.get_nowait()
        except queue.Empty:
            return None

    def _copy(self, push: _DirectPush) -> bool:
        try:
            with self._writing:
                if self._error is not None or self._target is None:
                    return False
                self._target.write(self._pages, push.src_pages, push.dst_pages, push.part)
        except Exception as error:  # else nobody would hear of it before the time-out
            log.exception("copying pages failed")
            self._fail(TransferError(f"copying pages: {error!r}"))
            return False
        return True

    def _announce(self, made: Sequence[_DirectPush]) -> bool:
        """One notice for all of them: the receiver's thread that it wakes may well run where this one did."""
        first = made[0].arrival
        try:
            if made[0].part.is_last:
                self._channel.send(notice(first._replace(num_pages=sum(one.arrival.num_pages for one in made))))
        except TransferError as error:
            self._fail(error)
            return False
        for one in made:
            one.landed = True
        return True

    def _watch(self) -> None:
        """The receiver says nothing after its greeting: whatever ends this wait ends the link."""
        try:
            frame = self._channel.receive()
            self._fail(TransferError(f"unexpected frame {str(frame)[:80]}"))
        except TransferError as error:
            self._fail(error)


def _is_next(push: _DirectPush, made: Sequence[_DirectPush]) -> bool:
    """Whether a push can share the notice of those before it: the next pages of one transfer, and not too many."""
    if not made:
        return True
    before, arrival = made[-1].arrival, push.arrival
    goes_on = arrival.key == before.key and arrival.first_index == before.first_index + before.num_pages
    return goes_on and push.part == made[-1].part == WHOLE and len(made) < MAX_SHARED_NOTICE
