"""Holds both ends of the transports in which the sender maps the receiver's pool and copies pages straight into it.

The transports between pools of one host (shared_memory.py, cuda_ipc.py) share it; they differ in how a pool is
exported, opened and written. They are one-sided, and the copy that moves a page is the only one (link.py). A `Channel`
does the rest: it authenticates the sender, gives it the location of the pool's memory, and announces what landed. The
sender reads the receiver's random mark through the mapping, which proves that both ends share memory; host names would
not.

A push is done when its bytes are in place and announced; a closed link has stopped writing. As on every one-sided
transport, a sender that freezes in the middle of a page writes the rest when it wakes, whatever the receiver has
decided in the meantime; the fence protects against that. A sender closes its channel after its last write, and the
kernel closes a dead process's channel after its last thread, so the end of the channel proves that its writes have
ended.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Callable
from pathlib import Path

from kv_transfer.layout.pages import PageBuffer
from kv_transfer.session.handshake import take
from kv_transfer.transports.channel import Channel, dial
from kv_transfer.transports.mapped.link import MappedLink, MappedPool
from kv_transfer.transports.peer_channels import LinkThreads, PeerChannels, WritesEnd
from kv_transfer.transports.transport import Details, Landing, Peer, TransportLink, parse_notice
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


# Opens the pool that a greeting locates: (greeting, number of pages) -> pool. Raises OSError or TransferError for
# anything that is not the receiver's pool.
OpenPool = Callable[[list[object], int], MappedPool]


class MappedReceiver:
    """Exports its pool to peers on this host and reports what they wrote: one thread for each connected peer."""

    is_one_sided = True

    def __init__(
        self,
        name: str,
        pages: PageBuffer,
        greeting: list[object],
        config: TransferConfig,
        landing: Landing,
        settle_s: float = 0.0,
    ) -> None:
        """`greeting` locates the pool for peers that have presented their token. A process's copies may go on for
        `settle_s` after its end.
        """
        self.name = name
        self._pages = pages
        self._greeting = greeting
        self._landing = landing
        self._channels = PeerChannels(name, config, landing, self._serve, WritesEnd.WITH_CHANNEL, settle_s)

    def offer(self, peer: Peer) -> Details:
        return {**self._channels.offer(peer), "boot_id": boot_id(), "num_pages": self._pages.num_pages}

    def forget(self, peer: Peer) -> None:
        self._channels.forget(peer)

    def cut_off(self, epoch: Epoch) -> bool:
        return self._channels.cut_off(epoch)

    def tear_down(self) -> None:
        """Does nothing: a peer of this host is gone once its channel has ended."""

    def close(self) -> None:
        self._channels.close()

    def _serve(self, peer: Peer, channel: Channel) -> None:
        channel.send(self._greeting)
        try:
            if channel.receive() != _OPENED:
                raise TransferError("the peer did not confirm that it has opened the pool")
        except TransferError as error:  # the peer is not lost: it tries another transport for the same transfers
            log.info("%s did not open this pool over %s: %s", peer.worker_id, self.name, error)
            return
        channel.set_timeout(None)
        while True:
            arrival = parse_notice(channel.receive())
            if arrival.key.sender_epoch != peer.epoch:
                raise TransferError(f"{arrival} from {peer}: another peer's transfer")
            self._landing.landed(arrival)


class MappedSender:
    """Opens receivers' pools. The caller owns the links; this class only keeps their threads, to wait for them."""

    def __init__(
        self, name: str, pages: PageBuffer, open_pool: OpenPool, config: TransferConfig, wake: Callable[[], None]
    ) -> None:
        self.name = name
        self._pages = pages
        self._open_pool = open_pool
        self._config = config
        self._wake = wake
        self._threads = LinkThreads()

    def suits(self, details: Details) -> bool:
        return details.get("boot_id") == boot_id()

    def connect(self, details: Details, receiver_epoch: Epoch, num_rows: int = 1) -> TransportLink:
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
        link = MappedLink(self.name, self._pages, target, channel, self._wake)
        self._threads.add(link.threads)
        return link

    def close(self) -> None:
        self._threads.join()
