"""Ends gRPC connections that send more than their calls need, such as endless pings. Linux only.

gRPC itself gives up on a connection after `limits.ping_strikes`, but it ends the connection only between two writes,
and answering a flood of pings keeps it writing. gRPC exposes neither frames nor sockets, so this module reads the
kernel's byte counts of each connection to the port and compares the received bytes with an allowance: each call allows
the largest message, sent bytes allow a quarter of themselves (for acknowledgements), and each second allows
`limits.control_bytes_per_s`.
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

_INTERVAL_S = 0.25  # minimum time between two scans
_PAUSE_FACTOR = 50  # a pause lasts this many times as long as the scan before it, which costs at most 2 % of a core
_MAX_EXCESSIVE = 4  # a connection over its allowance in this many consecutive scans is ended
_MAX_MISSING = 2  # a connection absent from this many consecutive scans is forgotten
_FIRST_BYTES = 128 << 10  # allowance of a new connection
_SENT_SHARE = 0.25  # received bytes allowed for each byte sent
_NO_ADDRESS = bytes(16)  # struct sockaddr of family AF_UNSPEC
_COUNTS = struct.Struct("=120xQQ")  # in struct tcp_info (linux/tcp.h): tcpi_bytes_acked, tcpi_bytes_received


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes that a connection has carried so far."""

    received: int
    sent: int


@dataclass(slots=True)
class _Account:
    since_s: float
    num_calls: int = 0
    num_excessive: int = 0  # consecutive scans in which it was over its allowance
    num_missing: int = 0  # consecutive scans in which it was not open


class ConnectionAccounts:
    """Decides which connections have sent too much. Identifies a connection by its peer's port. Pure; used on one event
    loop.
    """

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self._accounts: dict[int, _Account] = {}

    def on_call(self, peer: str, now_s: float) -> None:
        """Counts a call. `peer` is gRPC's name of the peer."""
        port = peer.rpartition(":")[2]
        if port.isdecimal():  # else it is not a TCP connection
            self._accounts.setdefault(int(port), _Account(now_s)).num_calls += 1

    def find_excessive(self, open_now: dict[int, Traffic], now_s: float) -> list[int]:
        """Returns the connections to end: those that were over their allowance in several consecutive scans.

        A single scan is not enough, because a call may be counted after its message arrived, and a connection may be
        scanned only after its first call.
        """
        for port in [*self._accounts]:
            account = self._accounts[port]
            account.num_missing = 0 if port in open_now else account.num_missing + 1
            if account.num_missing == _MAX_MISSING:
                del self._accounts[port]
        found = []
        for port, traffic in open_now.items():
            account = self._accounts.setdefault(port, _Account(now_s))
            is_excessive = traffic.received > self._allowance(port, traffic, now_s)
            account.num_excessive = account.num_excessive + 1 if is_excessive else 0
            if account.num_excessive >= _MAX_EXCESSIVE:
                found.append(port)
        return found

    def _allowance(self, port: int, traffic: Traffic, now_s: float) -> float:
        account, limits = self._accounts[port], self._limits
        for_calls = account.num_calls * (limits.request_bytes + limits.header_bytes)
        for_time = (now_s - account.since_s) * limits.control_bytes_per_s
        return _FIRST_BYTES + for_calls + for_time + _SENT_SHARE * traffic.sent


class FloodGuard:
    """Watches the connections to one port of this process and resets those that send too much."""

    def __init__(self, limits: LimitsConfig, metrics: RouterMetrics) -> None:
        self._limits = limits
        self._metrics = metrics
        self._accounts = ConnectionAccounts(limits)

    def on_call(self, peer: str) -> None:
        self._accounts.on_call(peer, time.monotonic())

    async def watch(self, port: int) -> None:
        """Runs until it is cancelled; returns at once on systems other than Linux."""
        if sys.platform != "linux":
            return
        took_s = 0.0
        while True:
            await asyncio.sleep(max(_INTERVAL_S, _PAUSE_FACTOR * took_s))
            begun_s = time.monotonic()
            open_now = await asyncio.to_thread(_scan, port)
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


def _scan(port: int) -> dict[int, Traffic]:
    """Returns the traffic of the open connections by their peers' ports."""
    found = {}
    for connection in _connections(port):
        sent, received = _COUNTS.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _COUNTS.size))
        found[connection.getpeername()[1]] = Traffic(received, sent)
    return found


def _reset(port: int, peer_port: int) -> None:
    for connection in _connections(port):
        if connection.getpeername()[1] == peer_port:
            # Connecting to AF_UNSPEC resets the connection (connect(2)). After a shutdown alone, gRPC would wait for
            # its last write to end, which the peer can prevent by not reading.
            ctypes.CDLL(None, use_errno=True).connect(connection.fileno(), _NO_ADDRESS, len(_NO_ADDRESS))


def _connections(port: int) -> Iterator[socket.socket]:
    """Yields duplicates of this process's accepted connections to a port. Closes each after its use."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the file was closed, or the socket is not connected
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getsockname()[1] == port:
                    connection.getpeername()
                    yield connection
