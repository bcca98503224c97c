"""Builds the OpenAPI document at /openapi.json and serves it together with the page at /docs that shows it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.responses import HTMLResponse, JSONResponse, Response

from router.api.http.openapi.page import render_page

OPENAPI = "/openapi.json"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_MEANINGS = {
    200: "Success",
    400: "A field is invalid; the message names it, its value and the fix",
    401: "No valid credentials",
    403: "The caller may not do this",
    404: "No such model or object",
    408: "The body did not arrive in time",
    413: "The body is too large",
    429: "Too many requests or tokens; see Retry-After",
    431: "The headers are too large",
    500: "Internal error",
    503: "Temporarily unavailable; see Retry-After",
    504: "The deadline passed",
    529: "Temporarily unavailable; see Retry-After",
}
_CALL_STATUSES = (400, 401, 403, 404, 408, 413, 429, 431, 500, 503, 504)
_READING_STATUSES = (400, 401, 403, 404, 431, 500, 503)
_BODY = "x-body"  # key in a route's description that holds its body's schemas until `_document` moves them
_SCHEMAS = "#/components/schemas/{model}"

Schema = Mapping[str, Any]  # a JSON schema
Answers = dict[int | str, dict[str, Any]]


def answers(*statuses: int, error: bool = True) -> Answers:
    """Returns the descriptions of a route's answers with these statuses.

    Their bodies are OpenAI's error object, or any JSON if `error` is false.
    """
    schema = {"$ref": "#/components/schemas/Error"} if error else {}
    return {
        status: {"description": _MEANINGS[status], "content": {"application/json": {"schema": schema}}}
        for status in statuses
    }


def described_call(
    body: type[BaseModel] | Schema, name: str = "", more: Sequence[int] = (), *, streams: bool = True
) -> dict[str, Any]:
    """Returns the keyword arguments for a route that reads its body itself.

    `body` is a model, or the schema of an object called `name`; `more` are statuses beyond those of every call. With
    `streams` the answer may also be an event stream.
    """
    schemas: Mapping[str, Any]
    if isinstance(body, Mapping):
        schemas = {name: dict(body)}
    else:
        name, schemas = body.__name__, _schemas_of(body)
    content = {"application/json": {"schema": {"$ref": _SCHEMAS.format(model=name)}}}
    answer: dict[str, Any] = {"content": {"text/event-stream": {}}} if streams else {}
    return {
        "responses": {200: answer, **answers(*_CALL_STATUSES, *more)},
        "openapi_extra": {"requestBody": {"required": True, "content": content}, _BODY: schemas},
    }


def described_upload(form: Schema, name: str) -> dict[str, Any]:
    """Returns the keyword arguments for a route that reads a form with a file. `form` is its schema, called `name`."""
    content = {"multipart/form-data": {"schema": {"$ref": _SCHEMAS.format(model=name)}}}
    return {
        "responses": answers(*_CALL_STATUSES),
        "openapi_extra": {"requestBody": {"required": True, "content": content}, _BODY: {name: dict(form)}},
    }


def described_reading() -> dict[str, Any]:
    """Returns the keyword arguments for a route that reads no body."""
    return {"responses": answers(*_READING_STATUSES)}


def add_documents(app: FastAPI) -> None:
    """Adds /openapi.json and /docs. They describe the routes that the app has at the first request for either."""
    document = functools.cache(lambda: _document(app))

    @app.get(OPENAPI, include_in_schema=False)
    async def openapi() -> Response:
        return JSONResponse(document())

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        headers = {"content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}
        return HTMLResponse(render_page(document(), OPENAPI.removeprefix("/")), headers=headers)


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for path in document["paths"].values():
        for operation in path.values():
            schemas |= operation.pop(_BODY, {})
    schemas["Error"] = _ERROR
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}, {}]  # a key or none: deployments without tenants need none
    return document


@functools.cache
def _schemas_of(body: type[BaseModel]) -> Mapping[str, Any]:
    """Returns the schemas of a body and of the models that it refers to, by name, without pydantic's titles."""
    schema = body.model_json_schema(ref_template=_SCHEMAS)
    found = {**schema.pop("$defs", {}), body.__name__: schema}
    for part in found.values():
        for field in part.get("properties", {}).values():
            field.pop("title", None)
    return found
