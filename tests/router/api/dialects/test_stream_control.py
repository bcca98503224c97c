"""Tests what acts on a stream from outside: heartbeats during silence, and other calls that cancel it."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from penstock.config.limits import LimitsConfig
from penstock.errors import Cancelled
from router.api.dialect import ServerEvent
from router.api.http.running_calls import RunningCalls
from router.api.http.streams import EventStream, StartedOutputs
from router.api.reader_watch import ReaderWatch
from router.metrics.metrics import RouterMetrics

PING = ServerEvent({"type": "ping"}, "ping")
KEY = ("tenant", "resp_1")
TIMEOUT_S = 20.0


class Source:
    """Yields two pieces, the second one once it is released."""

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


class Connection:
    """Records what a response sends, and disconnects when `leave` is set."""

    def __init__(self, on_send=lambda body: None) -> None:
        self.bodies: list[bytes] = []
        self.leave = asyncio.Event()
        self._on_send = on_send

    async def receive(self):
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        if "body" in message:
            self.bodies.append(message["body"])
            self._on_send(message["body"])


def response_of(source: Source, heartbeat: ServerEvent | None = PING) -> EventStream:
    """Returns a response that sends the source's pieces unchanged, with a heartbeat after each silent millisecond."""
    outputs = StartedOutputs(source.pieces())

    async def events():
        yield await outputs.first
        async for piece in outputs.rest:
            yield piece

    watch = ReaderWatch("r", time.monotonic() + TIMEOUT_S, LimitsConfig(), RouterMetrics("m"), lambda: None)
    return EventStream(events(), outputs, watch, {}, heartbeat, 0.001)


@pytest.mark.parametrize(
    ("heartbeat", "expected"), [(PING, b'event: ping\ndata: {"type":"ping"}\n\n'), (None, b"\n\n")]
)
async def test_heartbeats_fill_the_silence(heartbeat, expected):
    source = Source()
    connection = Connection(lambda body: source.release.set() if body == expected else None)
    await response_of(source, heartbeat)({}, connection.receive, connection.send)
    assert (connection.bodies[0], *connection.bodies[-2:]) == (b"one", b"two", b"")
    assert set(connection.bodies[1:-2]) == {expected}
    assert source.closed


@pytest.mark.parametrize("at_start", [True, False])
async def test_a_client_that_leaves_closes_the_source(at_start):
    source = Source()
    connection = Connection(lambda body: connection.leave.set())
    if at_start:
        connection.leave.set()
    await response_of(source)({}, connection.receive, connection.send)
    assert source.closed
    assert b"two" not in connection.bodies


async def test_a_failure_before_the_first_output_is_raised_to_the_caller():
    async def failing():
        raise Cancelled("gone")
        yield

    outputs = StartedOutputs(failing())
    with pytest.raises(Cancelled, match="gone"):
        await outputs.wait(TIMEOUT_S)
    await outputs.aclose()


async def test_the_wait_for_the_first_output_is_bounded():
    released = asyncio.Event()

    async def late():
        await released.wait()
        yield 0, "output"

    outputs = StartedOutputs(late())
    assert await outputs.wait(0.001) is None
    released.set()
    assert await outputs.first == (0, "output")
    await outputs.aclose()


async def test_a_call_is_cancelled_while_it_waits():
    source, calls = Source(), RunningCalls()
    outputs = calls.guarded(KEY, source.pieces())
    assert await anext(outputs) == b"one"
    waiting = asyncio.create_task(anext(outputs))
    await asyncio.sleep(0)  # it starts to wait
    assert await calls.cancel(KEY, TIMEOUT_S)
    with pytest.raises(Cancelled, match="another call cancelled this one"):
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


async def test_a_cancelled_call_whose_client_leaves_ends_as_abandoned():
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


async def test_cancelling_does_not_wait_for_an_unread_call():
    source, calls = Source(), RunningCalls()
    outputs = calls.guarded(KEY, source.pieces())
    await anext(outputs)
    with pytest.raises(TimeoutError):
        await calls.cancel(KEY, 0.001)
    with contextlib.suppress(Cancelled):
        await anext(outputs)
    assert source.closed
