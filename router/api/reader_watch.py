"""Detects clients that do not read their stream. Both APIs enter the watch around each write, at almost no cost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from types import TracebackType

from penstock.config.limits import LimitsConfig
from penstock.types import RequestId
from router.metrics.metrics import RouterMetrics

log = logging.getLogger(__name__)


class ReaderWatch:
    """Calls `cut` once, when a write has taken `write_stall_s` or `read_grace_s` after the request's deadline.

    Use `with watch:` around each write, and close it when the stream ends.
    """

    def __init__(
        self,
        request_id: RequestId,
        deadline_s: float,
        limits: LimitsConfig,
        metrics: RouterMetrics,
        cut: Callable[[], object],
    ) -> None:
        """`deadline_s` is on the monotonic clock. `cut` ends the stream."""
        self._request_id = request_id
        self._limits = limits
        self._metrics = metrics
        self._cut = cut
        self._loop = asyncio.get_running_loop()
        self._end_s = self._loop.time() + deadline_s - time.monotonic() + limits.read_grace_s
        self._since_s: float | None = None  # when the current write began; None between writes
        self._check()

    def __enter__(self) -> None:
        self._since_s = self._loop.time()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._since_s = None

    def close(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        now_s, limits = self._loop.time(), self._limits
        stalled_s = (now_s if self._since_s is None else self._since_s) + limits.write_stall_s
        if now_s < min(stalled_s, self._end_s):
            self._timer = self._loop.call_at(min(stalled_s, self._end_s), self._check)
            return
        limit = "write_stall_s" if now_s >= stalled_s else "read_grace_s"
        log.warning(
            "ended the stream of %s: its client does not read (limits.%s = %g)",
            self._request_id,
            limit,
            getattr(limits, limit),
        )
        self._metrics.limited(limit)
        self._cut()
