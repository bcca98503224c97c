"""Adds the routes of files, /v1/files, which hold the inputs and outputs of batches."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping

from fastapi import FastAPI, Request
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, JSONResponse, Response

from penstock.errors import Cancelled, InvalidInput, Unavailable
from router.api.http.generation import identify
from router.api.http.openapi.document import described_reading, described_upload
from router.api.limits import UnreadRequest
from router.api.openai.paging import Json, page
from router.api.prepare import RequestPreparer
from router.batches.files import FileStore
from router.batches.records import FileRecord

PATH = "/v1/files"
_ONE = f"{PATH}/{{file_id}}"
_MAX_UPLOADS, _MAX_TENANT_UPLOADS = 8, 4  # uploads at a time, of all tenants and of one
_MAX_FIELDS = 8  # fields of a form
_FIELD_BYTES = 4096
_MAX_NAME = 255  # characters
_MAX_LIMIT = 10_000  # highest `limit` of a listing, as in OpenAI's API
_MIN_BYTES_PER_S = 256 << 10  # an upload that falls behind this rate is ended
_RETRY_AFTER_S = 5.0
_FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string", "enum": ["batch"]}},
}


def add_files(app: FastAPI, preparer: RequestPreparer, store: FileStore, file_bytes: int) -> None:
    """Adds the routes. `file_bytes` limits the size of an upload; larger ones are refused before they are stored."""
    uploads = Counter[str]()  # by tenant

    @app.post(PATH, **described_upload(_FORM, "FileForm"))
    async def upload(http: Request) -> Response:
        """Stores a file with the requests of a batch, one JSON object per line."""
        tenant = identify(http, preparer)
        if uploads.total() >= _MAX_UPLOADS or uploads[tenant.name] >= _MAX_TENANT_UPLOADS:
            limit = f"this router receives {_MAX_UPLOADS} uploads at a time, {_MAX_TENANT_UPLOADS} of one tenant"
            raise Unavailable(f"{limit}; try again in {_RETRY_AFTER_S:g} s", _RETRY_AFTER_S)
        uploads[tenant.name] += 1
        try:
            record = await _store_upload(http, preparer.limits.body_timeout_s, store, tenant.name, file_bytes)
        finally:
            uploads[tenant.name] -= 1
            if not uploads[tenant.name]:
                del uploads[tenant.name]
        return JSONResponse(record.as_json())

    _add_stored(app, preparer, store)


def _add_stored(app: FastAPI, preparer: RequestPreparer, store: FileStore) -> None:
    """Adds the calls that list, describe, return and delete stored files."""

    @app.get(PATH, **described_reading())
    async def list_files(http: Request) -> Response:
        """Lists the tenant's files."""
        tenant, purpose = identify(http, preparer), http.query_params.get("purpose")
        return JSONResponse(await asyncio.to_thread(_page, store, tenant.name, purpose, http.query_params))

    @app.get(_ONE, **described_reading())
    async def retrieve(http: Request, file_id: str) -> Response:
        """Describes a file."""
        tenant = identify(http, preparer)
        return JSONResponse((await asyncio.to_thread(store.get, tenant.name, file_id)).as_json())

    @app.get(f"{_ONE}/content", **described_reading())
    async def content(http: Request, file_id: str) -> Response:
        """Returns the content of a file."""
        tenant = identify(http, preparer)
        path = await asyncio.to_thread(store.path, tenant.name, file_id)
        return FileResponse(path, media_type="application/octet-stream")

    @app.delete(_ONE, **described_reading())
    async def delete(http: Request, file_id: str) -> Response:
        """Deletes a file. An unfinished batch that reads it fails."""
        tenant = identify(http, preparer)
        await asyncio.to_thread(store.delete, tenant.name, file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})


def _page(store: FileStore, tenant: str, purpose: str | None, query: Mapping[str, str]) -> Json:
    """Returns a page of the tenant's files. Raises InvalidInput."""

    def load(file_id: str) -> Json | None:
        record = store.find(tenant, file_id)
        return record.as_json() if record is not None else None

    return page(store.ids(tenant, purpose), query, load, _MAX_LIMIT)


async def _store_upload(http: Request, timeout_s: float, store: FileStore, tenant: str, file_bytes: int) -> FileRecord:
    """Stores the uploaded file for the tenant. Raises what `_read_form`, `_checked_file` and `FileStore.put` raise."""
    form = await _read_form(http, file_bytes + _MAX_FIELDS * _FIELD_BYTES, timeout_s)
    try:
        file = _checked_file(form)
        name = (file.filename or "file.jsonl")[:_MAX_NAME]
        return await asyncio.to_thread(store.put, tenant, name, file.file)
    finally:
        await form.close()


async def _read_form(http: Request, max_bytes: int, timeout_s: float) -> FormData:
    """Returns the form; its file may be on disk. Raises InvalidInput, UnreadRequest or Cancelled."""
    if not http.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise InvalidInput("content-type", "is not multipart/form-data; send the file in a form")
    timeout = asyncio.timeout(timeout_s)
    parser = MultiPartParser(
        http.headers,
        _bounded(http, max_bytes, timeout, timeout_s),
        max_files=1,
        max_fields=_MAX_FIELDS,
        max_part_size=_FIELD_BYTES,
    )
    try:
        async with timeout:
            return await parser.parse()
    except MultiPartException as error:
        raise InvalidInput(
            "body", f"is not a valid form: {error.message[:200]}; send a form with the fields file and purpose"
        ) from None
    except TimeoutError:
        raise UnreadRequest("body", "did not arrive in time; send it faster or send less", 408) from None
    except ClientDisconnect:
        raise Cancelled("the client disconnected") from None


async def _bounded(http: Request, max_bytes: int, timeout: asyncio.Timeout, timeout_s: float) -> AsyncGenerator[bytes]:
    """Yields the body. Extends `timeout` by the time that the bytes so far may take at `_MIN_BYTES_PER_S`."""
    num_bytes, begun_s = 0, asyncio.get_running_loop().time()
    async for part in http.stream():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise UnreadRequest("file", f"is larger than router.batches.file_bytes allows ({max_bytes}); split it", 413)
        timeout.reschedule(begun_s + timeout_s + num_bytes / _MIN_BYTES_PER_S)
        yield part


def _checked_file(form: FormData) -> UploadFile:
    """Returns the form's file. Raises InvalidInput that names the field."""
    file, purpose = form.get("file"), form.get("purpose")
    for name in form:
        if name not in ("file", "purpose"):
            raise InvalidInput(name[:100], "is not supported for a file; leave it out")
    if not isinstance(file, UploadFile):
        raise InvalidInput("file", "is missing or not a file; add the file to the form")
    if purpose != "batch":
        raise InvalidInput("purpose", f"is {str(purpose)[:100]!r}; only batch is served")
    return file
