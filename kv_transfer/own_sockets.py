"""This process's TCP sockets, for a wire whose library keeps its own to itself: what lies in them when a link ends.

A library that writes into our memory from its sockets does not say when it has nothing left to write; the kernel knows
what is unread. And a kernel goes on sending what a closed socket still held, for minutes where a network heals late,
unless the socket was told to drop it. Linux only; elsewhere there is nothing to see.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_LISTENING = "0A"
_DROP_AT_CLOSE = struct.pack("ii", 1, 0)  # struct linger: on, 0 s


@dataclass(frozen=True, slots=True)
class TcpSocket:
    number: str  # the kernel's
    descriptor: int
    own_port: int
    peer_port: int
    unread_bytes: int
    is_listening: bool


def unread_bytes() -> int:
    """That have come to any of them and nobody has read."""
    return sum(one.unread_bytes for one in tcp_sockets() if not one.is_listening)  # a listener's counts connections


def listening_ports() -> frozenset[int]:
    return frozenset(one.own_port for one in tcp_sockets() if one.is_listening)


def drop_at_close(numbers: Collection[str]) -> None:
    """What these still hold when they are closed, or when the process dies, is not sent any more."""
    _each(numbers, lambda alias: alias.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _DROP_AT_CLOSE))


def reset(numbers: Collection[str]) -> None:
    """Drops now what these hold, and breaks their connections: whoever reads them finds them closed."""
    _each(numbers, _disconnect)


def _disconnect(alias: socket.socket) -> None:
    address = struct.pack("H14x", socket.AF_UNSPEC)  # a sockaddr that says: none
    ctypes.CDLL(None).connect(alias.fileno(), address, len(address))


def _each(numbers: Collection[str], act: Callable[[socket.socket], None]) -> None:
    for one in tcp_sockets() if numbers else ():
        if one.number not in numbers:
            continue
        try:
            with socket.socket(fileno=os.dup(one.descriptor)) as alias:
                act(alias)
        except OSError:
            continue  # closed meanwhile


def tcp_sockets() -> list[TcpSocket]:
    descriptors = _descriptors()
    found = []
    for line in (line for table in _TABLES for line in _lines(table)):
        # Number, own and remote address:port, state, unsent:unread, timer, retransmits, user, time-out, inode.
        columns = line.split()
        if len(columns) > 9 and columns[9] in descriptors:
            own_port, peer_port, unread = (int(columns[index].rpartition(":")[2], 16) for index in (1, 2, 4))
            is_listening = columns[3] == _LISTENING
            found.append(TcpSocket(columns[9], descriptors[columns[9]], own_port, peer_port, unread, is_listening))
    return found


def _descriptors() -> dict[str, int]:
    found = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            found[target[8:-1]] = int(name)
    return found


def _lines(table: str) -> list[str]:
    try:
        return Path(table).read_text().splitlines()[1:]
    except OSError:
        return []
