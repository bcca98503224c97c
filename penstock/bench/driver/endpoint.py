"""Defines the interface of a server to the loops, and the log of a stream that each endpoint fills in."""

from __future__ import annotations

import time
from typing import Any, Protocol

from penstock.bench.results.record import Ending
from penstock.bench.workloads.plan import LoadRequest
from penstock.bench.workloads.prompts import PromptWriter


class StreamLog:
    """Collects the pieces of one answer and its ending. Times are those of `time.perf_counter`."""

    __slots__ = (
        "_cancel_after",
        "cached_tokens",
        "completion_tokens",
        "detail",
        "end_s",
        "ending",
        "finish_reason",
        "is_closed",
        "num_pieces",
        "piece_times_s",
        "prompt_tokens",
        "sent_s",
    )

    def __init__(self, cancel_after: int | None = None) -> None:
        self._cancel_after = cancel_after
        self.sent_s = time.perf_counter()
        self.end_s: float | None = None
        self.piece_times_s: list[float] = []
        self.num_pieces = 0  # counts tokens if the endpoint knows them
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.finish_reason: str | None = None
        self.is_closed = False  # the server has marked the end of the stream
        self.ending: Ending | None = None
        self.detail = ""

    def add_piece(self, now_s: float, num_tokens: int = 1) -> bool:
        """Records a piece of the answer. Returns whether the client disconnects now."""
        self.piece_times_s.append(now_s)
        self.num_pieces += num_tokens
        if self._cancel_after is not None and self.num_pieces >= self._cancel_after:
            self.ending = Ending.CANCELLED
            return True
        return False

    def fail(self, ending: Ending, detail: str) -> None:
        """Records how the request failed; the first failure counts."""
        if self.ending is None:
            self.ending, self.detail = ending, detail[:300]

    def finish(self, wanted_tokens: int | None) -> None:
        """Judges a stream that has not failed. It is complete if it has a finish reason, the server's end of stream,
        and `wanted_tokens` tokens if given. Only the first call counts.
        """
        if self.end_s is not None:
            return
        self.end_s = time.perf_counter()
        if self.ending is not None:
            return
        if not self.is_closed or self.finish_reason is None:
            missing = "the end of the stream" if not self.is_closed else "a finish reason"
            self.ending, self.detail = Ending.TRUNCATED, f"{missing} never came"
        elif wanted_tokens is not None and self.completion_tokens not in (None, wanted_tokens):
            self.ending = Ending.SHORT
            self.detail = (
                f"{self.completion_tokens} tokens instead of {wanted_tokens}, finish reason {self.finish_reason}"
            )
        else:
            self.ending = Ending.COMPLETE


class Endpoint(Protocol):
    """A server that answers requests as streams."""

    def encode(self, request: LoadRequest, writer: PromptWriter) -> Any:
        """Returns the request in the form that `send` takes. Called ahead of time, so that sending costs little."""

    async def send(self, encoded: Any, log: StreamLog) -> None:
        """Sends the request and fills in the log; failures are recorded there and not raised."""

    async def close(self) -> None:
        """Closes connections."""
