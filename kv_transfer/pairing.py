"""Which peers may connect to this receiver over a channel, and each one's thread once it has.

Beneath the wires that keep a `Channel` to every sender: it mints the token that an incarnation's offer carries,
matches connections to it, keeps one connection a peer, and tells the receiver when one is lost. What is said over the
channel is the wire's own business.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from kv_transfer.channel import Channel, Listener
from kv_transfer.transport import Landing, Peer
from penstock.config import TransferConfig
from penstock.errors import TransferError

TOKEN_BYTES = 32
JOIN_TIMEOUT_S = 2.0  # for threads at shutdown: one that ends with the interpreter takes the process down with it


class Pairing:
    """`serve(peer, channel)` runs in the pair's own thread until it raises TransferError or RuntimeError: the peer
    is lost; or until it returns: the peer never came to use this wire."""

    def __init__(
        self, wire: str, config: TransferConfig, landing: Landing, serve: Callable[[Peer, Channel], None]
    ) -> None:
        self._wire = wire
        self._landing = landing
        self._serve_peer = serve
        self._lock = threading.Lock()
        self._tokens: dict[Peer, bytes] = {}
        self._channels: dict[Peer, Channel] = {}
        self._listener = Listener(config.host, config.connect_timeout_s, self._serve)

    @property
    def host(self) -> str:
        return self._listener.host

    def offer(self, peer: Peer) -> dict[str, object]:
        """Where that incarnation connects, and what it must say."""
        with self._lock:
            token = self._tokens.get(peer)
            if token is None:
                token = self._tokens[peer] = secrets.token_bytes(TOKEN_BYTES)
                self._listener.admit(token)
        return {"host": self._listener.host, "port": self._listener.port, "token": token}

    def forget(self, peer: Peer) -> None:
        with self._lock:
            token = self._tokens.pop(peer, None)
            channel = self._channels.pop(peer, None)
        if token is not None:
            self._listener.refuse(token)
        if channel is not None:
            channel.close()

    def close(self) -> None:
        self._listener.close()
        with self._lock:
            channels = list(self._channels.values())
            self._channels.clear()
            self._tokens.clear()
        for channel in channels:
            channel.close()
        self._listener.join(JOIN_TIMEOUT_S)

    def _serve(self, token: bytes, channel: Channel) -> None:
        """One pair's life, in its own thread."""
        with self._lock:
            peer = next((peer for peer, offered in self._tokens.items() if offered == token), None)
            if peer is None:
                return  # forgotten since
            earlier = self._channels.get(peer)
            self._channels[peer] = channel
        if earlier is not None:
            earlier.close()
        try:
            self._serve_peer(peer, channel)
            self._drop(peer, channel)
        except (RuntimeError, TransferError) as error:  # RuntimeError: a process group's
            self._lost(peer, channel, error)

    def _drop(self, peer: Peer, channel: Channel) -> bool:
        """Whether this was still the peer's channel: neither forgotten nor replaced nor shut down."""
        with self._lock:
            current = self._channels.get(peer) is channel
            if current:
                del self._channels[peer]
        return current

    def _lost(self, peer: Peer, channel: Channel, error: Exception) -> None:
        if self._drop(peer, channel):
            self._landing.lost(
                peer, TransferError(f"{self._wire} wire to {peer.worker_id} (epoch {peer.epoch}): {error}")
            )
