"""Connections of an attacker: plain sockets from a separate address, which obey no protocol."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterable

from benchmarks.attack import http2_frames as h2

ATTACKER = "127.0.0.66"  # an address of loopback that limits by peer can distinguish
OWN = "127.0.0.1"  # the harness's
CONNECT_TIMEOUT_S = 5.0
_READ_BYTES = 65536


async def connect(
    address: str, receive_buffer: int | None = None, peer: str = ATTACKER
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects from the address `peer`; with a small receive buffer, a slow reader blocks the server at once."""
    host, _, port = address.rpartition(":")
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.bind((peer, 0))
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
        limit = receive_buffer or _READ_BYTES
        return await asyncio.open_connection(sock=connection, limit=limit)
    except BaseException:
        connection.close()
        raise


@contextlib.asynccontextmanager
async def connection(
    address: str, peer: str = ATTACKER
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await connect(address, peer=peer)
    try:
        yield reader, writer
    finally:
        writer.close()


async def is_closed(reader: asyncio.StreamReader, within_s: float) -> bool:
    """Reads everything that arrives; returns whether the other side closes the connection in time."""
    try:
        async with asyncio.timeout(within_s):
            while await reader.read(_READ_BYTES):
                pass
            return True
    except TimeoutError:
        return False
    except OSError:
        return True


async def http_request(
    address: str,
    head: bytes,
    body: bytes = b"",
    timeout_s: float = 60.0,
    peer: str = ATTACKER,
) -> tuple[int, bytes]:
    """Sends a request of any bytes and returns the status, 0 if there is none, and the rest of the answer.

    `head` lacks its end: `Connection: close` and the body's length are added.
    """
    async with connection(address, peer) as (reader, writer):
        writer.write(head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body))
        with contextlib.suppress(OSError):
            async with asyncio.timeout(timeout_s):
                for start in range(0, len(body), _READ_BYTES):
                    writer.write(body[start : start + _READ_BYTES])
                    await writer.drain()
        return await read_answer(reader, timeout_s)


async def read_answer(reader: asyncio.StreamReader, timeout_s: float) -> tuple[int, bytes]:
    answer = b""
    with contextlib.suppress(OSError):
        async with asyncio.timeout(timeout_s):
            while piece := await reader.read(_READ_BYTES):
                answer += piece
    status = answer.split(b" ", 2)[1:2]
    return (int(status[0]) if status and status[0].isdigit() else 0), answer


def post(path: str, key: str = "", more: Iterable[tuple[str, str]] = ()) -> bytes:
    """Returns the head of a JSON request, without its end."""
    headers = [("Host", "penstock"), ("Content-Type", "application/json"), *more]
    if key:
        headers.append(("Authorization", f"Bearer {key}"))
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers)]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n"


class Http2:
    """An HTTP/2 connection that sends any frame and counts the frames that arrive."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, reads: bool) -> None:
        self._reader = reader
        self.writer = writer
        self.counts: dict[int, int] = {}
        self.closed = asyncio.Event()
        self._ended = asyncio.Event()
        self._task = asyncio.create_task(self._read()) if reads else None

    @classmethod
    async def open(
        cls,
        address: str,
        values: Iterable[tuple[int, int]] = (),
        *,
        reads: bool = True,
        receive_buffer: int | None = None,
    ) -> Http2:
        """Opens the connection. Unless `reads` is set, it reads nothing that arrives."""
        made = cls(*await connect(address, receive_buffer), reads=reads)
        made.writer.write(h2.PREFACE + h2.settings(values))
        return made

    async def send(self, data: bytes, timeout_s: float = 10.0) -> bool:
        """Returns False once the other side has closed the connection, or does not take the bytes in time."""
        if self.closed.is_set() or self.writer.is_closing():
            return False
        try:
            self.writer.write(data)
            async with asyncio.timeout(timeout_s):
                await self.writer.drain()
        except (OSError, TimeoutError):
            self.closed.set()
            return False
        return True

    async def _read(self) -> None:
        """Counts frames, and acknowledges settings and pings as a client must."""
        try:
            while True:
                length, kind, flags, stream = h2.parse_head(await self._reader.readexactly(h2.HEAD_BYTES))
                payload = await self._reader.readexactly(length)
                self.counts[kind] = self.counts.get(kind, 0) + 1
                if kind == h2.RST_STREAM or (kind == h2.HEADERS and flags & h2.END_STREAM):
                    self._ended.set()
                elif kind == h2.SETTINGS and not flags & h2.ACK:
                    self.writer.write(h2.frame(h2.SETTINGS, h2.ACK, 0))
                elif kind == h2.PING and not flags & h2.ACK:
                    self.writer.write(h2.frame(h2.PING, h2.ACK, 0, payload))
                elif kind == h2.DATA and length:
                    update = length.to_bytes(4, "big")
                    self.writer.write(h2.frame(h2.WINDOW_UPDATE, 0, 0, update))
                    self.writer.write(h2.frame(h2.WINDOW_UPDATE, 0, stream, update))
        except (OSError, asyncio.IncompleteReadError):
            self.closed.set()
            self._ended.set()

    async def has_ended(self, within_s: float) -> bool:
        """Returns whether the other side ends its first call, or the connection, within the time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._ended.wait()
        return self._ended.is_set()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self.writer.transport.abort()  # closes at once, although the peer has not read everything
