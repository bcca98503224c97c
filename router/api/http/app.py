"""Builds the HTTP API's app. `generation` answers the generating calls; `router.api.openai` defines the formats."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from penstock.config.limits import LimitsConfig
from penstock.config.router import StoreConfig
from router.api.dialect import Dialect, ErrorShape
from router.api.http import message_routes, response_routes
from router.api.http.generation import GenerationCalls
from router.api.http.model_routes import add_adapter_changes, add_models
from router.api.http.offline.line_answers import LineAnswers
from router.api.http.offline.parts import OfflineParts
from router.api.http.openapi.document import described_call
from router.api.http.operations import make_operations_app
from router.api.http.request_ids import REQUEST_ID
from router.api.http.streams import GRANTED_TOKENS
from router.api.http.tokenization import add_tokenization
from router.api.openai.requests import ChatBody, CompletionBody, parse_body
from router.api.openai.responses import ChatResponse, CompletionResponse
from router.api.prepare import RequestPreparer
from router.api.translation.anthropic.errors import anthropic_error
from router.api.translation.responses.errors import responses_error
from router.api.translation.responses.store import ResponseStore
from router.batches.runner import BatchRunner
from router.dispatch.dispatcher import Dispatcher
from router.metrics.metrics import RouterMetrics
from router.text.fair_threads import FairThreads

# Error formats other than OpenAI's, by the prefix of the paths that use them.
SHAPES: Mapping[str, ErrorShape] = {
    message_routes.PATH: anthropic_error,
    response_routes.PATH: responses_error,
}


class ServedApp(NamedTuple):
    app: FastAPI
    batch_runner: BatchRunner | None  # the caller runs it on the app's event loop


def make_app(
    preparer: RequestPreparer,
    dispatcher: Dispatcher,
    metrics: RouterMetrics,
    threads: FairThreads,
    metrics_token: Callable[[], str] = lambda: "",
    cors_origins: Sequence[str] = (),
    store: StoreConfig | None = None,
    batches: OfflineParts | None = None,
) -> ServedApp:
    """Returns the app with all public routes. `threads` parse large bodies. Without `batches`, the app serves neither
    files nor batches.

    /metrics and /load require the `metrics_token` unless it is ""; if there are tenants and no token, nobody can read
    them. Web pages from the `cors_origins` may call the API; "*" allows any page.
    """
    app = make_operations_app(preparer, metrics, metrics_token, SHAPES)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, GRANTED_TOKENS, "retry-after"],
        )
    calls = GenerationCalls(preparer, dispatcher, metrics, threads)
    dialects = _add_generation(app, calls, preparer)
    add_tokenization(app, calls, preparer)
    message_routes.add_messages(app, calls, preparer)
    responses = ResponseStore(store or StoreConfig(), time.monotonic)
    dialects[response_routes.PATH] = response_routes.add_responses(app, calls, preparer, responses)
    runner = None
    if batches is not None:
        runner = batches.add_to(app, calls, preparer, LineAnswers(calls, preparer, dialects, SHAPES), [*dialects])
    add_models(app, preparer)
    if preparer.adapters.file is not None:
        add_adapter_changes(app, preparer, preparer.adapters.file, metrics)
    return ServedApp(app, runner)


def _add_generation(app: FastAPI, calls: GenerationCalls, preparer: RequestPreparer) -> dict[str, Dialect[Any]]:
    """Adds the routes of OpenAI's completions and chat completions. Returns their dialects by path."""
    name_of, tokenizer = preparer.answering_name, preparer.tokenizer

    def read_completion(raw: bytes, limits: LimitsConfig, tenant: str) -> CompletionBody:
        return parse_body(CompletionBody, raw, limits)

    def read_chat(raw: bytes, limits: LimitsConfig, tenant: str) -> ChatBody:
        return parse_body(ChatBody, raw, limits)

    completion = Dialect(read_completion, lambda body: CompletionResponse(body, name_of(body.model), tokenizer))
    chat = Dialect(read_chat, lambda body: ChatResponse(body, name_of(body.model), tokenizer))

    @app.post("/v1/completions", **described_call(CompletionBody))
    async def completions(http: Request) -> Response:
        """Continues a prompt in the format of OpenAI's completions; with `stream`, as an event stream."""
        return await calls.answer(http, completion)

    @app.post("/v1/chat/completions", **described_call(ChatBody))
    async def chat_completions(http: Request) -> Response:
        """Continues a conversation in the format of OpenAI's chat completions; with `stream`, as an event stream."""
        return await calls.answer(http, chat)

    return {"/v1/chat/completions": chat, "/v1/completions": completion}
