"""Adds the routes of Anthropic's API: messages and counting their tokens."""

from __future__ import annotations

import contextlib
import functools

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from penstock.config.limits import LimitsConfig
from router.api.dialect import Dialect
from router.api.http.generation import GenerationCalls
from router.api.http.openapi.document import described_call
from router.api.identity import Tenant
from router.api.openai.requests import read_timeout_s
from router.api.prepare import RequestPreparer
from router.api.translation.anthropic.errors import OVERLOADED_STATUS
from router.api.translation.anthropic.requests import MessagesBody, read_count_call, read_message_call
from router.api.translation.anthropic.responses import PING, MessagesResponse

PATH = "/v1/messages"
_TEXT_OR_BLOCKS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
_COUNTED_FIELDS = {
    "model": {"type": "string"},
    "messages": {
        "type": "array",
        "items": {
            "type": "object",
            "required": ["role", "content"],
            "properties": {"role": {"enum": ["user", "assistant"]}, "content": _TEXT_OR_BLOCKS},
        },
    },
    "system": _TEXT_OR_BLOCKS,
    "thinking": {"type": "object"},
    "tool_choice": {"type": "object"},
    "tools": {"type": "array", "items": {"type": "object"}},
}
_FIELDS = {
    **_COUNTED_FIELDS,
    "max_tokens": {"type": "integer", "minimum": 1},
    "metadata": {"type": "object"},
    "stop_sequences": {"type": "array", "items": {"type": "string"}},
    "stream": {"type": "boolean"},
    "temperature": {"type": "number"},
    "top_k": {"type": "integer"},
    "top_p": {"type": "number"},
}
_BODY = {"type": "object", "required": ["max_tokens", "messages"], "properties": _FIELDS}
_COUNTED = {"type": "object", "required": ["messages"], "properties": _COUNTED_FIELDS}


def add_messages(app: FastAPI, calls: GenerationCalls, preparer: RequestPreparer) -> None:
    """Adds the routes. They ignore headers such as `anthropic-version` and `anthropic-beta`."""

    def read(raw: bytes, limits: LimitsConfig, tenant: str) -> MessagesBody:
        return read_message_call(raw, limits)

    dialect = Dialect(read, lambda body: MessagesResponse(body, preparer.answering_name(body.model)), heartbeat=PING)

    @app.post(PATH, **described_call(_BODY, "MessagesBody", [OVERLOADED_STATUS]))
    async def messages(http: Request) -> Response:
        """Continues a conversation in the format of Anthropic's Messages; with `stream`, as an event stream."""
        return await calls.answer(http, dialect)

    @app.post(f"{PATH}/count_tokens", **described_call(_COUNTED, "CountTokensBody", [OVERLOADED_STATUS], streams=False))
    async def count_tokens(http: Request) -> Response:
        """Returns the number of prompt tokens of a conversation."""

        async def count(raw: bytes, held: contextlib.ExitStack, tenant: Tenant) -> Response:
            timeout_s = read_timeout_s(http.headers)
            async with preparer.until(preparer.deadline_s(timeout_s)):
                wire = await calls.parse(raw, tenant, functools.partial(read_count_call, raw))
            held.close()
            token_ids, _ = await preparer.tokenize(wire, tenant, timeout_s, spelt=False)
            return JSONResponse({"input_tokens": len(token_ids)})

        return await calls.with_body(http, count)
