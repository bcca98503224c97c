"""The OpenAI-compatible HTTP front: thin over `router.generation`, in the same event loop as the gRPC front."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from typing import TypeVar

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from penstock.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    ModelNotFound,
    PenstockError,
    Unauthenticated,
    Unavailable,
)
from penstock.hints import read_hints
from penstock.outputs import Output
from penstock.security_config import LimitsConfig
from penstock.v1 import common_pb2
from router import request as stages
from router.generation import Generator
from router.http_tls import SUBJECTS
from router.identity import Tenant
from router.limits import Unread, check_body, check_completions, check_headers
from router.membership import Fleet
from router.metrics import RouterMetrics
from router.openai_answers import Answer, ChatAnswer, CompletionAnswer, Json, error_json, usage_json
from router.openai_bodies import ChatBody, CompletionBody, parse
from router.openai_headers import GRANTED_TOKENS, read_lane, read_timeout_s

log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
Outputs = AsyncGenerator[tuple[int, Output], None]  # choice, and what is new of it


def make_app(generator: Generator, fleet: Fleet, metrics: RouterMetrics, metrics_token: str = "") -> FastAPI:
    """With a `metrics_token`, /metrics wants it. Where tenants are told apart and there is none, nobody reads them."""
    app = FastAPI(title="Penstock", docs_url=None, redoc_url=None, openapi_url=None)
    started_s = int(time.time())

    def caller(http: Request) -> Tenant:
        """Raises Unread, Unauthenticated or PermissionDenied."""
        check_headers(http.headers.raw, generator.limits)
        return generator.tenants.identify(http.headers.get("authorization"), http.scope.get(SUBJECTS, ()))

    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        tenant = caller(http)
        body = parse(CompletionBody, await _read_body(http, generator.limits))
        answer_id = f"cmpl-{uuid.uuid4().hex}"
        answer = CompletionAnswer(answer_id, generator.card.name, generator.tokenizer, body.logprobs is not None)
        return await _respond(http, body, answer, answer_id, generator, tenant)

    @app.post("/v1/chat/completions")
    async def chat(http: Request) -> Response:
        tenant = caller(http)
        body = parse(ChatBody, await _read_body(http, generator.limits))
        answer_id = f"chatcmpl-{uuid.uuid4().hex}"
        answer = ChatAnswer(answer_id, generator.card.name, generator.tokenizer, bool(body.logprobs))
        return await _respond(http, body, answer, answer_id, generator, tenant)

    def model_json() -> Json:
        group = fleet.group()
        length = group.context_length if group else None
        name = generator.card.name
        return {"id": name, "object": "model", "created": started_s, "owned_by": "penstock", "max_model_len": length}

    @app.get("/v1/models")
    async def models(http: Request) -> Json:
        caller(http)
        return {"object": "list", "data": [model_json()]}

    @app.get("/v1/models/{name:path}")
    async def model(http: Request, name: str) -> Json:
        caller(http)
        generator.check_model(name)
        return model_json()

    @app.get("/health")
    @app.get("/health/ready")
    async def health() -> Response:
        ready = generator.ready
        reason = "leaving" if generator.leaving else "no decode worker"
        return JSONResponse({"status": "ready" if ready else reason}, 200 if ready else 503)

    @app.get("/health/live")
    async def live() -> Response:
        """The process answers, whether or not a request would be served: no reason to restart it."""
        return JSONResponse({"status": "live"})

    @app.get("/metrics")
    async def scrape(http: Request) -> Response:
        generator.tenants.check_scraper(http.headers.get("authorization"), metrics_token)
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    app.add_exception_handler(PenstockError, _on_penstock_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_fault)
    return app


async def _read_body(http: Request, limits: LimitsConfig) -> bytes:
    """Raises Unread as soon as it is too large or late, Cancelled where the client goes."""
    declared = http.headers.get("content-length", "")
    check_body(int(declared) if declared.isdecimal() else 0, limits)
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for part in http.stream():
                num_bytes += len(part)
                check_body(num_bytes, limits)
                parts.append(part)
    except TimeoutError as error:
        problem = f"did not arrive within {limits.body_timeout_s:g} s; send it faster, or less of it"
        raise Unread("body", problem, 408) from error
    except ClientDisconnect as error:
        raise Cancelled("the client has gone") from error
    return b"".join(parts)


async def _respond(
    http: Request,
    body: CompletionBody | ChatBody,
    answer: Answer,
    answer_id: str,
    generator: Generator,
    tenant: Tenant,
) -> Response:
    """Errors before the first token are plain HTTP errors, also of a stream: its head is sent only then."""
    hints = read_hints(http.headers, body.user or "")
    lane, timeout_s = read_lane(http.headers, body.service_tier), read_timeout_s(http.headers)
    wanted, requests = body.requests(answer_id), []
    check_completions(wanted, generator.limits)
    for wire in wanted:
        wire.lane = lane
        requests.append(await generator.prepare(wire, tenant, timeout_s, body.default_max_tokens, hints))
    outputs = _merged(generator, requests)
    if not body.stream:
        async with contextlib.aclosing(outputs):
            whole, headers = await _until_disconnect(http, _whole(outputs, answer))
            return JSONResponse(whole, headers=headers)
    try:
        first = await _until_disconnect(http, anext(outputs))
    except BaseException:
        await outputs.aclose()
        raise
    return EventStream(_events(first, outputs, answer, body.includes_usage), _told(first[1]))


async def _whole(outputs: Outputs, answer: Answer) -> tuple[Json, dict[str, str]]:
    """The answer and its headers."""
    usages, decisions, headers = [], [], {}
    async for choice, output in outputs:
        answer.add(choice, output)
        headers.update(_told(output))
        if output.usage is not None:
            usages.append(output.usage)
        if output.decision is not None:
            decisions.append(output.decision)
    whole = answer.whole(usage_json(usages))
    return whole | ({"penstock": {"decisions": decisions}} if decisions else {}), headers


def _told(output: Output) -> dict[str, str]:
    """What the router did differently from what was asked."""
    return {} if output.granted_tokens is None else {GRANTED_TOKENS: str(output.granted_tokens)}


async def _events(
    first: tuple[int, Output], outputs: Outputs, answer: Answer, includes_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Server-sent events, `[DONE]` last; after a failure an `error` event and no `[DONE]`."""
    usages: list[common_pb2.Usage] = []
    decisions: list[Json] = []
    async with contextlib.aclosing(outputs):
        try:
            choice, output = first
            while True:
                for chunk in answer.chunks(choice, output):
                    yield _event(chunk)
                if output.usage is not None:
                    usages.append(output.usage)
                if output.decision is not None:
                    decisions.append(output.decision)
                choice, output = await anext(outputs)
        except StopAsyncIteration:
            if includes_usage:
                yield _event(answer.usage_chunk(usage_json(usages)))
            if decisions:
                yield _event(answer.decision_chunk(decisions))
            yield b"data: [DONE]\n\n"
        except PenstockError as error:
            yield b"event: error\n" + _event(error_json(error))
        except Exception as error:
            log.exception("a stream failed")
            yield b"event: error\n" + _event(error_json(_fault(error)))


def _event(data: Json) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _merged(generator: Generator, requests: Sequence[stages.Request]) -> Outputs:
    """Outputs of all of a call's prompts as they come; the first failure ends them all."""
    if len(requests) == 1:
        async with contextlib.aclosing(generator.outputs(requests[0])) as outputs:
            async for output in outputs:
                yield output.index, output
        return
    ready: asyncio.Queue[tuple[int, Output] | Exception | None] = asyncio.Queue()

    async def pump(rank: int, request: stages.Request) -> None:
        try:
            async with contextlib.aclosing(generator.outputs(request)) as outputs:
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


async def _until_disconnect(http: Request, work: Awaitable[ResultT]) -> ResultT:
    """The work's result; when the client goes first the work is cancelled. Call once the body has been read."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_disconnect(http.receive))
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
    """A streamed body that is broken off as soon as the client goes, whatever it waits for then."""

    def __init__(self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache", **headers})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(_disconnect(receive))
        try:
            await asyncio.wait([sending, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.wait([sending, leaving])
        if not sending.cancelled() and (error := sending.exception()) is not None:
            raise error

    async def _send(self, send: Send) -> None:
        head: Message = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        async with contextlib.aclosing(self._events) as events:
            await send(head)
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def _fault(error: Exception) -> InternalError:
    return InternalError(f"internal error: {type(error).__name__}")


async def _on_penstock_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, PenstockError)
    headers = {}
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, Unread) and error.http_status == 408:
        headers["connection"] = "close"  # it is silent; one that still sends would take that for a reset
    if isinstance(error, Unavailable | DeadlineExceeded) and error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    return JSONResponse(error_json(error), error.http_status, headers)


async def _on_http_exception(http: Request, error: Exception) -> Response:
    """No such path or method, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    problem = ModelNotFound(f"{http.method} {http.url.path}: {error.detail}")
    body = error_json(problem)
    body["error"].update(param=None, code="not_found" if error.status_code == 404 else None)
    return JSONResponse(body, error.status_code, error.headers)


async def _on_fault(http: Request, error: Exception) -> Response:
    return JSONResponse(error_json(_fault(error)), 500)
