"""Adds the routes /tokenize and /detokenize, with the same limits and charges as the gRPC call Tokenize."""

from __future__ import annotations

import contextlib
import functools

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from penstock.config.limits import LimitsConfig
from penstock.v1 import inference_pb2
from router.api.http.generation import GenerationCalls
from router.api.http.openapi.document import described_call
from router.api.identity import Tenant
from router.api.openai.requests import read_timeout_s
from router.api.openai.tokenization import DetokenizeBody, parse_detokenize_body, parse_tokenize_body, tokenized_json
from router.api.prepare import RequestPreparer

_TOKENIZE = {
    "type": "object",
    "properties": {
        "model": {"type": "string"},
        "prompt": {"type": "string"},
        "messages": {"type": "array", "items": {"type": "object"}},
        "add_special_tokens": {"type": "boolean"},
        "return_token_strs": {"type": "boolean"},
    },
}


def add_tokenization(app: FastAPI, calls: GenerationCalls, preparer: RequestPreparer) -> None:
    """Adds the routes to the app."""

    @app.post("/tokenize", **described_call(_TOKENIZE, "TokenizeBody", streams=False))
    async def tokenize(http: Request) -> Response:
        """Returns the token ids of a text, or of messages rendered with the chat template."""

        async def work(raw: bytes, held: contextlib.ExitStack, tenant: Tenant) -> Response:
            def read(limits: LimitsConfig) -> tuple[inference_pb2.TokenizeRequest, bool]:
                body = parse_tokenize_body(raw, limits)
                return body.request(), body.return_token_strs

            timeout_s = read_timeout_s(http.headers)
            async with preparer.until(preparer.deadline_s(timeout_s)):
                wire, wants_texts = await calls.parse(raw, tenant, read)
            held.close()
            token_ids, texts = await preparer.tokenize(wire, tenant, timeout_s, spelt=wants_texts)
            return JSONResponse(tokenized_json(token_ids, texts if wants_texts else None, preparer.context_length))

        return await calls.with_body(http, work)

    @app.post("/detokenize", **described_call(DetokenizeBody, streams=False))
    async def detokenize(http: Request) -> Response:
        """Returns the text of token ids."""

        async def work(raw: bytes, held: contextlib.ExitStack, tenant: Tenant) -> Response:
            timeout_s = read_timeout_s(http.headers)
            async with preparer.until(preparer.deadline_s(timeout_s)):
                body = await calls.parse(raw, tenant, functools.partial(parse_detokenize_body, raw))
            held.close()
            preparer.check_model(body.model or "")
            return JSONResponse({"prompt": await preparer.detokenize(body.tokens, tenant, timeout_s)})

        return await calls.with_body(http, work)
