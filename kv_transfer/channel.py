"""A small framed TCP channel: how emulated wires shake hands, announce pages and acknowledge them.

Each frame is a length and a msgpack array. A reader blocks in its own thread and is woken by `close` or by the death
of the peer's process, at once; a frozen peer shows by silence only, which the callers' own deadlines cover. No page
goes over it.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

import msgpack

from penstock.errors import TransferError

MAX_FRAME_BYTES = 64 * 1024
MAX_UNKNOWN = 64  # connections that have not named a token yet
_LENGTH = struct.Struct("<I")

log = logging.getLogger(__name__)


class ChannelClosed(TransferError):
    """The other end is gone, or this end closed the channel."""


class Channel:
    """Frames over one connected socket. One thread may read while others write."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._sending = threading.Lock()

    def send(self, frame: list[object]) -> None:
        """Raises ChannelClosed. Frames are small: they fit the socket's buffer unless the peer is frozen."""
        payload = msgpack.packb(frame)
        try:
            with self._sending:
                self._socket.sendall(_LENGTH.pack(len(payload)) + payload)
        except OSError as error:
            raise ChannelClosed(f"connection to the peer is gone ({error})") from error

    def has_room(self) -> bool:
        """Whether a frame of common size can be sent without waiting for the peer to read."""
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        return bool(poll.poll(0))

    def receive(self) -> list[object]:
        """Blocks until a frame comes, or for the time of `set_timeout`. Raises ChannelClosed, or TransferError."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise TransferError(f"frame of {length} bytes, at most {MAX_FRAME_BYTES} are read")
        try:
            frame = msgpack.unpackb(self._read(length))
        except (ValueError, msgpack.UnpackException, RecursionError) as error:
            raise TransferError(f"frame: no msgpack ({error})") from error
        if not isinstance(frame, list):
            raise TransferError(f"frame: a {type(frame).__name__}, want an array")
        return frame

    def set_timeout(self, seconds: float | None) -> None:
        self._socket.settimeout(seconds)

    def own_host(self) -> str:
        """The address of this end."""
        return str(self._socket.getsockname()[0])

    def close(self) -> None:
        """Wakes the reader. Never blocks; may be called twice."""
        with contextlib.suppress(OSError):  # the peer may have closed it already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, num_bytes: int) -> bytes:
        data = bytearray()
        try:
            while len(data) < num_bytes:
                part = self._socket.recv(num_bytes - len(data))
                if not part:
                    raise ChannelClosed("the peer closed the connection")
                data += part
        except OSError as error:
            raise ChannelClosed(f"connection to the peer is gone ({error or type(error).__name__})") from error
        return bytes(data)


def dial(host: str, port: int, token: bytes, timeout_s: float) -> Channel:
    """Connects and names the token of the offer. Blocks, at most `timeout_s`. Raises TransferError."""
    try:
        channel = Channel(socket.create_connection((host, port), timeout_s))
    except (OSError, OverflowError) as error:  # OverflowError: a port beyond 65535
        raise TransferError(f"connecting to {host}:{port}: {error or type(error).__name__}") from error
    channel.send([token])
    return channel


class Listener:
    """Accepts peers that name a token which was offered to them; each is served by a thread of its own."""

    def __init__(self, host: str, timeout_s: float, serve: Callable[[bytes, Channel], None]) -> None:
        self._socket = socket.create_server((host, 0), family=_family(host))
        self._timeout_s = timeout_s
        self._serve = serve
        self._tokens: set[bytes] = set()
        self._lock = threading.Lock()
        self._unknown = threading.BoundedSemaphore(MAX_UNKNOWN)
        self._threads: list[threading.Thread] = []
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="kv-listener", daemon=True).start()

    def admit(self, token: bytes) -> None:
        with self._lock:
            self._tokens.add(token)

    def refuse(self, token: bytes) -> None:
        with self._lock:
            self._tokens.discard(token)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a second close
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def join(self, timeout_s: float) -> None:
        """Blocks until every peer's thread has ended, at most `timeout_s`. After their channels are closed."""
        deadline_s = time.monotonic() + timeout_s
        with self._lock:
            threads, self._threads = self._threads, []
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
            thread = threading.Thread(target=self._greet, args=(Channel(connection),), name="kv-pair", daemon=True)
            with self._lock:
                self._threads = [other for other in self._threads if other.is_alive()] + [thread]
                thread.start()

    def _greet(self, channel: Channel) -> None:
        try:
            token = self._read_token(channel)
        finally:
            self._unknown.release()
        if token is None:
            channel.close()
            return
        try:
            self._serve(token, channel)
        except Exception:
            log.exception("serving a peer failed")
        finally:
            channel.close()

    def _read_token(self, channel: Channel) -> bytes | None:
        channel.set_timeout(self._timeout_s)
        try:
            frame = channel.receive()
        except TransferError as error:
            log.warning("a connection was dropped before it named a token: %s", error)
            return None
        named = frame[0] if len(frame) == 1 else None
        with self._lock:
            tokens = list(self._tokens)
        for token in tokens:
            if isinstance(named, bytes) and hmac.compare_digest(token, named):
                return token
        log.warning("a connection named an unknown token and was dropped")
        return None


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
