"""Adds the routes of the Responses API, which create, read, cancel and delete responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from penstock.config.limits import LimitsConfig
from penstock.errors import InvalidInput, Unavailable
from router.api.dialect import Dialect
from router.api.http.generation import GenerationCalls, identify
from router.api.http.openapi.document import described_call, described_reading
from router.api.http.running_calls import RunningCalls
from router.api.openai.paging import Json, page
from router.api.prepare import RequestPreparer
from router.api.translation.responses.requests import ResponsesBody, read_response_call
from router.api.translation.responses.responses import ResponsesResponse
from router.api.translation.responses.store import ResponseNotFound, ResponseStore

PATH = "/v1/responses"
_ONE = f"{PATH}/{{response_id}}"
_CANCEL_TIMEOUT_S = 5.0
_BODY = {
    "type": "object",
    "required": ["input"],
    "properties": {
        "model": {"type": "string"},
        "input": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]},
        "instructions": {"type": "string"},
        "max_output_tokens": {"type": "integer", "minimum": 1},
        "metadata": {"type": "object"},
        "previous_response_id": {"type": "string"},
        "reasoning": {"type": "object"},
        "store": {"type": "boolean"},
        "stream": {"type": "boolean"},
        "temperature": {"type": "number"},
        "text": {"type": "object"},
        "tool_choice": {"anyOf": [{"type": "string"}, {"type": "object"}]},
        "tools": {"type": "array", "items": {"type": "object"}},
        "top_p": {"type": "number"},
    },
}


def add_responses(
    app: FastAPI, calls: GenerationCalls, preparer: RequestPreparer, store: ResponseStore
) -> Dialect[ResponsesBody]:
    """Adds the routes. Returns the dialect of the call that creates a response."""
    running = RunningCalls()

    def read(raw: bytes, limits: LimitsConfig, tenant: str) -> ResponsesBody:
        return read_response_call(raw, limits, tenant, store)

    def respond(body: ResponsesBody) -> ResponsesResponse:
        return ResponsesResponse(body, preparer.answering_name(body.model), store)

    dialect = Dialect(read, respond, reads_more=True)

    @app.post(PATH, **described_call(_BODY, "ResponsesBody"))
    async def create(http: Request) -> Response:
        """Answers in the format of OpenAI's Responses and stores the response unless `store` is false."""
        return await calls.answer(http, dialect, running)

    _add_stored(app, preparer, store)
    _add_cancel(app, preparer, store, running)
    return dialect


def _add_stored(app: FastAPI, preparer: RequestPreparer, store: ResponseStore) -> None:
    """Adds the calls that read and delete stored responses."""

    @app.get(_ONE, **described_reading())
    async def retrieve(http: Request, response_id: str) -> Response:
        """Returns a stored response."""
        tenant = identify(http, preparer)
        _refuse_parameters(http, "stream", "starting_after")
        return _json(store.get(tenant.name, response_id).response)

    @app.get(f"{_ONE}/input_items", **described_reading())
    async def input_items(http: Request, response_id: str) -> Response:
        """Lists the input items of a stored response."""
        tenant = identify(http, preparer)
        items = store.get(tenant.name, response_id).given.items
        # A page can be as large as a request, so it is read off the event loop.
        return await asyncio.to_thread(lambda: JSONResponse(_item_page(items, http.query_params)))

    @app.delete(_ONE, **described_reading())
    async def delete(http: Request, response_id: str) -> Response:
        """Deletes a stored response."""
        tenant = identify(http, preparer)
        store.delete(tenant.name, response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})


def _add_cancel(app: FastAPI, preparer: RequestPreparer, store: ResponseStore, running: RunningCalls) -> None:
    @app.post(f"{_ONE}/cancel", **described_reading())
    async def cancel(http: Request, response_id: str) -> Response:
        """Ends a response in flight. Returns a response that has ended unchanged."""
        tenant = identify(http, preparer)
        try:
            was_running = await running.cancel((tenant.name, response_id), _CANCEL_TIMEOUT_S)
        except TimeoutError:
            problem = f"{response_id} is not cancelled yet, because its client does not read; try again"
            raise Unavailable(problem, _CANCEL_TIMEOUT_S) from None
        try:
            return _json(store.get(tenant.name, response_id).response)
        except ResponseNotFound:
            if not was_running:
                raise
            return JSONResponse({"id": response_id, "object": "response", "status": "cancelled"})


def _item_page(items: Sequence[tuple[str, str]], query: Mapping[str, str]) -> Json:
    """Returns a page of a response's input items. Raises InvalidInput."""

    def load(entry: tuple[str, str]) -> Json:
        item: Json = json.loads(entry[1])
        return item

    return page(items, query, load, id_of=lambda entry: entry[0])


def _json(text: str) -> Response:
    return Response(text, media_type="application/json")


def _refuse_parameters(http: Request, *names: str) -> None:
    for name in names:
        if http.query_params.get(name) not in (None, "false"):
            raise InvalidInput(name, "is not supported for a response that has ended; leave it out")
