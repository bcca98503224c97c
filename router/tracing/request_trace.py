"""Collects data of one sampled request while it runs; its spans are built from it once it is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from router.tracing.stages import EndedCompletion, WorkerLeg

if TYPE_CHECKING:
    from router.prepared_request import PreparedRequest


@dataclass(frozen=True, slots=True)
class SampledCall:
    """A call that is sampled: all its requests belong to one trace."""

    trace_id: int
    parent: Any  # OpenTelemetry's context, with the caller's span if it sent one
    submit: Callable[[RequestTrace], None]


@dataclass(slots=True)
class RequestTrace:
    """Holds the data of one request. Whoever sees the request end calls `end` or `fail`; nothing changes afterwards."""

    call: SampledCall
    operation: str  # chat or text_completion
    accepted_s: float  # monotonic
    request: PreparedRequest | None = None  # once it is validated and tokenized
    completions: list[EndedCompletion] = field(default_factory=list)
    open_legs: Callable[[], list[WorkerLeg]] | None = None  # of completions that have not ended
    lost_legs: Sequence[WorkerLeg] = ()  # those of `open_legs`, once the request has failed
    error: str = ""  # why it failed
    ended_s: float = 0.0  # monotonic; 0: it runs

    @property
    def trace_id(self) -> str:
        return f"{self.call.trace_id:032x}"

    def end(self) -> None:
        """Submits the trace, once."""
        if self.ended_s:
            return
        self.ended_s = time.monotonic()
        self.open_legs = None  # the callable refers to the request's stream
        self.call.submit(self)

    def fail(self, reason: str) -> None:
        """Submits the trace of a request that was refused, failed or was cancelled, unless it has ended."""
        if self.ended_s:
            return
        self.error = reason
        if self.open_legs is not None:
            self.lost_legs = self.open_legs()
        self.end()
