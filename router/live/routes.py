"""Serves the live page at /ui. Its files need no credentials; its data needs those of /metrics."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response

from router.live.view import LiveView

PATH = "/ui"
_NUMBER = re.compile(r"[0-9]{1,15}")
_FILES = {"": "text/html", "live.css": "text/css", "live.js": "text/javascript", "charts.js": "text/javascript"}
_MAX_SHOWN = 256  # characters of an unknown id
_FOLDER = Path(__file__).parent / "page"
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
}


def add_live_page(app: FastAPI, view: LiveView, check: Callable[[str | None], None]) -> None:
    """Adds the page and its data. `check` takes the authorization header, and raises Unauthenticated or
    PermissionDenied.
    """

    @app.get(PATH, include_in_schema=False)
    async def page() -> Response:
        return RedirectResponse(f"{PATH}/")

    for name, media_type in _FILES.items():
        app.get(f"{PATH}/{name}", include_in_schema=False)(_file(name or "index.html", media_type))

    @app.get(f"{PATH}/state", include_in_schema=False)
    async def state(http: Request) -> Response:
        """Returns the workers, the queues, and the completions of `router` after number `after`."""
        check(http.headers.get("authorization"))
        query = http.query_params
        after = query.get("after", "")
        return JSONResponse(view.state(query.get("router", ""), int(after) if _NUMBER.fullmatch(after) else 0))

    @app.get(f"{PATH}/requests/{{request_id:path}}", include_in_schema=False)
    async def request(http: Request, request_id: str) -> Response:
        """Returns the waterfall of a request that runs or has ended."""
        check(http.headers.get("authorization"))
        found = view.waterfall(request_id)
        if found is None:
            problem = f"{request_id[:_MAX_SHOWN]!r} neither runs at this router nor is among its last requests"
            return JSONResponse({"error": problem}, 404)
        return JSONResponse(found)

    @app.get(f"{PATH}/controller", include_in_schema=False)
    async def controller(http: Request) -> Response:
        """Returns the newest events of the deployment and the autoscaler's reasons."""
        check(http.headers.get("authorization"))
        return JSONResponse(await view.controller_state())


def _file(name: str, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return FileResponse(_FOLDER / name, media_type=media_type, headers=_HEADERS)

    return send
