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

from penstock.completions import Output
from penstock.errors import Cancelled, InternalError, PenstockError
from penstock.v1 import common_pb2
from router.api.openai.responses import Json, OpenAiResponse, error_json, usage_json
from router.api.reader_watch import ReaderWatch
from router.dispatch.dispatcher import Dispatcher
from router.prepared_request import PreparedRequest

log = logging.getLogger(__name__)

GRANTED_TOKENS = "x-penstock-max-tokens"  # response header: the max_tokens that overload has allowed

ResultT = TypeVar("ResultT")
Outputs = AsyncGenerator[tuple[int, Output], None]  # index of the choice, and its new output


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


async def collect_response(outputs: Outputs, response: OpenAiResponse) -> tuple[Json, dict[str, str]]:
    """Returns the whole response and its headers."""
    usages, decisions, headers = [], [], {}
    async for choice, output in outputs:
        response.add(choice, output)
        headers.update(granted_header(output))
        if output.usage is not None:
            usages.append(output.usage)
        if output.decision is not None:
            decisions.append(output.decision)
    whole = response.whole(usage_json(usages))
    return whole | ({"penstock": {"decisions": decisions}} if decisions else {}), headers


def granted_header(output: Output) -> dict[str, str]:
    """Returns the header that reports a shortened `max_tokens`, if overload has shortened it."""
    return {} if output.granted_tokens is None else {GRANTED_TOKENS: str(output.granted_tokens)}


class StreamedUsage:
    """Counts what a stream has used: for each chunk (`continuous`), and for the last one (`in_last_chunk`)."""

    def __init__(self, prompt_tokens: Sequence[int], in_last_chunk: bool, continuous: bool) -> None:
        self.in_last_chunk = in_last_chunk
        self._continuous = continuous
        self._prompt_tokens = sum(prompt_tokens)
        self._completion_tokens = 0
        self._final: list[common_pb2.Usage] = []

    def add(self, output: Output) -> None:
        self._completion_tokens += len(output.token_ids)
        if output.usage is not None:
            self._final.append(output.usage)

    def of_chunk(self) -> Json:
        """Returns the fields that every chunk has. How much of the prompt was cached is known at the end only."""
        if not self._continuous:
            return {}
        so_far = common_pb2.Usage(prompt_tokens=self._prompt_tokens, completion_tokens=self._completion_tokens)
        return {"usage": usage_json([so_far])}

    def whole(self) -> Json:
        return usage_json(self._final)


async def event_bytes(
    first: tuple[int, Output], outputs: Outputs, response: OpenAiResponse, usage: StreamedUsage
) -> AsyncGenerator[bytes, None]:
    """Yields server-sent events, `[DONE]` last; after a failure an `error` event and no `[DONE]`."""
    decisions: list[Json] = []
    async with contextlib.aclosing(outputs):
        try:
            choice, output = first
            while True:
                usage.add(output)
                for chunk in response.chunks(choice, output):
                    yield _event(chunk | usage.of_chunk())
                if output.decision is not None:
                    decisions.append(output.decision)
                choice, output = await anext(outputs)
        except StopAsyncIteration:
            if usage.in_last_chunk:
                yield _event(response.last_chunk(usage=usage.whole()))
            if decisions:
                yield _event(response.last_chunk(penstock={"decisions": decisions}))
            yield b"data: [DONE]\n\n"
        except PenstockError as error:
            yield b"event: error\n" + _event(error_json(error))
        except Exception as error:
            log.exception("a stream failed")
            yield b"event: error\n" + _event(error_json(internal_error(error)))


def _event(data: Json) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


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
