"""Keeps the channels between a receiver and its peers: admits peers and runs a thread for each connected one.

Every transport uses it. It mints the token in an incarnation's offer, matches connections to tokens, keeps one
connection per peer, and reports lost peers to the receiver. The transport defines the frames.

A peer can write into the pool only after it has presented its token. So this module also knows which incarnations can
write on their own, and what proves that one no longer can (`WritesEnd`).
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from enum import StrEnum

from kv_transfer.transports.channel import Channel
from kv_transfer.transports.transport import Landing, Peer
from penstock.config import TransferConfig
from penstock.errors import TransferError
from penstock.types import Epoch

TOKEN_BYTES = 32
MAX_UNKNOWN = 64  # most connections that have not presented a token yet
JOIN_TIMEOUT_S = 2.0  # for threads at shutdown, as one that outlives the interpreter crashes the process

log = logging.getLogger(__name__)


class WritesEnd(StrEnum):
    """Names the event that ends the writes of a peer that has presented its token."""

    HERE = "here"  # this end copies the pages, so it decides when writes end
    WITH_CHANNEL = "with channel"  # on one host: the sender, or its kernel, closes the channel after the last write
    WITH_MEMORY = "with memory"  # between hosts: the peer may go on writing after its channel breaks


def listen(host: str) -> socket.socket:
    """Returns a socket that listens on a free port of only that interface."""
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


class PeerChannels:
    """Runs `serve(peer, channel)` in a separate thread for each connected peer. If it raises TransferError or
    RuntimeError, the peer is lost; if it returns, the peer has chosen another transport.
    """

    def __init__(
        self,
        transport: str,
        config: TransferConfig,
        landing: Landing,
        serve: Callable[[Peer, Channel], None],
        writes_end: WritesEnd,
        settle_s: float = 0.0,
    ) -> None:
        """A peer's writes may go on for `settle_s` after the end of its channel."""
        self._transport = transport
        self._landing = landing
        self._serve = serve
        self._timeout_s = config.connect_timeout_s
        self._lock = threading.Lock()
        self._tokens: dict[Peer, bytes] = {}
        self._channels: dict[Peer, Channel] = {}
        self._writes_end = writes_end
        self._settle_s = settle_s
        self._num_ways: Counter[Epoch] = Counter()  # connections over which a peer may still write on its own
        self._closing = threading.Event()
        self._held: set[Channel] = set()  # channels with a running thread, including replaced and forgotten ones
        self._threads: list[threading.Thread] = []
        self._unknown = threading.BoundedSemaphore(MAX_UNKNOWN)
        self.host = config.host
        self._socket = listen(config.host)
        self._port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="kv-listener", daemon=True).start()

    def offer(self, peer: Peer) -> dict[str, object]:
        """Returns the address to which that incarnation connects, and the token that it must present."""
        with self._lock:
            token = self._tokens.setdefault(peer, secrets.token_bytes(TOKEN_BYTES))
        return {"host": self.host, "port": self._port, "token": token}

    def forget(self, peer: Peer) -> None:
        """Ends the peer's connection and stops admitting the peer."""
        with self._lock:
            self._tokens.pop(peer, None)
            channel = self._channels.pop(peer, None)
        if channel is not None:
            self._hang_up(channel)

    def cut_off(self, epoch: Epoch) -> bool:
        """Stops admitting the incarnation, unless it gets another offer. Returns whether it cannot write into the pool
        on its own.
        """
        with self._lock:
            if self._writes_end is WritesEnd.HERE:
                return True
            for peer in [peer for peer in self._tokens if peer.epoch == epoch]:
                del self._tokens[peer]
            return not self._num_ways[epoch]

    def on_memory_withdrawn(self) -> None:
        """Records that no peer can write on its own any longer, and ends all connections."""
        with self._lock:
            channels, self._channels = list(self._channels.values()), {}
            self._num_ways.clear()
        for channel in channels:
            self._hang_up(channel)

    def _hang_up(self, channel: Channel) -> None:
        """Ends a connection. If its end must prove that the peer has stopped writing, leaves it to the peer to close
        it.
        """
        if self._writes_end is WritesEnd.WITH_CHANNEL:
            channel.end_sending()
        else:
            channel.close()

    def close(self) -> None:
        """Closes every connection. Blocks until the peers' threads have ended, for at most JOIN_TIMEOUT_S."""
        deadline_s = time.monotonic() + JOIN_TIMEOUT_S
        self._closing.set()
        with contextlib.suppress(OSError):  # a second close
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            channels, self._held = list(self._held), set()
            self._channels.clear()
            threads, self._threads = self._threads, []
            self._tokens.clear()
        for channel in channels:
            channel.close()
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            if not self._unknown.acquire(blocking=False):
                connection.close()
                continue
            thread = threading.Thread(target=self._run, args=(Channel(connection),), name="kv-pair", daemon=True)
            with self._lock:
                self._threads = [other for other in self._threads if other.is_alive()] + [thread]
                thread.start()

    def _run(self, channel: Channel) -> None:
        """Serves one connection, in its own thread."""
        try:
            peer = self._authenticate(channel)
        finally:
            self._unknown.release()
        try:
            if peer is not None:
                self._serve_peer(peer, channel)
        except Exception:
            log.exception("serving a peer failed")
        finally:
            channel.close()

    def _authenticate(self, channel: Channel) -> Peer | None:
        channel.set_timeout(self._timeout_s)
        try:
            frame = channel.receive()
        except TransferError as error:
            log.warning("dropped a connection that presented no token: %s", error)
            return None
        presented = frame[0] if len(frame) == 1 else None
        with self._lock:
            tokens = list(self._tokens.items())
        for peer, token in tokens:
            if isinstance(presented, bytes) and hmac.compare_digest(token, presented):
                return peer
        log.warning("dropped a connection that presented an unknown token")
        return None

    def _serve_peer(self, peer: Peer, channel: Channel) -> None:
        with self._lock:
            if peer not in self._tokens:
                return  # it was forgotten in the meantime
            earlier = self._channels.get(peer)
            self._channels[peer] = channel
            self._held.add(channel)
            if self._writes_end is not WritesEnd.HERE:
                self._num_ways[peer.epoch] += 1
        if earlier is not None:
            self._hang_up(earlier)
        try:
            self._serve(peer, channel)
            self._drop(peer, channel)
        except (RuntimeError, TransferError) as error:  # RuntimeError: a process group's
            if self._drop(peer, channel):
                problem = f"{self._transport} connection to {peer.worker_id} (epoch {peer.epoch}): {error}"
                self._landing.lost(peer, TransferError(problem))
        finally:
            self._drop(peer, channel)
            self._see_off(peer, channel)

    def _see_off(self, peer: Peer, channel: Channel) -> None:
        """Waits until the peer closes a connection that lets it write, and then records that it can no longer write
        over it.
        """
        if self._writes_end is WritesEnd.WITH_CHANNEL:
            channel.end_sending()
            ended = channel.wait_for_end() and not self._closing.wait(self._settle_s)
        else:
            ended = False
        with self._lock:
            self._held.discard(channel)
            if ended and self._num_ways[peer.epoch]:
                self._num_ways[peer.epoch] -= 1
            self._num_ways += Counter()  # drops those at zero

    def _drop(self, peer: Peer, channel: Channel) -> bool:
        """Returns whether this was still the peer's channel: neither forgotten nor replaced nor shut down."""
        with self._lock:
            current = self._channels.get(peer) is channel
            if current:
                del self._channels[peer]
        return current


class LinkThreads:
    """Keeps the threads of a sender's links. Each link's owner closes it; the sender waits for the threads when it
    shuts down.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def add(self, threads: Sequence[threading.Thread]) -> None:
        with self._lock:
            self._threads = [thread for thread in self._threads if thread.is_alive()] + [*threads]

    def join(self) -> None:
        """Waits for the threads, which end once their links are closed, for at most `JOIN_TIMEOUT_S`."""
        deadline_s = time.monotonic() + JOIN_TIMEOUT_S
        with self._lock:
            threads, self._threads = self._threads, []
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
