"""Adds the routes that list and describe the served model and its adapters, and those that change the adapters."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, StrictBool
from starlette.responses import PlainTextResponse, Response

from penstock.errors import DeadlineExceeded, InvalidInput
from penstock.kv.adapter_files import AdapterRef
from router.api.dialect import Json
from router.api.http.bodies import BodyReader
from router.api.http.generation import identify
from router.api.http.openapi.document import described_call, described_reading
from router.api.identity import read_authorization
from router.api.openai.fields import check_fields
from router.api.openai.json_bodies import SMALL_BODY_BYTES, Integer, read_json
from router.api.openai.requests import validate_fields
from router.api.prepare import RequestPreparer
from router.fleet.adapters.adapter_file import AdapterFile
from router.metrics.metrics import RouterMetrics

_CHANGE_TIMEOUT_S = 30.0  # reading an adapter's files, and waiting for another router's change


def add_models(app: FastAPI, preparer: RequestPreparer) -> None:
    started_s = int(time.time())

    def model_json(adapter: AdapterRef | None = None) -> Json:
        model, length = preparer.card.name, preparer.context_length
        name = model if adapter is None else adapter.name
        described = {"id": name, "object": "model", "created": started_s, "owned_by": "penstock"}
        return described | {"max_model_len": length} | ({} if adapter is None else {"parent": model})

    @app.get("/v1/models", **described_reading())
    async def models(http: Request) -> Json:
        """Lists the served model and its adapters, each of which names the model as its `parent`."""
        identify(http, preparer)
        return {"object": "list", "data": [model_json(), *map(model_json, preparer.adapters.all)]}

    @app.get("/v1/models/{name:path}", **described_reading())
    async def model(http: Request, name: str) -> Json:
        """Describes the model or the adapter with this name; 404 if there is none."""
        identify(http, preparer)
        return model_json(preparer.check_model(name))


class LoadAdapterBody(BaseModel):
    """The body of POST /v1/load_lora_adapter, as vLLM defines it."""

    model_config = ConfigDict(extra="allow")

    lora_name: str
    lora_path: str
    load_inplace: StrictBool = False


class UnloadAdapterBody(BaseModel):
    """The body of POST /v1/unload_lora_adapter, as vLLM defines it."""

    model_config = ConfigDict(extra="allow")

    lora_name: str
    lora_int_id: Integer | None = None  # has no effect


ChangeT = TypeVar("ChangeT", LoadAdapterBody, UnloadAdapterBody)


def add_adapter_changes(app: FastAPI, preparer: RequestPreparer, file: AdapterFile, metrics: RouterMetrics) -> None:
    """Adds the calls that change `file`, which need the admin token. Changes are made one at a time."""
    limits, bodies, turn = preparer.limits, BodyReader(preparer.limits, metrics), asyncio.Lock()

    async def change(http: Request, kind: type[ChangeT], make: Callable[[ChangeT], None]) -> ChangeT:
        preparer.tenants.check_operator(read_authorization(http.headers))
        with contextlib.ExitStack() as held:
            raw = await bodies.read(http, held)
            if len(raw) > SMALL_BODY_BYTES:
                raise InvalidInput("body", f"has {len(raw)} bytes; send {SMALL_BODY_BYTES} or fewer")
            body = validate_fields(kind, read_json(raw, limits), limits)
        check_fields(body.model_extra, harmless=frozenset(), refused={})
        try:
            async with asyncio.timeout(_CHANGE_TIMEOUT_S), turn:
                await asyncio.to_thread(make, body)
        except TimeoutError:
            raise DeadlineExceeded(
                f"changing the adapters took {_CHANGE_TIMEOUT_S:g} s; GET /v1/models shows whether it is done"
            ) from None
        return body

    @app.post("/v1/load_lora_adapter", **described_call(LoadAdapterBody, streams=False))
    async def load(http: Request) -> Response:
        """Adds an adapter to the file that `adapters_file` names, which every router reads within a second."""
        body = await change(
            http, LoadAdapterBody, lambda body: file.load(body.lora_name, body.lora_path, replaces=body.load_inplace)
        )
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter", **described_call(UnloadAdapterBody, streams=False))
    async def unload(http: Request) -> Response:
        """Removes an adapter from the file that `adapters_file` names. Streams that use it continue."""
        body = await change(http, UnloadAdapterBody, lambda body: file.unload(body.lora_name))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")
