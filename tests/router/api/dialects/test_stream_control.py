"""Tests what acts on a stream from outside: heartbeats while nothing comes, and other calls that cancel it."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from penstock.errors import Cancelled
from router.api.dialect import ServerEvent
from router.api.http.running_calls import RunningCalls
from router.api.http.streams import with_heartbeats

PING = ServerEvent({"type": "ping"}, "ping")
KEY = ("tenant", "resp_1")
TIMEOUT_S = 20.0


class Source:
    """Yields two pieces, the second one when it is released."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.closed = False

    async def pieces(self):
        try:
            yield b"one"
            await self.release.wait()
            yield b"two"
        finally:
            self.closed = True


async def test_heartbeats_fill_the_silence():
    source, seen = Source(), []
    async for piece in with_heartbeats(source.pieces(), PING, 0.001):
        seen.append(piece)
        if piece.startswith(b"event: ping"):
            source.release.set()
    assert (seen[0], seen[-1]) == (b"one", b"two")
    assert set(seen[1:-1]) == {b'event: ping\ndata: {"type":"ping"}\n\n'}
    assert source.closed


async def test_a_stream_that_is_closed_closes_its_source():
    source = Source()
    events = with_heartbeats(source.pieces(), PING, 0.001)
    assert [await anext(events), (await anext(events))[:11]] == [b"one", b"event: ping"]
    await events.aclose()
    assert source.closed


async def test_a_failing_source_fails_the_stream():
    async def failing():
        yield b"one"
        raise Cancelled("gone")

    with pytest.raises(Cancelled, match="gone"):
        assert [piece async for piece in with_heartbeats(failing(), PING)] == []


async def test_a_call_is_cancelled_while_it_waits():
    source, calls = Source(), RunningCalls()
    outputs = calls.guarded(KEY, source.pieces())
    assert await anext(outputs) == b"one"
    waiting = asyncio.create_task(anext(outputs))
    await asyncio.sleep(0)  # it begins to wait
    assert await calls.cancel(KEY, TIMEOUT_S)
    with pytest.raises(Cancelled, match="another call has cancelled this one"):
        await waiting
    assert source.closed
    assert not await calls.cancel(KEY, TIMEOUT_S)


async def test_a_call_is_cancelled_between_two_outputs():
    source, calls = Source(), RunningCalls()
    outputs = calls.guarded(KEY, source.pieces())
    assert await anext(outputs) == b"one"
    cancelling = asyncio.create_task(calls.cancel(KEY, TIMEOUT_S))
    await asyncio.sleep(0)  # it is cancelled before its reader asks for more
    with pytest.raises(Cancelled):
        await anext(outputs)
    assert await cancelling


async def test_a_call_whose_client_leaves_as_well_ends_as_abandoned():
    source, calls = Source(), RunningCalls()
    outputs = calls.guarded(KEY, source.pieces())
    await anext(outputs)
    waiting = asyncio.create_task(anext(outputs))
    await asyncio.sleep(0)
    waiting.cancel()
    cancelling = asyncio.create_task(calls.cancel(KEY, TIMEOUT_S))
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    await cancelling


async def test_a_call_that_nobody_reads_is_not_waited_for():
    source, calls = Source(), RunningCalls()
    outputs = calls.guarded(KEY, source.pieces())
    await anext(outputs)
    with pytest.raises(TimeoutError):
        await calls.cancel(KEY, 0.001)
    with contextlib.suppress(Cancelled):
        await anext(outputs)
    assert source.closed
