"""The routes of Anthropic's API: messages, and the count of their tokens."""

from __future__ import annotations

import contextlib
import functools

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from penstock.config.security import LimitsConfig
from router.api.dialect import Dialect
from router.api.http.generation import GenerationCalls
from router.api.identity import Tenant
from router.api.openai.requests import read_timeout_s
from router.api.prepare import RequestPreparer
from router.api.translation.anthropic.requests import MessagesBody, read_count_call, read_message_call
from router.api.translation.anthropic.responses import PING, MessagesResponse

PATH = "/v1/messages"


def add_messages(app: FastAPI, calls: GenerationCalls, preparer: RequestPreparer) -> None:
    """Adds the routes. Headers such as `anthropic-version` and `anthropic-beta` change no answer."""

    def read(raw: bytes, limits: LimitsConfig, tenant: str) -> MessagesBody:
        return read_message_call(raw, limits)

    dialect = Dialect(read, lambda body: MessagesResponse(body, preparer.card.name), heartbeat=PING)

    @app.post(PATH)
    async def messages(http: Request) -> Response:
        return await calls.answer(http, dialect)

    @app.post(f"{PATH}/count_tokens")
    async def count_tokens(http: Request) -> Response:
        async def count(raw: bytes, held: contextlib.ExitStack, tenant: Tenant) -> Response:
            timeout_s = read_timeout_s(http.headers)
            async with preparer.until(preparer.deadline_s(timeout_s)):
                wire = await calls.parse(raw, tenant, functools.partial(read_count_call, raw))
            held.close()
            token_ids, _ = await preparer.tokenize(wire, tenant, timeout_s, spelt=False)
            return JSONResponse({"input_tokens": len(token_ids)})

        return await calls.with_body(http, count)
