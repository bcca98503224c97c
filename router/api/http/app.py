"""The OpenAI-compatible HTTP API: routes, request bodies and errors. Thin over `router.dispatch`, on its event loop.

`streams` sends responses; `router.api.openai` holds the formats.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from penstock.config.security import LimitsConfig
from penstock.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidInput,
    ModelNotFound,
    PenstockError,
    Unauthenticated,
    Unavailable,
)
from penstock.rpc.hints import read_hints
from penstock.v1 import inference_pb2
from router.api.http.connections import ABORT, SUBJECTS
from router.api.http.request_ids import RequestIdMiddleware, name_request
from router.api.http.streams import (
    EventStream,
    StreamedUsage,
    collect_response,
    event_bytes,
    granted_header,
    internal_error,
    merged_outputs,
    until_disconnect,
)
from router.api.identity import Tenant
from router.api.limits import UnreadRequest, check_body, check_completions, check_headers
from router.api.openai.json_bodies import SMALL_BODY_BYTES
from router.api.openai.requests import BodyT, ChatBody, CompletionBody, parse_body, read_lane, read_timeout_s
from router.api.openai.responses import ChatResponse, CompletionResponse, Json, OpenAiResponse, error_json
from router.api.prepare import RequestPreparer
from router.api.reader_watch import ReaderWatch
from router.dispatch.dispatcher import Dispatcher
from router.fair_threads import FairThreads
from router.fleet.worker_fleet import WorkerFleet
from router.metrics.metrics import RouterMetrics


def make_app(
    preparer: RequestPreparer,
    dispatcher: Dispatcher,
    fleet: WorkerFleet,
    metrics: RouterMetrics,
    threads: FairThreads,
    metrics_token: Callable[[], str] = lambda: "",
) -> FastAPI:
    """`threads` parse large bodies. With a `metrics_token` that is not "", /metrics demands it. With tenants and no
    token, nobody can read the metrics."""
    app = make_operations_app(preparer, metrics, metrics_token)
    _add_generation(app, _GenerationCalls(preparer, dispatcher, metrics, threads), preparer)
    _add_models(app, preparer, fleet)
    return app


def make_operations_app(
    preparer: RequestPreparer, metrics: RouterMetrics, metrics_token: Callable[[], str] = lambda: ""
) -> FastAPI:
    """Returns an app that says how this router is, and serves no model: for a port that only operators reach."""
    app = FastAPI(title="Penstock", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    @app.get("/health/ready")
    async def health() -> Response:
        ready = preparer.ready
        reason = "leaving" if preparer.leaving else "no decode worker"
        return JSONResponse({"status": "ready" if ready else reason}, 200 if ready else 503)

    @app.get("/health/live")
    async def live() -> Response:
        """Reports that the process answers, whether or not a request would be served: no reason to restart it."""
        return JSONResponse({"status": "live"})

    @app.get("/metrics")
    async def scrape(http: Request) -> Response:
        preparer.tenants.check_scraper(http.headers.get("authorization"), metrics_token())
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    app.add_middleware(RequestIdMiddleware)
    app.add_exception_handler(PenstockError, _on_penstock_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_internal_error)
    return app


_RETRY_AFTER_S = 1.0


class _BodyReader:
    """Reads bodies, and bounds how many bytes of them are held at once until they are parsed."""

    def __init__(self, limits: LimitsConfig, metrics: RouterMetrics) -> None:
        self._limits = limits
        self._metrics = metrics
        self._num_held = 0

    async def read(self, http: Request, held: contextlib.ExitStack) -> bytes:
        """Returns the body, whose bytes count until `held` closes.

        Raises UnreadRequest as soon as it is too large or late, Unavailable if there are too many bytes of bodies
        already, Cancelled if the client disconnects.
        """
        limits = self._limits
        declared = http.headers.get("content-length", "")
        check_body(int(declared) if declared.isdecimal() else 0, limits)
        parts: list[bytes] = []
        num_bytes = 0
        held.callback(self._give_back, parts)
        try:
            async with asyncio.timeout(limits.body_timeout_s):
                async for part in http.stream():
                    num_bytes += len(part)
                    check_body(num_bytes, limits)
                    self._take(part)
                    parts.append(part)
        except TimeoutError as error:
            self._metrics.limited("body_timeout_s")
            problem = f"did not arrive within {limits.body_timeout_s:g} s; send it faster, or less of it"
            raise UnreadRequest("body", problem, 408) from error
        except ClientDisconnect as error:
            raise Cancelled("the client has gone") from error
        parts[:] = [b"".join(parts)]
        return parts[0]

    def _take(self, part: bytes) -> None:
        limit = self._limits.bodies_bytes
        if self._num_held + len(part) > limit:
            self._metrics.limited("bodies_bytes")
            problem = (
                f"this router holds {self._num_held} bytes of bodies, and limits.bodies_bytes = {limit}; try again"
            )
            raise Unavailable(problem, _RETRY_AFTER_S)
        self._num_held += len(part)

    def _give_back(self, parts: list[bytes]) -> None:
        self._num_held -= sum(map(len, parts))
        parts.clear()


class _GenerationCalls:
    """Answers the calls that generate, from the body's bytes to the response."""

    def __init__(
        self, preparer: RequestPreparer, dispatcher: Dispatcher, metrics: RouterMetrics, threads: FairThreads
    ) -> None:
        """`threads` parse large bodies, so that the event loop serves others between the steps."""
        self._preparer = preparer
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._threads = threads
        self._bodies = _BodyReader(preparer.limits, metrics)

    async def answer(
        self, http: Request, kind: type[BodyT], make_response: Callable[[BodyT], OpenAiResponse]
    ) -> Response:
        """Nothing goes on for a client that disconnects, in whatever queue its call waits."""
        tenant = _identify(http, self._preparer)
        with contextlib.ExitStack() as held:
            raw = await self._bodies.read(http, held)
            work = self._answer(http, raw, held, kind, make_response, tenant)
            del raw
            return await until_disconnect(http.receive, work)

    async def _answer(
        self,
        http: Request,
        raw: bytes,
        held: contextlib.ExitStack,
        kind: type[BodyT],
        make_response: Callable[[BodyT], OpenAiResponse],
        tenant: Tenant,
    ) -> Response:
        """Returns a stream only with its first token, so that errors before it are plain HTTP errors."""
        preparer, accepted_s = self._preparer, time.monotonic()
        timeout_s = read_timeout_s(http.headers)
        async with preparer.until(preparer.deadline_s(timeout_s)):
            body, response, wanted = await self._parse(kind, raw, make_response, tenant)
        del raw
        held.close()
        name_request(http.scope, body.request_id or body.rid or "")
        hints = read_hints(http.headers, body.session)
        lane = read_lane(http.headers, body.service_tier)
        requests = []
        check_completions(wanted, preparer.limits)
        for wire in wanted:
            wire.lane = lane
            prepared = preparer.prepare(wire, tenant, timeout_s, body.default_max_tokens, hints, accepted_s)
            try:
                requests.append(await prepared)
            except InvalidInput as error:
                raise body.renamed(error) from error
        outputs = merged_outputs(self._dispatcher, requests)
        if not body.stream:
            async with contextlib.aclosing(outputs):
                whole, headers = await collect_response(outputs, response)
                return JSONResponse(whole, headers=headers)
        try:
            first = await anext(outputs)
        except BaseException:
            await outputs.aclose()
            raise
        cut = http.scope.get(ABORT, lambda: None)
        watch = ReaderWatch(requests[0].request_id, requests[0].deadline_s, preparer.limits, self._metrics, cut)
        prompt_tokens = [len(request.token_ids) for request in requests]
        usage = StreamedUsage(prompt_tokens, body.includes_usage, body.continuous_usage)
        return EventStream(event_bytes(first, outputs, response, usage), watch, granted_header(first[1]))

    async def _parse(
        self, kind: type[BodyT], raw: bytes, make_response: Callable[[BodyT], OpenAiResponse], tenant: Tenant
    ) -> tuple[BodyT, OpenAiResponse, list[inference_pb2.GenerateRequest]]:
        """Returns the body, the response to it, and its requests.

        Raises InvalidInput that names the field, or Overloaded.
        """
        is_small = len(raw) <= SMALL_BODY_BYTES
        limits = self._preparer.limits
        if not is_small:
            limits = self._preparer.limits_within(limits.completions)

        def parse() -> tuple[BodyT, OpenAiResponse, list[inference_pb2.GenerateRequest]]:
            body = parse_body(kind, raw, limits)
            response = make_response(body)
            return body, response, body.requests(response.id)

        return parse() if is_small else await self._threads.run(tenant.name, len(raw), parse)


def _add_generation(app: FastAPI, calls: _GenerationCalls, preparer: RequestPreparer) -> None:
    name, tokenizer = preparer.card.name, preparer.tokenizer

    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        return await calls.answer(
            http,
            CompletionBody,
            lambda body: CompletionResponse("cmpl", name, tokenizer, body.logprobs is not None),
        )

    @app.post("/v1/chat/completions")
    async def chat(http: Request) -> Response:
        return await calls.answer(
            http, ChatBody, lambda body: ChatResponse("chatcmpl", name, tokenizer, bool(body.logprobs))
        )


def _add_models(app: FastAPI, preparer: RequestPreparer, fleet: WorkerFleet) -> None:
    started_s = int(time.time())

    def model_json() -> Json:
        group = fleet.group()
        length = group.context_length if group else None
        name = preparer.card.name
        return {"id": name, "object": "model", "created": started_s, "owned_by": "penstock", "max_model_len": length}

    @app.get("/v1/models")
    async def models(http: Request) -> Json:
        _identify(http, preparer)
        return {"object": "list", "data": [model_json()]}

    @app.get("/v1/models/{name:path}")
    async def model(http: Request, name: str) -> Json:
        _identify(http, preparer)
        preparer.check_model(name)
        return model_json()


def _identify(http: Request, preparer: RequestPreparer) -> Tenant:
    """Raises UnreadRequest, Unauthenticated or PermissionDenied."""
    check_headers(http.headers.raw, preparer.limits)
    return preparer.tenants.identify(http.headers.get("authorization"), http.scope.get(SUBJECTS, ()))


async def _on_penstock_error(http: Request, error: Exception) -> Response:
    assert isinstance(error, PenstockError)
    headers = {}
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, UnreadRequest) and error.http_status == 408:
        headers["connection"] = "close"  # the client is silent; a client that still sends would see a reset
    if isinstance(error, Unavailable | DeadlineExceeded) and error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    return JSONResponse(error_json(error), error.http_status, headers)


async def _on_http_exception(http: Request, error: Exception) -> Response:
    """Reports an unknown path or method in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    problem = ModelNotFound(f"{http.method} {http.url.path}: {error.detail}")
    body = error_json(problem)
    body["error"].update(param=None, code="not_found" if error.status_code == 404 else None)
    return JSONResponse(body, error.status_code, error.headers)


async def _on_internal_error(http: Request, error: Exception) -> Response:
    return JSONResponse(error_json(internal_error(error)), 500)
