"""The wire between CPU pools of one host: the sender maps the receiver's pool and copies pages straight into it.

One-sided, with no copy but the one that moves the page. A `Channel` carries the rest: it authenticates the sender,
tells it where the pool's memory is, and announces what landed. That both ends really share memory is proven, not
guessed from host names: the sender reads the receiver's random mark through the mapping.

A push is done when its bytes are in place and announced; a link that is closed has stopped writing. As on every
one-sided wire, a sender that was frozen in the middle of a page writes the rest when it wakes, whatever the receiver
has decided since: that is what the fence is for.
"""

from __future__ import annotations

import fcntl
import hmac
import logging
import mmap
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.shared_pool import FILE_NAME, SEALS, TRAILER_BYTES, shared_file
from kv_transfer.channel import Channel, dial
from kv_transfer.handshake import take
from kv_transfer.pages import PageBuffer
from kv_transfer.pairing import JOIN_TIMEOUT_S, Pairing
from kv_transfer.transport import Arrival, Details, Landing, Link, Peer, Push, notice, parse_notice
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import Epoch, PageId

NAME = "shm"
MARK_BYTES = 32
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

log = logging.getLogger(__name__)


def can_send(pages: PageBuffer) -> bool:
    return not pages.is_cuda and _BOOT_ID.exists()


def can_receive(pages: PageBuffer) -> bool:
    return can_send(pages) and shared_file(pages.tensor) is not None


def _boot_id() -> str:
    return _BOOT_ID.read_text(encoding="ascii").strip()


class SharedReceiver:
    """Shows its pool to peers on this host, and hears what they wrote: one thread a connected peer."""

    name = NAME
    needs_polling = False

    def __init__(self, pages: PageBuffer, config: TransferConfig, landing: Landing) -> None:
        fd = shared_file(pages.tensor)
        if fd is None or pages.tensor.storage_offset():
            raise TransferError("the pool is not in memory that can be shared")
        self._pages = pages
        self._fd = fd
        self._landing = landing
        self._mark = secrets.token_bytes(MARK_BYTES)
        os.pwrite(fd, self._mark, os.fstat(fd).st_size - TRAILER_BYTES)
        self._pairing = Pairing(NAME, config, landing, self._hear)

    def offer(self, peer: Peer) -> Details:
        return {**self._pairing.offer(peer), "boot_id": _boot_id(), "num_pages": self._pages.num_pages}

    def poll(self) -> list[Arrival]:
        return []

    def heard_from(self) -> frozenset[Epoch]:
        return frozenset()

    def forget(self, peer: Peer) -> None:
        self._pairing.forget(peer)

    def close(self) -> None:
        self._pairing.close()

    def _hear(self, peer: Peer, channel: Channel) -> None:
        channel.send([os.getpid(), self._fd, self._mark])
        channel.set_timeout(None)
        while True:
            arrival = parse_notice(channel.receive())
            if arrival.key.sender_epoch != peer.epoch:
                raise TransferError(f"{arrival} from {peer}: not its own transfer")
            self._landing.landed(arrival)


@dataclass(slots=True, eq=False)
class _SharedPush:
    link: SharedLink
    arrival: Arrival
    src_pages: Sequence[PageId]
    dst_pages: Sequence[PageId]
    landed: bool = False

    def done(self) -> bool:
        if not self.landed:
            self.link.check()
        return self.landed


class SharedLink:
    """Writes into one receiver's pool: a thread that copies, and one that notices the receiver's end."""

    needs_polling = False

    def __init__(self, pages: PageBuffer, target: PageBuffer, channel: Channel, wake: Callable[[], None]) -> None:
        self._pages = pages
        self._target: PageBuffer | None = target
        self._num_target_pages = target.num_pages
        self._channel = channel
        self._wake = wake
        self._error: TransferError | None = None
        self._writing = threading.Lock()  # held while a push is copied: a few milliseconds at most
        self._waiting: queue.SimpleQueue[_SharedPush | None] = queue.SimpleQueue()
        self.threads = [
            threading.Thread(target=self._copy_pushes, name="kv-copy", daemon=True),
            threading.Thread(target=self._watch, name="kv-watch", daemon=True),
        ]
        for thread in self.threads:
            thread.start()

    def push(self, arrival: Arrival, src_pages: Sequence[PageId], dst_pages: Sequence[PageId]) -> Push:
        self.check()
        if max(dst_pages) >= self._num_target_pages:
            raise TransferError(f"destination page {max(dst_pages)}: the receiver has {self._num_target_pages}")
        started = _SharedPush(self, arrival, src_pages, dst_pages)
        self._waiting.put(started)
        return started

    def check(self) -> None:
        if self._error is not None:
            raise TransferError(self._error.message)

    def close(self) -> None:
        self._fail(TransferError("closed"))
        with self._writing:
            self._target = None  # unmaps the pool

    def _fail(self, error: TransferError) -> None:
        if self._error is None:
            self._error = TransferError(f"{NAME} link: {error}")
        self._channel.close()
        self._waiting.put(None)
        self._wake()

    def _copy_pushes(self) -> None:
        while (push := self._waiting.get()) is not None:
            try:
                with self._writing:
                    if self._error is not None or self._target is None:
                        return
                    self._target.copy_from(self._pages, push.src_pages, push.dst_pages)
                self._channel.send(notice(push.arrival))
            except TransferError as error:
                self._fail(error)
                return
            except Exception as error:  # else nobody would hear of it before the time-out
                log.exception("copying pages failed")
                self._fail(TransferError(f"copying pages: {error!r}"))
                return
            push.landed = True
            self._wake()

    def _watch(self) -> None:
        """The receiver says nothing after its greeting: whatever ends this wait ends the link."""
        try:
            frame = self._channel.receive()
            self._fail(TransferError(f"unexpected frame {str(frame)[:80]}"))
        except TransferError as error:
            self._fail(error)


class SharedSender:
    """Maps receivers' pools. Links belong to their caller; only their threads are known here, to be waited for."""

    name = NAME

    def __init__(self, pages: PageBuffer, config: TransferConfig, wake: Callable[[], None]) -> None:
        if not can_send(pages):
            raise TransferError("pools in memory that processes share need Linux and a CPU pool")
        self._pages = pages
        self._config = config
        self._wake = wake
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def suits(self, details: Details) -> bool:
        return details.get("boot_id") == _boot_id()

    def connect(self, details: Details, receiver_epoch: Epoch) -> Link:
        host, port, token = take(details, "host", str), take(details, "port", int), take(details, "token", bytes)
        num_pages = take(details, "num_pages", int)
        if not self.suits(details):
            raise TransferError("the receiver is on another host")
        channel = dial(host, port, token, self._config.connect_timeout_s)
        try:
            match channel.receive():
                case [int(pid), int(fd), bytes(mark)] if len(mark) == MARK_BYTES:
                    target = _map_pool(pid, fd, mark, num_pages, self._pages.page_bytes)
                case other:
                    raise TransferError(f"greeting {str(other)[:80]}: want [pid, fd, mark]")
            channel.set_timeout(None)
        except (OSError, TransferError) as error:
            channel.close()
            raise TransferError(f"{NAME} pool of epoch {receiver_epoch}: {error}") from error
        link = SharedLink(self._pages, target, channel, self._wake)
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


def _map_pool(pid: int, fd: int, mark: bytes, num_pages: int, page_bytes: int) -> PageBuffer:
    """The receiver's pool in this process's memory. Raises OSError or TransferError for anything that is not it."""
    path = f"/proc/{pid}/fd/{fd}"
    kind = os.readlink(path)
    if not kind.startswith(f"/memfd:{FILE_NAME} "):  # before it is opened: another kind of file might block or act
        raise TransferError(f"{path} is {kind!r}, no pool")
    own_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        size = os.fstat(own_fd).st_size
        if fcntl.fcntl(own_fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise TransferError(f"{path} could shrink while it is mapped")
        if not 0 < num_pages * page_bytes <= size - TRAILER_BYTES:
            raise TransferError(f"offer.num_pages: {num_pages} of {page_bytes} bytes, the pool's file has {size}")
        mapped = mmap.mmap(own_fd, size)
    finally:
        os.close(own_fd)
    if not hmac.compare_digest(mapped[-TRAILER_BYTES:][: len(mark)], mark):
        raise TransferError(f"{path} is another process's pool: the ends do not see the same processes")
    bytes_P = torch.frombuffer(mapped, dtype=torch.uint8, count=num_pages * page_bytes)
    return PageBuffer(bytes_P.view(num_pages, page_bytes))
