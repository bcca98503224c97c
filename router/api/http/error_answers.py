"""Answers errors over HTTP in the format of the path's dialect, which is OpenAI's unless another is given."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from penstock.errors import (
    DeadlineExceeded,
    InternalError,
    ModelNotFound,
    PenstockError,
    Unauthenticated,
    Unavailable,
)
from router.api.dialect import ErrorShape, Json
from router.api.http.streams import internal_error
from router.api.limits import UnreadRequest
from router.api.openai.responses import error_json
from router.metrics.metrics import RouterMetrics

_NO_ADAPTER_CALL = "such call: POST /v1/{}load_lora_adapter needs adapters_file, the file that it changes"
_NO_RENDERING = "such call; POST /tokenize shows the tokens of a prompt"
# Calls that Penstock lacks: those of OpenAI's and Anthropic's APIs and of other servers, by their path's prefix. The
# first match applies.
_UNSERVED = {
    "/v1/audio": "speech and transcription",
    "/v1/images": "image generation",
    "/v1/videos": "video generation",
    "/v1/embeddings": "embeddings",
    "/v2/embed": "embeddings",
    "/v1/moderations": "moderation",
    "/v1/rerank": "reranking",
    "/v2/rerank": "reranking",
    "/rerank": "reranking",
    "/v1/score": "scoring",
    "/score": "scoring",
    "/generative_scoring": "scoring",
    "/v1/decisions": "decisions",
    "/v1/systemone": "decisions",
    "/pooling": "pooling",
    "/encode": "pooling",
    "/classify": "classification",
    "/v1/classify": "classification",
    "/v1/realtime": "realtime sessions",
    "/v1/live": "realtime sessions",
    "/v1/files": "such call for files; POST /v1/files needs router.batches.folder",
    "/v1/uploads": "uploads in parts; POST /v1/files takes whole files",
    "/v1/batches": "such call for batches; POST /v1/batches needs router.batches.folder",
    "/v1/messages/batches": "batches of messages; POST /v1/batches takes OpenAI's calls",
    "/v1/vector_stores": "vector stores",
    "/v1/memory_stores": "memory stores",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/evals": "evaluations",
    "/v1/content_provenance_checks": "provenance checks",
    "/v1/safety": "safety cases",
    "/v1/compliance": "compliance reviews",
    "/v1/assistants": "assistants",
    "/v1/threads": "assistants",
    "/v1/chatkit": "ChatKit",
    "/v1/agents": "hosted agents",
    "/v1/sessions": "hosted agents",
    "/v1/environments": "hosted agents",
    "/v1/deployments": "hosted agents",
    "/v1/deployment_runs": "hosted agents",
    "/v1/dreams": "hosted agents",
    "/v1/tunnels": "hosted agents",
    "/v1/skills": "skills",
    "/v1/vaults": "vaults",
    "/v1/conversations": "stored conversations",
    "/v1/containers": "containers",
    "/v1/webhook_endpoints": "webhooks",
    "/v1/webhook_event_types": "webhooks",
    "/v1/organization": "administration of organizations",
    "/v1/organizations": "administration of organizations",
    "/v1/projects": "administration of organizations",
    "/v1/user_profiles": "user profiles",
    "/v1/complete": "such call; POST /v1/messages takes messages, and POST /v1/completions a text",
    "/v1/responses/compact": "compaction of conversations",
    "/v1/responses/input_tokens": "such call; POST /tokenize counts the tokens of a prompt",
    "/v1/responses/render": _NO_RENDERING,
    "/v1/messages/render": _NO_RENDERING,
    "/v1/completions/render": _NO_RENDERING,
    "/v1/completions/derender": _NO_RENDERING,
    "/v1/chat/completions/render": _NO_RENDERING,
    "/v1/chat/completions/derender": _NO_RENDERING,
    "/v1/chat/completions": "stored chat completions, and no such call",
    "/tokenizer_info": _NO_RENDERING,
    "/v1/load_lora_adapter": _NO_ADAPTER_CALL.format(""),
    "/v1/unload_lora_adapter": _NO_ADAPTER_CALL.format("un"),
    "/load_lora_adapter": _NO_ADAPTER_CALL.format(""),
    "/unload_lora_adapter": _NO_ADAPTER_CALL.format("un"),
    "/invocations": "SageMaker calls",
    "/cohere": "Cohere calls",
    "/api": "Ollama calls",
    "/generate": "such call; POST /v1/completions takes text and token ids",
    "/inference/v1/generate": "such call; POST /v1/completions takes token ids",
}


def unserved(path: str) -> str | None:
    """Returns what a path serves at OpenAI, Anthropic or another server but not here; None for any other path."""
    for start, what in _UNSERVED.items():
        if path == start or path.startswith(f"{start}/"):
            return what
    return None


def openai_error(error: PenstockError) -> tuple[int, Json]:
    """Returns an error's status and body in the format of OpenAI's API."""
    return error.http_status, error_json(error)


def shape_for(path: str, shapes: Mapping[str, ErrorShape]) -> ErrorShape:
    """Returns the error format of a path: that of its prefix in `shapes`, or else OpenAI's."""
    return next((shape for prefix, shape in shapes.items() if path.startswith(prefix)), openai_error)


def error_headers(error: PenstockError) -> dict[str, str]:
    """Returns the headers that say how to authenticate or when to try again."""
    headers = {}
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, Unavailable | DeadlineExceeded) and error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    return headers


class ErrorAnswers:
    """Handles an app's exceptions by answering with an error, which it counts."""

    def __init__(self, shapes: Mapping[str, ErrorShape], metrics: RouterMetrics) -> None:
        """`shapes` are the error formats of other dialects, by the prefix of their paths."""
        self._shapes = shapes
        self._metrics = metrics

    def add_to(self, app: FastAPI) -> None:
        app.add_exception_handler(PenstockError, self._on_penstock_error)
        app.add_exception_handler(HTTPException, self._on_http_exception)
        app.add_exception_handler(Exception, self._on_internal_error)

    def _shape(self, http: Request) -> ErrorShape:
        return shape_for(http.url.path, self._shapes)

    async def _on_penstock_error(self, http: Request, error: Exception) -> Response:
        assert isinstance(error, PenstockError)
        self._metrics.answered_error(error.reason)
        headers = error_headers(error)
        if isinstance(error, UnreadRequest) and error.http_status == 408:
            headers["connection"] = "close"  # safe for a silent client; one that still sends would see a reset
        status, body = self._shape(http)(error)
        return JSONResponse(body, status, headers)

    async def _on_http_exception(self, http: Request, error: Exception) -> Response:
        """Answers a request with an unknown path or method."""
        assert isinstance(error, HTTPException)
        self._metrics.answered_error("NO_SUCH_CALL")
        what = unserved(http.url.path) if error.status_code in (404, 405) else None
        detail = error.detail if what is None else f"Penstock has no {what}"
        problem = ModelNotFound(f"{http.method} {http.url.path[:200]}: {detail}; GET /openapi.json lists all calls")
        _, body = self._shape(http)(problem)
        if "param" in body["error"]:
            code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
            body["error"].update(param=None, code=code if what is None else "not_supported")
        return JSONResponse(body, error.status_code, error.headers)

    async def _on_internal_error(self, http: Request, error: Exception) -> Response:
        self._metrics.answered_error(InternalError.reason)
        status, body = self._shape(http)(internal_error(error))
        return JSONResponse(body, status)
