"""Wires on which the sender has the receiver's pool in its own address space and copies pages straight into it.

What the wires between pools of one host have in common (shared_memory.py, cuda_ipc.py; they differ in how a pool is
shown, opened and written). One-sided, with no copy but the one that moves the page. A `Channel` carries the rest: it
authenticates the sender, tells it where the pool's memory is, and announces what landed. That both ends really share
memory is proven, not guessed from host names: the sender reads the receiver's random mark through the mapping.

A push is done when its bytes are in place and announced; a link that is closed has stopped writing. As on every
one-sided wire, a sender that was frozen in the middle of a page writes the rest when it wakes, whatever the receiver
has decided since: that is what the fence is for.
"""

from __future__ import annotations

import hmac
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kv_transfer.channel import Channel, dial
from kv_transfer.handshake import take
from kv_transfer.pages import PageBuffer
from kv_transfer.pairing import JOIN_TIMEOUT_S, Pairing
from kv_transfer.transport import (
    MAX_PUSH_BYTES,
    WHOLE,
    Arrival,
    Details,
    Landing,
    Link,
    Part,
    Peer,
    Push,
    notice,
    parse_notice,
)
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import Epoch, PageId

MARK_BYTES = 32
MAX_INLINE_BYTES = 4 << 20  # 0.25 ms of copying; waking the copying thread takes a fifth of that
MAX_CUDA_PUSH_BYTES = 256 << 20  # a launch costs what copying this much on one device does, or a tenth over PCIe
MAX_SHARED_NOTICE = 4  # pushes: a notice takes a tenth of the time that copying one of them does
_OPENED: list[object] = ["open"]
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

log = logging.getLogger(__name__)


def has_boot_id() -> bool:
    return _BOOT_ID.exists()


def boot_id() -> str:
    return _BOOT_ID.read_text(encoding="ascii").strip()


def new_mark() -> bytes:
    return secrets.token_bytes(MARK_BYTES)


def is_mark(found: bytes, mark: bytes) -> bool:
    return len(mark) == MARK_BYTES and hmac.compare_digest(found, mark)


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


# Opens what a greeting names: (greeting, number of pages) -> pool. Raises OSError or TransferError for anything that
# is not the receiver's pool.
OpenPool = Callable[[list[object], int], MappedPool]


class DirectReceiver:
    """Shows its pool to peers on this host, and hears what they wrote: one thread a connected peer."""

    needs_polling = False

    def __init__(
        self, name: str, pages: PageBuffer, greeting: list[object], config: TransferConfig, landing: Landing
    ) -> None:
        """`greeting` tells a peer that has named its token where the pool is."""
        self.name = name
        self._pages = pages
        self._greeting = greeting
        self._landing = landing
        self._pairing = Pairing(name, config, landing, self._hear)

    def offer(self, peer: Peer) -> Details:
        return {**self._pairing.offer(peer), "boot_id": boot_id(), "num_pages": self._pages.num_pages}

    def poll(self) -> list[Arrival]:
        return []

    def heard_from(self) -> frozenset[Epoch]:
        return frozenset()

    def forget(self, peer: Peer) -> None:
        self._pairing.forget(peer)

    def close(self) -> None:
        self._pairing.close()

    def _hear(self, peer: Peer, channel: Channel) -> None:
        channel.send(self._greeting)
        try:
            if channel.receive() != _OPENED:
                raise TransferError("want word that the pool is open")
        except TransferError as error:  # not a lost peer: it takes another wire, for the same transfers
            log.info("%s did not open this pool over %s: %s", peer.worker_id, self.name, error)
            return
        channel.set_timeout(None)
        while True:
            arrival = parse_notice(channel.receive())
            if arrival.key.sender_epoch != peer.epoch:
                raise TransferError(f"{arrival} from {peer}: not its own transfer")
            self._landing.landed(arrival)


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


class DirectSender:
    """Opens receivers' pools. Links belong to their caller; only their threads are known here, to be waited for."""

    def __init__(
        self, name: str, pages: PageBuffer, open_pool: OpenPool, config: TransferConfig, wake: Callable[[], None]
    ) -> None:
        self.name = name
        self._pages = pages
        self._open_pool = open_pool
        self._config = config
        self._wake = wake
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def suits(self, details: Details) -> bool:
        return details.get("boot_id") == boot_id()

    def connect(self, details: Details, receiver_epoch: Epoch, num_rows: int = 1) -> Link:
        host, port, token = take(details, "host", str), take(details, "port", int), take(details, "token", bytes)
        num_pages = take(details, "num_pages", int) * num_rows
        if not self.suits(details):
            raise TransferError("the receiver is on another host")
        channel = dial(host, port, token, self._config.connect_timeout_s)
        try:
            target = self._open_pool(channel.receive(), num_pages)
        except (OSError, TransferError) as error:
            channel.close()
            raise TransferError(f"{self.name} pool of epoch {receiver_epoch}: {error}") from error
        try:
            channel.send(_OPENED)
        except TransferError as error:
            target.close()
            raise TransferError(f"{self.name} pool of epoch {receiver_epoch}: {error}") from error
        channel.set_timeout(None)
        link = DirectLink(self.name, self._pages, target, channel, self._wake)
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()] + link.threads
        return link

    def close(self) -> None:
        """Links are closed already, by their owner."""
        deadline_s = time.monotonic() + JOIN_TIMEOUT_S
        with self._lock:
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
