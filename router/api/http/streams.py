"""Sends a call's outputs over HTTP, whole or as server-sent events, until the client disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from typing import TypeVar

from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.errors import Cancelled, InternalError, PenstockError
from penstock.text.completions import Output
from router.api.dialect import CallResponse, CallTotals, ServerEvent
from router.api.parsed_outputs import ParsedOutputs
from router.api.reader_watch import ReaderWatch
from router.dispatch.dispatcher import Dispatcher
from router.prepared_request import PreparedRequest

log = logging.getLogger(__name__)

GRANTED_TOKENS = "x-penstock-max-tokens"  # response header: the lower max_tokens granted during overload

HEARTBEAT_S = 10.0  # time without an event after which a heartbeat is sent
# The heartbeat of APIs without an event for it. It is not an SSE comment: some load generators take each received piece
# for one line, strip it and so join a comment with the event after it, whose text is then lost.
_EMPTY_LINES = b"\n\n"

ResultT = TypeVar("ResultT")
Outputs = AsyncGenerator[tuple[int, Output], None]  # index of the choice, and its new output
_YIELD_EVERY = 32  # outputs


async def merged_outputs(dispatcher: Dispatcher, requests: Sequence[PreparedRequest]) -> Outputs:
    """Yields the outputs of all of a call's prompts as they arrive. The first failure ends them all."""
    if len(requests) == 1:
        async with contextlib.aclosing(dispatcher.outputs(requests[0])) as outputs:
            async for output in outputs:
                yield output.index, output
        return
    ready: asyncio.Queue[tuple[int, Output] | Exception | None] = asyncio.Queue()

    async def pump(rank: int, request: PreparedRequest) -> None:
        try:
            async with contextlib.aclosing(dispatcher.outputs(request)) as outputs:
                async for output in outputs:
                    ready.put_nowait((rank * request.sampling.n + output.index, output))
            ready.put_nowait(None)
        except Exception as error:
            ready.put_nowait(error)

    tasks = [asyncio.create_task(pump(rank, request)) for rank, request in enumerate(requests)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await ready.get()  # bounded by the requests' deadlines
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def collect_outputs(
    outputs: Outputs, parsed: ParsedOutputs, response: CallResponse, totals: CallTotals
) -> dict[str, str]:
    """Adds all outputs to the response and returns its headers."""
    headers, num_outputs = {}, 0
    async for choice, output in outputs:
        delta = parsed.delta(choice, output)
        totals.add(delta)
        response.add(delta)
        headers.update(granted_header(output))
        num_outputs += 1
        if num_outputs % _YIELD_EVERY == 0:  # the outputs of many choices may all be ready: let others run in between
            await asyncio.sleep(0)
    return headers


def granted_header(output: Output) -> dict[str, str]:
    """Returns the header that reports a lowered `max_tokens`; empty if overload did not lower it."""
    return {} if output.granted_tokens is None else {GRANTED_TOKENS: str(output.granted_tokens)}


class StartedOutputs:
    """A call's outputs, whose first one is already being awaited.

    Read `first` once and then `rest`. Always close it.
    """

    def __init__(self, outputs: Outputs) -> None:
        self.first: asyncio.Task[tuple[int, Output]] = asyncio.create_task(_next(outputs))
        self.rest = outputs

    async def wait(self, timeout_s: float) -> Output | None:
        """Returns the first output, or None if it takes longer than `timeout_s`. Raises the call's failure."""
        await asyncio.wait([self.first], timeout=timeout_s)
        return self.first.result()[1] if self.first.done() else None

    async def aclose(self) -> None:
        self.first.cancel()
        await asyncio.wait([self.first])
        if not self.first.cancelled():
            self.first.exception()  # marks the exception as retrieved, so that asyncio does not log it
        await self.rest.aclose()


async def event_bytes(
    outputs: StartedOutputs, parsed: ParsedOutputs, response: CallResponse, totals: CallTotals
) -> AsyncGenerator[bytes, None]:
    """Yields the response's server-sent events, all events of one output in one piece. A failure yields the dialect's
    error event.
    """
    try:
        if opening := response.opening(totals):
            yield encoded(opening)
        choice, output = await outputs.first
        while True:
            delta = parsed.delta(choice, output)
            totals.add(delta)
            if events := response.events(delta, totals):
                yield encoded(events)
            choice, output = await anext(outputs.rest)
    except StopAsyncIteration:
        yield encoded(response.closing(totals))
    except PenstockError as error:
        yield encoded(response.failure(error))
    except Exception as error:
        log.exception("a stream failed")
        yield encoded(response.failure(internal_error(error)))


async def _next(outputs: Outputs) -> tuple[int, Output]:
    return await anext(outputs)


def encoded(events: Sequence[ServerEvent]) -> bytes:
    """Returns the bytes of server-sent events."""
    return b"".join(map(_encode, events))


def _encode(event: ServerEvent) -> bytes:
    data = event.data.encode() if isinstance(event.data, str) else to_json(event.data)
    return b"event: %b\ndata: %b\n\n" % (event.name.encode(), data) if event.name else b"data: %b\n\n" % data


def internal_error(error: Exception) -> InternalError:
    return InternalError(f"internal error: {type(error).__name__}")


async def until_disconnect(receive: Receive, work: Awaitable[ResultT]) -> ResultT:
    """Returns the work's result. Cancels it and raises Cancelled if the client disconnects first.

    Call it once the body has been read.
    """
    working, disconnecting = asyncio.ensure_future(work), asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait([working, disconnecting], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled("the client disconnected")
        return working.result()
    finally:
        for task in (working, disconnecting):
            task.cancel()
        await asyncio.wait([working, disconnecting])


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Streams events as a response's body. It stops as soon as the client disconnects, whatever it is waiting for.

    Its watch aborts the connection of a client that does not read, which is a disconnect too. When no event is ready
    for a while it sends heartbeats, so that neither clients nor proxies take the connection for dead.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        outputs: StartedOutputs,
        watch: ReaderWatch,
        headers: Mapping[str, str],
        heartbeat: ServerEvent | None,
        interval_s: float,
    ) -> None:
        """`events` must be made from `outputs`, which this response closes. It sends `heartbeat`, or empty lines if
        that is None, after `interval_s` without an event.
        """
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache", **headers})
        del self.headers["content-length"]
        self._events = events
        self._outputs = outputs
        self._watch = watch
        self._heartbeat = _EMPTY_LINES if heartbeat is None else encoded([heartbeat])
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._sent_s = 0.0  # when the last event began to be sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._outputs):
            with contextlib.suppress(Cancelled), contextlib.closing(self._watch):
                await until_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        beating = asyncio.create_task(self._beat(send))
        try:
            async with contextlib.aclosing(self._events) as events:
                async for event in events:
                    self._sent_s = self._loop.time()
                    with self._watch:
                        await send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            beating.cancel()
            await asyncio.wait([beating])
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _beat(self, send: Send) -> None:
        """Sends heartbeats. They are whole events or empty lines, which are valid between any two events."""
        self._sent_s = self._loop.time()
        while True:
            await asyncio.sleep(self._sent_s + self._interval_s - self._loop.time())
            if self._sent_s + self._interval_s <= self._loop.time():
                self._sent_s = self._loop.time()
                await send({"type": "http.response.body", "body": self._heartbeat, "more_body": True})
