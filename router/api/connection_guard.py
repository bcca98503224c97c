"""Ends gRPC connections that send more than their calls need, such as pings without end. Linux only.

gRPC itself gives up on a connection after `limits.ping_strikes`, but ends it only between two writes, and the answers
to a flood leave no such moment. It shows neither frames nor sockets, so this module reads the kernel's counts of each
connection to the port: what came in beyond what the connection has earned. A call earns the largest message, answers
earn a quarter of their bytes (clients confirm them), and each second earns `limits.control_bytes_per_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.config.limits import LimitsConfig
from router.metrics.metrics import RouterMetrics

log = logging.getLogger(__name__)

_EVERY_S = 0.25  # between two looks
_REST = 50  # times what a look took: thousands of connections cost no more than 2 % of a core
_NUM_EXCESSIVE = 4  # looks
_NUM_MISSING = 2
_FIRST_BYTES = 128 << 10  # that a new connection may send
_SHARE_OF_ANSWERS = 0.25
_NO_ADDRESS = bytes(16)  # struct sockaddr of family AF_UNSPEC
_COUNTS = struct.Struct("=120xQQ")  # of struct tcp_info (linux/tcp.h): tcpi_bytes_acked, tcpi_bytes_received


@dataclass(frozen=True, slots=True)
class Traffic:
    """The traffic of a connection so far."""

    received: int
    sent: int


@dataclass(slots=True)
class _Account:
    since_s: float
    num_calls: int = 0
    num_excessive: int = 0  # consecutive looks at which it had sent too much
    num_missing: int = 0  # consecutive looks at which it was not open


class ConnectionAccounts:
    """Decides which connections have sent too much. Pure; for one event loop. A connection is named by its peer's
    port."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self._accounts: dict[int, _Account] = {}

    def on_call(self, peer: str, now_s: float) -> None:
        """Notes a call; `peer` is as gRPC writes it."""
        port = peer.rpartition(":")[2]
        if port.isdecimal():  # else no TCP
            self._accounts.setdefault(int(port), _Account(now_s)).num_calls += 1

    def find_excessive(self, open_now: dict[int, Traffic], now_s: float) -> list[int]:
        """Returns the connections to end: those that have sent too much at several looks in a row.

        A call may be noted later than its message comes, and a connection later than its first call.
        """
        for port in [*self._accounts]:
            account = self._accounts[port]
            account.num_missing = 0 if port in open_now else account.num_missing + 1
            if account.num_missing == _NUM_MISSING:
                del self._accounts[port]
        found = []
        for port, traffic in open_now.items():
            account = self._accounts.setdefault(port, _Account(now_s))
            is_excessive = traffic.received > self._earned(port, traffic, now_s)
            account.num_excessive = account.num_excessive + 1 if is_excessive else 0
            if account.num_excessive >= _NUM_EXCESSIVE:
                found.append(port)
        return found

    def _earned(self, port: int, traffic: Traffic, now_s: float) -> float:
        account, limits = self._accounts[port], self._limits
        of_calls = account.num_calls * (limits.request_bytes + limits.header_bytes)
        of_time = (now_s - account.since_s) * limits.control_bytes_per_s
        return _FIRST_BYTES + of_calls + of_time + _SHARE_OF_ANSWERS * traffic.sent


class ConnectionGuard:
    """Watches the connections of one port of this process."""

    def __init__(self, limits: LimitsConfig, metrics: RouterMetrics) -> None:
        self._limits = limits
        self._metrics = metrics
        self._accounts = ConnectionAccounts(limits)

    def on_call(self, peer: str) -> None:
        self._accounts.on_call(peer, time.monotonic())

    async def watch(self, port: int) -> None:
        """Runs until it is cancelled; returns at once where the kernel does not show connections."""
        if sys.platform != "linux":
            return
        took_s = 0.0
        while True:
            await asyncio.sleep(max(_EVERY_S, _REST * took_s))
            begun_s = time.monotonic()
            open_now = await asyncio.to_thread(_look, port)
            now_s = time.monotonic()
            took_s = now_s - begun_s
            for peer in self._accounts.find_excessive(open_now, now_s):
                limit = self._limits.control_bytes_per_s
                log.warning(
                    "reset a gRPC connection that sent too much outside of calls (limits.control_bytes_per_s = %d)",
                    limit,
                )
                self._metrics.limited("control_bytes_per_s")
                await asyncio.to_thread(_reset, port, peer)


def _look(port: int) -> dict[int, Traffic]:
    """Returns the open connections by their peers' ports."""
    found = {}
    for connection in _connections(port):
        sent, received = _COUNTS.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTS.size))
        found[connection.getpeername()[1]] = Traffic(received, sent)
    return found


def _reset(port: int, peer_port: int) -> None:
    for connection in _connections(port):
        if connection.getpeername()[1] == peer_port:
            # Connecting to no address resets the connection (connect(2)). After a mere shutdown the library waits for
            # its last write to end, which the peer prevents by not reading.
            ctypes.CDLL(None, use_errno=True).connect(connection.fileno(), _NO_ADDRESS, len(_NO_ADDRESS))


def _connections(port: int) -> Iterator[socket.socket]:
    """Yields this process's accepted connections of a port, by descriptors of their own, which it closes again."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getsockname()[1] == port:
                    connection.getpeername()
                    yield connection
