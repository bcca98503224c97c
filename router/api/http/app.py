"""The routes of the HTTP API. `generation` answers the calls that generate, `router.api.openai` holds the formats."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from penstock.config.router import StoreConfig
from penstock.config.security import LimitsConfig
from router.api.dialect import Dialect, ErrorShape, Json
from router.api.http import message_routes, response_routes
from router.api.http.error_answers import ErrorAnswers
from router.api.http.generation import GenerationCalls, identify
from router.api.http.request_ids import RequestIdMiddleware
from router.api.http.tokenization import add_tokenization
from router.api.openai.requests import ChatBody, CompletionBody, parse_body
from router.api.openai.responses import ChatResponse, CompletionResponse
from router.api.prepare import RequestPreparer
from router.api.translation.anthropic.errors import anthropic_error
from router.api.translation.responses.errors import responses_error
from router.api.translation.responses.store import ResponseStore
from router.dispatch.dispatcher import Dispatcher
from router.fair_threads import FairThreads
from router.metrics.metrics import RouterMetrics

# The shapes of errors other than OpenAI's, by the beginning of the paths that have them.
SHAPES: Mapping[str, ErrorShape] = {
    message_routes.PATH: anthropic_error,
    response_routes.PATH: responses_error,
}


def make_app(
    preparer: RequestPreparer,
    dispatcher: Dispatcher,
    metrics: RouterMetrics,
    threads: FairThreads,
    metrics_token: Callable[[], str] = lambda: "",
    store: StoreConfig | None = None,
) -> FastAPI:
    """`threads` parse large bodies. With a `metrics_token` that is not "", /metrics demands it. With tenants and no
    token, nobody can read the metrics."""
    app = make_operations_app(preparer, metrics, metrics_token)
    calls = GenerationCalls(preparer, dispatcher, metrics, threads)
    _add_generation(app, calls, preparer)
    add_tokenization(app, calls, preparer)
    message_routes.add_messages(app, calls, preparer)
    response_routes.add_responses(app, calls, preparer, ResponseStore(store or StoreConfig(), time.monotonic))
    _add_models(app, preparer)
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
    ErrorAnswers(SHAPES).add_to(app)
    return app


def _add_generation(app: FastAPI, calls: GenerationCalls, preparer: RequestPreparer) -> None:
    name, tokenizer = preparer.card.name, preparer.tokenizer

    def read_completion(raw: bytes, limits: LimitsConfig, tenant: str) -> CompletionBody:
        return parse_body(CompletionBody, raw, limits)

    def read_chat(raw: bytes, limits: LimitsConfig, tenant: str) -> ChatBody:
        return parse_body(ChatBody, raw, limits)

    completion = Dialect(read_completion, lambda body: CompletionResponse(body, name, tokenizer))
    chat = Dialect(read_chat, lambda body: ChatResponse(body, name, tokenizer))

    @app.post("/v1/completions")
    async def completions(http: Request) -> Response:
        return await calls.answer(http, completion)

    @app.post("/v1/chat/completions")
    async def chat_completions(http: Request) -> Response:
        return await calls.answer(http, chat)


def _add_models(app: FastAPI, preparer: RequestPreparer) -> None:
    started_s = int(time.time())

    def model_json() -> Json:
        name, length = preparer.card.name, preparer.context_length
        return {"id": name, "object": "model", "created": started_s, "owned_by": "penstock", "max_model_len": length}

    @app.get("/v1/models")
    async def models(http: Request) -> Json:
        identify(http, preparer)
        return {"object": "list", "data": [model_json()]}

    @app.get("/v1/models/{name:path}")
    async def model(http: Request, name: str) -> Json:
        identify(http, preparer)
        preparer.check_model(name)
        return model_json()
