"""Connects rank 0 of a replica to each other rank: a Unix socket in a private folder, with framed msgpack.

All ranks of a replica are on one machine. Only its owner can access the folder, and each end learns the other's
identity from the kernel. Only plain data is sent: a batch's arrays as dtype, shape and bytes. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from penstock.errors import InternalError

MAX_FRAME_BYTES = 256 << 20  # a step's batch takes a few bytes per token
_LENGTH = struct.Struct("<I")
_PEER = struct.Struct("3i")  # pid, uid, gid


class RankMessage(NamedTuple):
    """A message between ranks. `call` numbers a call and its answer; it is 0 if no answer is wanted."""

    kind: str
    body: Any = None
    call: int = 0


class RankLost(Exception):
    """Says that the other end is gone, or has sent something that is not a message."""


class RankChannel:
    """An end of the connection. Any thread may send; a single thread receives."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._sending = threading.Lock()
        self.peer_pid = _peer_pid(connected)

    def send(self, message: RankMessage) -> None:
        """Sends a message; blocks while the other end is far behind. Raises RankLost."""
        data = msgpack.packb(tuple(message))
        if len(data) > MAX_FRAME_BYTES:
            raise InternalError(f"a message to another rank has {len(data)} bytes; the limit is {MAX_FRAME_BYTES}")
        try:
            with self._sending:
                self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise RankLost(f"sending failed: {error}") from error

    def receive(self) -> RankMessage:
        """Blocks for the next message. Raises RankLost once there will be none."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise RankLost(f"a frame of {length} bytes")
        match msgpack.unpackb(self._read(length)):
            case [str(kind), body, int(call)]:
                return RankMessage(kind, body, call)
            case other:
                raise RankLost(f"frame {str(other)[:80]}: want [kind, body, call]")

    def close(self) -> None:
        """Closes the channel; `receive` raises RankLost at both ends."""
        with contextlib.suppress(OSError):  # the other end has closed it already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, count: int) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            try:
                num_read = self._socket.recv_into(view)
            except OSError as error:
                raise RankLost(f"receiving failed: {error}") from error
            if not num_read:
                raise RankLost("the other end has closed the channel")
            view = view[num_read:]
        return bytes(data)


def listen(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    listening.listen()
    return listening


def accept(listening: socket.socket, timeout_s: float) -> RankChannel:
    """Waits for a caller. Raises TimeoutError, and RankLost for a process of another user."""
    listening.settimeout(timeout_s)
    connected, _ = listening.accept()
    connected.settimeout(None)
    return RankChannel(connected)


def dial(path: Path) -> RankChannel:
    """Connects to rank 0. Raises OSError, and RankLost if another user listens."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.connect(str(path))
    return RankChannel(connected)


def _peer_pid(connected: socket.socket) -> int:
    pid, uid, _ = _PEER.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid != os.getuid():
        connected.close()
        raise RankLost(f"process {pid} belongs to user {uid}, not to {os.getuid()}")
    return int(pid)
