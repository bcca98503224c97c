"""Sends a call's outputs over HTTP: whole or as server-sent events, and only as long as the client listens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from penstock.errors import Cancelled, InternalError, PenstockError
from penstock.text.completions import Output
from router.api.dialect import CallResponse, CallTotals, ServerEvent
from router.api.parsed_outputs import ParsedOutputs
from router.api.reader_watch import ReaderWatch
from router.dispatch.dispatcher import Dispatcher
from router.prepared_request import PreparedRequest

log = logging.getLogger(__name__)

GRANTED_TOKENS = "x-penstock-max-tokens"  # response header: the max_tokens that overload has allowed

HEARTBEAT_S = 10.0  # without an event

ResultT = TypeVar("ResultT")
Outputs = AsyncGenerator[tuple[int, Output], None]  # index of the choice, and its new output
_OUTPUTS_AT_A_TIME = 32


async def merged_outputs(dispatcher: Dispatcher, requests: Sequence[PreparedRequest]) -> Outputs:
    """Yields the outputs of all of a call's prompts as they come; the first failure ends them all."""
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
    """Collects the outputs for the whole response; returns its headers."""
    headers, num_outputs = {}, 0
    async for choice, output in outputs:
        delta = parsed.delta(choice, output)
        totals.add(delta)
        response.add(delta)
        headers.update(granted_header(output))
        num_outputs += 1
        if num_outputs % _OUTPUTS_AT_A_TIME == 0:  # those of many choices may be there at once
            await asyncio.sleep(0)
    return headers


def granted_header(output: Output) -> dict[str, str]:
    """Returns the header that reports a shortened `max_tokens`, if overload has shortened it."""
    return {} if output.granted_tokens is None else {GRANTED_TOKENS: str(output.granted_tokens)}


async def event_bytes(
    first: tuple[int, Output], outputs: Outputs, parsed: ParsedOutputs, response: CallResponse, totals: CallTotals
) -> AsyncGenerator[bytes, None]:
    """Yields server-sent events: those of the response, and after a failure its own for that."""
    async with contextlib.aclosing(outputs):
        try:
            for event in response.opening(totals):
                yield _event(event)
            choice, output = first
            while True:
                delta = parsed.delta(choice, output)
                totals.add(delta)
                for event in response.events(delta, totals):
                    yield _event(event)
                choice, output = await anext(outputs)
        except StopAsyncIteration:
            for event in response.closing(totals):
                yield _event(event)
        except PenstockError as error:
            for event in response.failure(error):
                yield _event(event)
        except Exception as error:
            log.exception("a stream failed")
            for event in response.failure(internal_error(error)):
                yield _event(event)


async def with_heartbeats(
    events: AsyncGenerator[bytes, None], heartbeat: ServerEvent, interval_s: float = HEARTBEAT_S
) -> AsyncGenerator[bytes, None]:
    """Yields the events, and a heartbeat for every interval without one, so that nobody takes the stream for dead."""
    waiting: asyncio.Task[bytes] | None = None
    try:
        while True:
            waiting = waiting or asyncio.create_task(_next(events))
            await asyncio.wait([waiting], timeout=interval_s)
            if not waiting.done():
                yield _event(heartbeat)
                continue
            arrived, waiting = waiting, None
            try:
                event = arrived.result()
            except StopAsyncIteration:
                return
            yield event
    finally:
        if waiting is not None:
            waiting.cancel()
            await asyncio.wait([waiting])
        await events.aclose()


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


def _event(event: ServerEvent) -> bytes:
    head = f"event: {event.name}\ndata: " if event.name else "data: "
    data = event.data
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return f"{head}{text}\n\n".encode()


def internal_error(error: Exception) -> InternalError:
    return InternalError(f"internal error: {type(error).__name__}")


async def until_disconnect(receive: Receive, work: Awaitable[ResultT]) -> ResultT:
    """Returns the work's result. Cancels it and raises Cancelled if the client disconnects first.

    Call it once the body has been read.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled("the client has gone")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait([working, leaving])


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A streamed body that is cancelled as soon as the client disconnects, whatever it waits for then.

    Its watch aborts the connection of a client that does not read, which is a disconnect too.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], watch: ReaderWatch, headers: Mapping[str, str]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache", **headers})
        del self.headers["content-length"]
        self._events = events
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(Cancelled), contextlib.closing(self._watch):
            await until_disconnect(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        head: Message = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        async with contextlib.aclosing(self._events) as events:
            await send(head)
            async for event in events:
                with self._watch:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
