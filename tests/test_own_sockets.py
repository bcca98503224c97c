"""What the kernel says of this process's sockets, and what becomes of bytes that nobody shall get any more."""

from __future__ import annotations

import collections
import contextlib
import socket

import pytest

from kv_transfer.own_sockets import drop_at_close, listening_ports, reset, tcp_sockets, unread_bytes


@pytest.fixture
def pair() -> tuple[socket.socket, socket.socket]:
    listening = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listening.getsockname(), 5.0)
    other, _ = listening.accept()
    other.settimeout(5.0)
    assert listening.getsockname()[1] in listening_ports()
    listening.close()
    return one, other


def number_of(one: socket.socket) -> str:
    return next(found.number for found in tcp_sockets() if found.own_port == one.getsockname()[1])


def test_unread_bytes_are_counted_until_they_are_read(pair: tuple[socket.socket, socket.socket]) -> None:
    one, other = pair
    before = unread_bytes()
    one.sendall(b"x" * 1000)
    assert unread_bytes() == before + 1000
    other.recv(1000, socket.MSG_WAITALL)
    assert unread_bytes() == before
    one.close()
    other.close()


@pytest.mark.parametrize("how", ["reset", "close"])
def test_what_was_not_read_is_dropped(pair: tuple[socket.socket, socket.socket], how: str) -> None:
    one, other = pair
    one.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            one.send(b"x" * (1 << 20))  # until both kernels are full
    if how == "reset":
        reset({number_of(one)})
    else:
        drop_at_close({number_of(one)})
        one.close()
    with pytest.raises(ConnectionResetError):
        collections.deque(iter(lambda: other.recv(1 << 20), b""), maxlen=0)  # to an end in order, which does not come
    one.close()
    other.close()
