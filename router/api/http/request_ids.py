"""Adds an `x-request-id` to every HTTP answer: the caller's own, so that logs of both sides match, or a new one."""

from __future__ import annotations

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.api.limits import MAX_REQUEST_ID

REQUEST_ID = "x-request-id"
_STATE = "penstock.request_id"


class RequestIdMiddleware:
    """Adds the header to every answer. A caller's id that is too long, or not printable ASCII, is replaced."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name_request(scope, Headers(scope=scope).get(REQUEST_ID, ""))

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_name(scope)
            await send(message)

        await self._app(scope, receive, send_named)


def name_request(scope: Scope, request_id: str) -> None:
    """Sets the request's id unless it has one already or `request_id` cannot be sent in a header."""
    if 1 <= len(request_id) <= MAX_REQUEST_ID and request_id.isascii() and request_id.isprintable():
        scope.setdefault(_STATE, request_id)


def request_name(scope: Scope) -> str:
    """Returns the request's id, which is a new one if neither the caller nor the body gave it any."""
    name: str = scope.setdefault(_STATE, "") or uuid.uuid4().hex
    scope[_STATE] = name
    return name
