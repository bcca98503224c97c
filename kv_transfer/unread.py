"""Bytes that have reached this process's TCP sockets and that nobody has read yet, as the kernel counts them.

A library that writes into our memory on our behalf, from sockets of its own, does not say when it has nothing left to
write; the kernel knows. Linux only.
"""

from __future__ import annotations

import os
from pathlib import Path

_TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")
_LISTENING = "0A"  # its queue counts connections


def unread_bytes() -> int:
    """Of all sockets; 0 where the kernel does not tell."""
    inodes = _own_sockets()
    return sum(_unread(line, inodes) for table in _TABLES for line in _lines(table))


def _own_sockets() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            found.add(target[8:-1])
    return found


def _lines(table: str) -> list[str]:
    try:
        return Path(table).read_text().splitlines()[1:]
    except OSError:
        return []


def _unread(line: str, inodes: set[str]) -> int:
    """Columns: number, own and remote address, state, unsent:unread, timer, retransmits, user, time-out, inode."""
    columns = line.split()
    if len(columns) < 10 or columns[3] == _LISTENING or columns[9] not in inodes:
        return 0
    return int(columns[4].partition(":")[2], 16)
