"""Adds the routes that list and describe the served model and its adapters."""

from __future__ import annotations

import time

from fastapi import FastAPI, Request

from penstock.kv.adapter_files import AdapterRef
from router.api.dialect import Json
from router.api.http.generation import identify
from router.api.http.openapi.document import described_reading
from router.api.prepare import RequestPreparer


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
        return {"object": "list", "data": [model_json(), *map(model_json, preparer.adapters)]}

    @app.get("/v1/models/{name:path}", **described_reading())
    async def model(http: Request, name: str) -> Json:
        """Describes the model or the adapter with this name; 404 if there is none."""
        identify(http, preparer)
        return model_json(preparer.check_model(name))
