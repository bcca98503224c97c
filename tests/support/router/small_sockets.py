"""Makes sockets with small buffers, so that a client that reads nothing is noticed after kilobytes."""

from __future__ import annotations

import asyncio
import socket

import pytest

from penstock.config.limits import LimitsConfig
from router import server
from router.api.http.connections import bound_unread


def shrink_sent_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds the kernel's buffers of a router's answers, which would otherwise grow to megabytes."""

    def bound(listener: socket.socket, limits: LimitsConfig) -> None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
        bound_unread(listener, limits)

    monkeypatch.setattr(server, "bound_unread", bound)


async def connect_small(client: socket.socket, port: int) -> None:
    """Connects a socket with a small receive buffer to a port of this machine."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
