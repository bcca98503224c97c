"""Adds the routes of offline batches: /v1/batches."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Collection, Mapping

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from penstock.config.limits import LimitsConfig
from penstock.config.router import BatchConfig
from penstock.errors import InvalidInput
from router.api.http.generation import GenerationCalls, identify
from router.api.http.openapi.document import described_call, described_reading
from router.api.identity import Tenant
from router.api.openai.json_bodies import read_json, shown
from router.api.openai.metadata import read_metadata
from router.api.openai.paging import Json, page
from router.api.prepare import RequestPreparer
from router.batches.batches import BatchStore
from router.batches.runner import BatchRunner

PATH = "/v1/batches"
_ONE = f"{PATH}/{{batch_id}}"
_FIELDS = {"input_file_id", "endpoint", "completion_window", "metadata"}
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([mhd])")
_UNIT_S = {"m": 60, "h": 3600, "d": 86_400}
_BODY = {
    "type": "object",
    "required": ["input_file_id", "endpoint", "completion_window"],
    "properties": {
        "input_file_id": {"type": "string"},
        "endpoint": {"type": "string"},
        "completion_window": {"type": "string"},
        "metadata": {"type": "object"},
    },
}


def add_batches(
    app: FastAPI,
    calls: GenerationCalls,
    preparer: RequestPreparer,
    store: BatchStore,
    runner: BatchRunner,
    endpoints: Collection[str],
    config: BatchConfig,
) -> None:
    @app.post(PATH, **described_call(_BODY, "BatchBody", streams=False))
    async def create(http: Request) -> Response:
        """Begins a batch. Each line of its input file is a request, which runs on spare capacity."""

        async def work(raw: bytes, held: contextlib.ExitStack, tenant: Tenant) -> Response:
            def read(limits: LimitsConfig) -> tuple[str, str, str, float, dict[str, str] | None]:
                return _read_body(raw, limits, endpoints, config)

            input_file_id, endpoint, window, window_s, metadata = await calls.parse(raw, tenant, read)
            held.close()
            record = await asyncio.to_thread(
                store.create, tenant.name, endpoint, input_file_id, window, window_s, metadata
            )
            runner.wake()
            return JSONResponse(record.as_json())

        return await calls.with_body(http, work)

    @app.get(PATH, **described_reading())
    async def list_batches(http: Request) -> Response:
        """Lists the tenant's batches."""
        tenant = identify(http, preparer)
        return JSONResponse(await asyncio.to_thread(_page, store, tenant.name, http.query_params))

    @app.get(_ONE, **described_reading())
    async def retrieve(http: Request, batch_id: str) -> Response:
        """Describes a batch and its progress."""
        tenant = identify(http, preparer)
        return JSONResponse((await asyncio.to_thread(store.get, tenant.name, batch_id)).as_json())

    @app.post(f"{_ONE}/cancel", **described_reading())
    async def cancel(http: Request, batch_id: str) -> Response:
        """Ends a batch within seconds and keeps its answers so far. Returns a batch that has ended unchanged."""
        tenant = identify(http, preparer)
        return JSONResponse((await asyncio.to_thread(store.cancel, tenant.name, batch_id)).as_json())


def _page(store: BatchStore, tenant: str, query: Mapping[str, str]) -> Json:
    """Returns a page of the tenant's batches. Raises InvalidInput."""

    def load(batch_id: str) -> Json | None:
        record = store.find(tenant, batch_id)
        return record.as_json() if record is not None else None

    return page(store.ids(tenant), query, load)


def _read_body(
    raw: bytes, limits: LimitsConfig, endpoints: Collection[str], config: BatchConfig
) -> tuple[str, str, str, float, dict[str, str] | None]:
    """Returns the input file's id, the endpoint, the window as given, the window in seconds, and the metadata.

    Raises InvalidInput that names the field.
    """
    body = read_json(raw, limits)
    if not isinstance(body, dict):
        raise InvalidInput("body", "is not a JSON object; send an object")
    for name in body:
        if name not in _FIELDS and body[name] is not None:
            raise InvalidInput(name[:100], "is not supported for a batch; leave it out")
    input_file_id, endpoint, window = body.get("input_file_id"), body.get("endpoint"), body.get("completion_window")
    if not isinstance(input_file_id, str):
        raise InvalidInput("input_file_id", f"is {shown(input_file_id)}; give the id of a file")
    if endpoint not in endpoints:
        raise InvalidInput("endpoint", f"is {shown(endpoint)}; give one of {', '.join(endpoints)}")
    match = _WINDOW.fullmatch(window) if isinstance(window, str) else None
    window_s = int(match[1]) * _UNIT_S[match[2]] if match else 0
    if not 0 < window_s <= config.max_window_s:
        limit = f"router.batches.max_window_s = {config.max_window_s:g}"
        raise InvalidInput("completion_window", f"is {shown(window)}; give a time such as 24h, within {limit}")
    return input_file_id, str(endpoint), str(window), window_s, read_metadata(body.get("metadata"))
