"""Wires on which the sender has the receiver's pool in its own address space and copies pages straight into it.

What the wires between pools of one host have in common (shared_memory.py, cuda_ipc.py; they differ in how a pool is
shown, opened and written). One-sided, with no copy but the one that moves the page: direct_link.py makes it. A
`Channel` carries the rest: it authenticates the sender, tells it where the pool's memory is, and announces what landed.
That both ends really share memory is proven, not guessed from host names: the sender reads the receiver's random mark
through the mapping.

A push is done when its bytes are in place and announced; a link that is closed has stopped writing. As on every
one-sided wire, a sender that was frozen in the middle of a page writes the rest when it wakes, whatever the receiver
has decided since: that is what the fence is for.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kv_transfer.channel import Channel, dial
from kv_transfer.direct_link import DirectLink, MappedPool
from kv_transfer.handshake import take
from kv_transfer.pages import PageBuffer
from kv_transfer.pairing import JOIN_TIMEOUT_S, Pairing
from kv_transfer.transport import Arrival, Details, Landing, Link, Peer, parse_notice
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import Epoch

MARK_BYTES = 32
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
