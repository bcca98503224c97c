"""Links a sender to a receiver's pool that is mapped into its own address space: copies pushes in order and announces
them.

`MappedSender` (ends.py) makes it; its caller owns it. Three threads meet here. The caller's thread pushes, and copies
a small push itself if no other waits. The copying thread makes all other copies. The watching thread waits for the end
of the receiver. `_writing` serializes the copies and the unmapping of the pool. Of the two counters, only the caller's
thread writes `_num_queued` and only the copying thread `_num_made`. The first error ends the link and stays: every
later call raises it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.layout.pages import PageBuffer
from kv_transfer.transports.channel import Channel
from kv_transfer.transports.transport import ALL_LAYERS, MAX_PUSH_BYTES, Arrival, LayerGroup, PushHandle, notice
from penstock.errors import TransferError
from penstock.types import PageId

MAX_INLINE_BYTES = 4 << 20  # 0.25 ms of copying; waking the copying thread takes a fifth of that
MAX_CUDA_PUSH_BYTES = 256 << 20  # a launch takes as long as copying this much on one device, or a tenth of it over PCIe
MAX_SHARED_NOTICE = 4  # pushes per notice, which takes a tenth of the time of copying one push

log = logging.getLogger(__name__)


class MappedPool(Protocol):
    """A receiver's pool, mapped into this process. Calls never overlap."""

    num_pages: int

    def write(
        self,
        source: PageBuffer,
        src_pages: Sequence[PageId],
        dst_pages: Sequence[PageId],
        layer_group: LayerGroup = ALL_LAYERS,
    ) -> None:
        """Copies source's src_pages[i], or a group of its layers, into dst_pages[i]. Blocks until later readers of the
        pool see the bytes."""

    def close(self) -> None:
        """Unmaps the pool. Nothing may be written afterwards."""


@dataclass(slots=True, eq=False)
class _MappedPush:
    link: MappedLink
    arrival: Arrival
    src_pages: Sequence[PageId]
    dst_pages: Sequence[PageId]
    layer_group: LayerGroup
    landed: bool = False

    def done(self) -> bool:
        if not self.landed:
            self.link.check()
        return self.landed


class MappedLink:
    """Writes into one receiver's pool. Implements `transport.TransportLink`."""

    needs_polling = False
    takes_layer_groups = True

    def __init__(
        self, name: str, pages: PageBuffer, target: MappedPool, channel: Channel, wake: Callable[[], None]
    ) -> None:
        self._name = name
        # A GPU continues computing while pages move. A CPU moves a chunk in half a percent of the time of computing it.
        self.gains_from_layer_groups = pages.is_cuda
        self.max_push_bytes = MAX_CUDA_PUSH_BYTES if pages.is_cuda else MAX_PUSH_BYTES
        self._pages = pages
        self._target: MappedPool | None = target
        self._num_target_pages = target.num_pages
        self._channel = channel
        self._wake = wake
        self._error: TransferError | None = None
        self._writing = threading.Lock()  # held while a push is copied, for a few milliseconds at most
        self._num_queued = self._num_made = 0  # pushes for the copying thread; one writer each
        self._max_inline_bytes = 0 if pages.is_cuda else MAX_INLINE_BYTES
        self._waiting: queue.SimpleQueue[_MappedPush | None] = queue.SimpleQueue()
        self.threads = [
            threading.Thread(target=self._copy_pushes, name="kv-copy", daemon=True),
            threading.Thread(target=self._watch, name="kv-watch", daemon=True),
        ]
        for thread in self.threads:
            thread.start()

    def push(
        self,
        arrival: Arrival,
        src_pages: Sequence[PageId],
        dst_pages: Sequence[PageId],
        layer_group: LayerGroup = ALL_LAYERS,
    ) -> PushHandle:
        self.check()
        if max(dst_pages) >= self._num_target_pages:
            raise TransferError(f"destination page {max(dst_pages)}: the receiver has {self._num_target_pages}")
        started = _MappedPush(self, arrival, src_pages, dst_pages, layer_group)
        if self._may_inline(len(src_pages)):
            _ = self._copy(started) and self._announce([started])
        else:
            self._num_queued += 1
            self._waiting.put(started)
        return started

    def _may_inline(self, num_pages: int) -> bool:
        """Returns whether the caller may copy a push itself: the push is small, none waits before it, and the receiver
        reads its channel. Only the copying thread may wait for a receiver that has stopped reading.
        """
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
        """Ends the link. Blocks while a copy runs, because the receiver takes the end of the channel as proof that all
        writes have ended.
        """
        if self._error is None:
            self._error = TransferError(f"{self._name} link: {error}")
        self._waiting.put(None)
        self._wake()
        with self._writing:
            self._channel.close()

    def _copy_pushes(self) -> None:
        push = self._waiting.get()
        while push is not None and self._error is None:
            made: list[_MappedPush] = []
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

    def _take_waiting(self) -> _MappedPush | None:
        try:
            return self._waiting.get_nowait()
        except queue.Empty:
            return None

    def _copy(self, push: _MappedPush) -> bool:
        try:
            with self._writing:
                if self._error is not None or self._target is None:
                    return False
                self._target.write(self._pages, push.src_pages, push.dst_pages, push.layer_group)
        except Exception as error:  # otherwise it would show only as a time-out
            log.exception("copying pages failed")
            self._fail(TransferError(f"copying pages: {error!r}"))
            return False
        return True

    def _announce(self, made: Sequence[_MappedPush]) -> bool:
        """Sends one notice for all of them, because waking the receiver's thread for each could cost this thread its
        core.
        """
        first = made[0].arrival
        try:
            if made[0].layer_group.is_last:
                self._channel.send(notice(first._replace(num_pages=sum(push.arrival.num_pages for push in made))))
        except TransferError as error:
            self._fail(error)
            return False
        for push in made:
            push.landed = True
        return True

    def _watch(self) -> None:
        """Fails the link when it reads anything, since a receiver sends nothing after its greeting."""
        try:
            frame = self._channel.receive()
            self._fail(TransferError(f"unexpected frame {str(frame)[:80]}"))
        except TransferError as error:
            self._fail(error)


def _is_next(push: _MappedPush, made: Sequence[_MappedPush]) -> bool:
    """Returns whether a push can share the notice of those before it: the next pages of one transfer, up to a bound."""
    if not made:
        return True
    before, arrival = made[-1].arrival, push.arrival
    goes_on = arrival.key == before.key and arrival.first_index == before.first_index + before.num_pages
    return goes_on and push.layer_group == made[-1].layer_group == ALL_LAYERS and len(made) < MAX_SHARED_NOTICE
