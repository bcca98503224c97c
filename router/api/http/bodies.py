"""Reads the bodies of HTTP requests within limits on size, time and memory."""

from __future__ import annotations

import asyncio
import contextlib

from fastapi import Request
from starlette.requests import ClientDisconnect

from penstock.config.limits import LimitsConfig
from penstock.errors import Cancelled
from router.api.limits import HeldBytes, UnreadRequest, check_body
from router.metrics.metrics import RouterMetrics


class BodyReader:
    """Reads bodies and bounds the bytes of all bodies that are held at once until they are parsed."""

    def __init__(self, limits: LimitsConfig, metrics: RouterMetrics) -> None:
        self._limits = limits
        self._metrics = metrics
        self._held = HeldBytes(limits, metrics.limited)

    async def read(self, http: Request, held: contextlib.ExitStack) -> bytes:
        """Returns the body. Its bytes count as held until `held` closes.

        Raises UnreadRequest as soon as the body is too large or too late, Unavailable if the bodies already held leave
        no room for it, and Cancelled if the client disconnects.
        """
        limits = self._limits
        declared = http.headers.get("content-length", "")
        check_body(int(declared) if declared.isdecimal() else 0, limits)
        parts: list[bytes] = []
        num_bytes = 0
        held.callback(self._release, parts)
        try:
            async with asyncio.timeout(limits.body_timeout_s):
                async for part in http.stream():
                    num_bytes += len(part)
                    check_body(num_bytes, limits)
                    self._held.take(len(part))
                    parts.append(part)
        except TimeoutError as error:
            self._metrics.limited("body_timeout_s")
            problem = f"did not arrive within {limits.body_timeout_s:g} s; send it faster or send less"
            raise UnreadRequest("body", problem, 408) from error
        except ClientDisconnect as error:
            raise Cancelled("the client disconnected") from error
        parts[:] = [b"".join(parts)]
        return parts[0]

    def _release(self, parts: list[bytes]) -> None:
        self._held.give_back(sum(map(len, parts)))
        parts.clear()
