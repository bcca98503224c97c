"""Implements a small framed TCP channel, over which transports authenticate peers, announce pages and acknowledge them.

Each frame is a length and a msgpack array. A reader blocks in its own thread; `close` and the death of the peer's
process wake it at once. A frozen peer merely falls silent, so callers set deadlines. Pages never travel over a channel.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading

import msgpack

from penstock.errors import TransferError

MAX_FRAME_BYTES = 64 * 1024
_LENGTH = struct.Struct("<I")


class ChannelClosed(TransferError):
    """Says that the other end is gone, or that this end closed the channel."""


class Channel:
    """Frames over one connected socket. One thread may read while others write."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._sending = threading.Lock()
        self._closed = False  # closed by this end

    def send(self, frame: list[object]) -> None:
        """Sends one frame. Raises ChannelClosed. Blocks only if the peer is frozen: frames fit the socket's buffer."""
        payload = msgpack.packb(frame)
        try:
            with self._sending:
                self._socket.sendall(_LENGTH.pack(len(payload)) + payload)
        except OSError as error:
            raise ChannelClosed(f"connection to the peer is gone ({error})") from error

    def has_room(self) -> bool:
        """Returns whether a frame of ordinary size can be sent without waiting for the peer to read."""
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        return bool(poll.poll(0))

    def has_frame(self) -> bool:
        """Returns whether `receive` would find the start of a frame or the connection's end without waiting."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def receive(self) -> list[object]:
        """Returns the next frame. Blocks for at most the time of `set_timeout`. Raises ChannelClosed, TransferError."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise TransferError(f"frame of {length} bytes, at most {MAX_FRAME_BYTES} are read")
        try:
            frame = msgpack.unpackb(self._read(length))
        except (ValueError, msgpack.UnpackException, RecursionError) as error:
            raise TransferError(f"frame: not msgpack ({error})") from error
        if not isinstance(frame, list):
            raise TransferError(f"frame: a {type(frame).__name__}, want an array")
        return frame

    def set_timeout(self, seconds: float | None) -> None:
        self._socket.settimeout(seconds)

    def own_host(self) -> str:
        """Returns the address of this end."""
        return str(self._socket.getsockname()[0])

    def end_sending(self) -> None:
        """Signals to the other end that nothing more follows; this end can still read. Never blocks."""
        with contextlib.suppress(OSError):  # the peer may have closed it already
            self._socket.shutdown(socket.SHUT_WR)

    def wait_for_end(self) -> bool:
        """Reads and discards everything until the connection ends. Returns True if the other end closed it (or its
        kernel, when the process ended), and False if this end did or the network failed. Blocks without a time limit.
        """
        try:
            self._socket.settimeout(None)
            while self._socket.recv(MAX_FRAME_BYTES):
                pass
        except (ConnectionResetError, BrokenPipeError):
            return not self._closed
        except OSError:
            return False
        return not self._closed

    def close(self) -> None:
        """Closes the connection and wakes the reader. Never blocks; may be called twice."""
        self._closed = True
        with contextlib.suppress(OSError):  # the peer may have closed it already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, num_bytes: int) -> bytes:
        data = bytearray()
        try:
            while len(data) < num_bytes:
                received = self._socket.recv(num_bytes - len(data))
                if not received:
                    raise ChannelClosed("the peer closed the connection")
                data += received
        except OSError as error:
            raise ChannelClosed(f"connection to the peer is gone ({error or type(error).__name__})") from error
        return bytes(data)


def dial(host: str, port: int, token: bytes, timeout_s: float) -> Channel:
    """Connects and presents the token of the offer. Blocks for at most `timeout_s`. Raises TransferError."""
    try:
        channel = Channel(socket.create_connection((host, port), timeout_s))
    except (OSError, OverflowError) as error:  # OverflowError: a port beyond 65535
        raise TransferError(f"connecting to {host}:{port}: {error or type(error).__name__}") from error
    channel.send([token])
    return channel
