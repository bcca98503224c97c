"""Answers the generating calls of every HTTP dialect, from the body's bytes to the response.

A route calls `GenerationCalls.answer` with its `Dialect`. This module is a thin layer over `router.dispatch`, on the
same event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from fastapi import Request
from starlette.responses import JSONResponse, Response

from penstock.config.limits import LimitsConfig
from penstock.errors import InvalidInput
from penstock.rpc.hints import read_hints
from penstock.text.grammars import FIELD as GRAMMAR_FIELD
from penstock.types import Lane
from penstock.v1 import inference_pb2
from penstock.wire import lane_to_wire
from router.api.dialect import BodyT, CallResponse, CallTotals, Dialect, DialectBody
from router.api.http.bodies import BodyReader
from router.api.http.connections import ABORT, SUBJECTS
from router.api.http.request_ids import name_request, request_name
from router.api.http.running_calls import RunningCalls
from router.api.http.streams import (
    HEARTBEAT_S,
    EventStream,
    Outputs,
    StartedOutputs,
    collect_outputs,
    event_bytes,
    granted_header,
    merged_outputs,
    until_disconnect,
)
from router.api.identity import Tenant, read_authorization
from router.api.limits import check_completions, check_headers
from router.api.openai.json_bodies import SMALL_BODY_BYTES
from router.api.openai.requests import TIMEOUT, read_lane, read_timeout_s
from router.api.parsed_outputs import OutputParsing, ParsedOutputs
from router.api.prepare import RequestPreparer
from router.api.reader_watch import ReaderWatch
from router.dispatch.dispatcher import Dispatcher
from router.metrics.metrics import RouterMetrics
from router.prepared_request import PreparedRequest
from router.text.fair_threads import FairThreads

_INLINE_TOKENS = 64  # up to this many tokens, even with 20 alternatives each, take a few milliseconds to write


ResultT = TypeVar("ResultT")


class GenerationCalls:
    """Answers generating calls. All routes that generate share one instance."""

    def __init__(
        self, preparer: RequestPreparer, dispatcher: Dispatcher, metrics: RouterMetrics, threads: FairThreads
    ) -> None:
        """`threads` parse large bodies, so that the event loop keeps serving other calls meanwhile."""
        self._preparer = preparer
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._threads = threads
        self._bodies = BodyReader(preparer.limits, metrics)

    async def answer(self, http: Request, dialect: Dialect[BodyT], running: RunningCalls | None = None) -> Response:
        """Answers a call. If the client disconnects, the call ends, even while it waits in a queue.

        `running` lets other calls cancel this one by its response's id.
        """

        def work(raw: bytes, held: contextlib.ExitStack, tenant: Tenant) -> Awaitable[Response]:
            return self._answer(http, raw, held, dialect, tenant, running)

        return await self.with_body(http, work)

    async def answer_offline(
        self, tenant: Tenant, path: str, raw: bytes, dialect: Dialect[BodyT], request_id: str
    ) -> Response:
        """Answers a call that no client waits for, in the bulk lane and with the longest allowed timeout."""
        headers = [(TIMEOUT.encode(), str(self._preparer.max_timeout_s).encode())]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        name_request(scope, request_id)
        with contextlib.ExitStack() as held:
            return await self._answer(Request(scope), raw, held, dialect, tenant, None, Lane.BULK)

    async def with_body(
        self, http: Request, work: Callable[[bytes, contextlib.ExitStack, Tenant], Awaitable[Response]]
    ) -> Response:
        """Reads the body, passes it and its tenant to `work`, and returns the response of `work`.

        The body's bytes count as held until `work` closes the stack. Raises Unauthenticated, PermissionDenied,
        UnreadRequest, Unavailable if too many bodies are held, and Cancelled if the client disconnects first.
        """
        tenant = identify(http, self._preparer)
        with contextlib.ExitStack() as held:
            raw = await self._bodies.read(http, held)
            working = work(raw, held, tenant)
            del raw
            return await until_disconnect(http.receive, working)

    async def _answer(
        self,
        http: Request,
        raw: bytes,
        held: contextlib.ExitStack,
        dialect: Dialect[BodyT],
        tenant: Tenant,
        running: RunningCalls | None,
        lane: Lane | None = None,
    ) -> Response:
        """Answers a call whose body has been read. `lane` overrides the lane that the call asks for.

        A streamed response begins with its first token, so that earlier errors are plain HTTP errors. If the first
        token takes longer than `HEARTBEAT_S`, the stream begins without it and sends heartbeats: proxies and clients
        close a connection on which nothing arrives.
        """
        preparer, accepted_s = self._preparer, time.monotonic()
        async with preparer.until(preparer.deadline_s(read_timeout_s(http.headers))):
            read = functools.partial(self._read, dialect, raw, tenant)
            body, response, parsing, wire_requests = await self.parse(raw, tenant, read, off_loop=dialect.reads_more)
        del raw, read
        held.close()
        name_request(http.scope, body.caller_id)
        requests = await self._prepare(http, body, tenant, wire_requests, parsing, accepted_s, lane)
        response.begin(requests)
        totals = CallTotals(sum(len(request.token_ids) for request in requests))
        parsed = ParsedOutputs(parsing, [request.token_ids for request in requests], requests[0].sampling.n)
        outputs = merged_outputs(self._dispatcher, requests)
        if running is not None:
            outputs = running.guarded((tenant.name, response.id), outputs)
        if not body.streams:
            return await _collect(outputs, parsed, response, totals)
        started, headers = await self._start(outputs)
        cut = http.scope.get(ABORT, lambda: None)
        watch = ReaderWatch(requests[0].request_id, requests[0].deadline_s, preparer.limits, self._metrics, cut)
        events = event_bytes(started, parsed, response, totals)
        return EventStream(events, started, watch, headers, dialect.heartbeat, HEARTBEAT_S)

    async def _start(self, outputs: Outputs) -> tuple[StartedOutputs, dict[str, str]]:
        """Waits for the first output for at most `HEARTBEAT_S`. Returns the outputs and the headers of the response."""
        started, headers = StartedOutputs(outputs), dict[str, str]()
        try:
            if (first := await started.wait(HEARTBEAT_S)) is not None:
                headers = granted_header(first)
        except BaseException:
            await started.aclose()
            raise
        return started, headers

    async def _prepare(
        self,
        http: Request,
        body: DialectBody,
        tenant: Tenant,
        wire_requests: list[inference_pb2.GenerateRequest],
        parsing: OutputParsing,
        accepted_s: float,
        lane: Lane | None,
    ) -> list[PreparedRequest]:
        """Returns the call's prepared requests. Raises what `RequestPreparer.prepare` raises."""
        preparer, timeout_s = self._preparer, read_timeout_s(http.headers)
        hints = read_hints(http.headers, body.session, request_name(http.scope))
        wire_lane = read_lane(http.headers, body.lane) if lane is None else lane_to_wire(lane)
        sampled = preparer.begin_trace(http.headers)
        check_completions(wire_requests, preparer.limits)
        requests = []
        for wire in wire_requests:
            wire.lane = wire_lane
            preparing = preparer.prepare(
                wire, tenant, timeout_s, body.default_max_tokens, hints, accepted_s, parsing.complete_sampling, sampled
            )
            try:
                requests.append(await preparing)
                await asyncio.sleep(0)  # a call may have many prompts: let others run in between
            except InvalidInput as error:
                if error.field != GRAMMAR_FIELD:
                    raise
                raise InvalidInput(body.grammar_field, error.problem) from error
        return requests

    async def parse(
        self, raw: bytes, tenant: Tenant, read: Callable[[LimitsConfig], ResultT], *, off_loop: bool = False
    ) -> ResultT:
        """Returns the result of `read`, called with the limits. Runs it on a thread if the body is large or `off_loop`.

        Raises InvalidInput that names the field, or Overloaded.
        """
        limits = self._preparer.limits
        if len(raw) <= SMALL_BODY_BYTES and not off_loop:
            return read(limits)
        limits = self._preparer.limits_within(limits.completions)
        return await self._threads.run(tenant.name, len(raw), read, limits)

    def _read(
        self, dialect: Dialect[BodyT], raw: bytes, tenant: Tenant, limits: LimitsConfig
    ) -> tuple[BodyT, CallResponse, OutputParsing, list[inference_pb2.GenerateRequest]]:
        """Returns the body, its response, the parsing of its outputs, and its requests. Raises InvalidInput."""
        body = dialect.read(raw, limits, tenant.name)
        response = dialect.respond(body)
        return body, response, self._preparer.parsing(body.output_format), body.requests(response.id)


async def _collect(outputs: Outputs, parsed: ParsedOutputs, response: CallResponse, totals: CallTotals) -> Response:
    """Waits for all outputs and returns the whole response."""
    async with contextlib.aclosing(outputs):
        headers = await collect_outputs(outputs, parsed, response, totals)
        # Many tokens with their alternatives make an answer of megabytes, which is written off the event loop.
        write = functools.partial(_write_whole, response, totals, headers)
        return write() if totals.completion_tokens <= _INLINE_TOKENS else await asyncio.to_thread(write)


def _write_whole(response: CallResponse, totals: CallTotals, headers: Mapping[str, str]) -> Response:
    return JSONResponse(response.whole(totals), headers=headers)


def identify(http: Request, preparer: RequestPreparer) -> Tenant:
    """Returns the tenant of a call, by the API key in one of two headers or by the client's certificate.

    Raises UnreadRequest, Unauthenticated or PermissionDenied.
    """
    check_headers(http.headers.raw, preparer.limits)
    return preparer.tenants.identify(read_authorization(http.headers), http.scope.get(SUBJECTS, ()))
