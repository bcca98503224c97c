"""Collects the data of one sampled request while it runs; its spans are built from it after the request has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.types import Lane, RequestId, SamplingParams
from router.tracing.stages import EndedCompletion, WorkerLeg


class TracedRequest(Protocol):
    """The part of a `router.prepared_request.PreparedRequest` that its spans describe."""

    @property
    def request_id(self) -> RequestId: ...

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def sampling(self) -> SamplingParams: ...

    @property
    def model_revision(self) -> str: ...

    @property
    def lane(self) -> Lane: ...


@dataclass(frozen=True, slots=True)
class SampledCall:
    """A sampled call, all of whose requests belong to one trace."""

    trace_id: int
    parent: Any  # OpenTelemetry's context, with the caller's span if the call names one
    submit: Callable[[RequestTrace], None]


@dataclass(slots=True)
class RequestTrace:
    """Holds the data of one request. The code that observes its end calls `end` or `fail`, after which it is final."""

    call: SampledCall
    operation: str  # chat or text_completion
    accepted_s: float  # monotonic
    request: TracedRequest | None = None  # None before it is validated and tokenized
    completions: list[EndedCompletion] = field(default_factory=list)
    open_legs: Callable[[], list[WorkerLeg]] | None = None  # returns the legs of completions that have not ended
    lost_legs: Sequence[WorkerLeg] = ()  # what `open_legs` returned when the request failed
    error: str = ""  # the reason if it failed
    ended_s: float = 0.0  # monotonic; 0: still running

    @property
    def trace_id(self) -> str:
        return f"{self.call.trace_id:032x}"

    def end(self) -> None:
        """Submits the trace. Does nothing the second time."""
        if self.ended_s:
            return
        self.ended_s = time.monotonic()
        self.open_legs = None  # it would keep the request's stream alive
        self.call.submit(self)

    def fail(self, reason: str) -> None:
        """Submits the trace of a request that was refused, failed or was cancelled. Does nothing if it has ended."""
        if self.ended_s:
            return
        self.error = reason
        if self.open_legs is not None:
            self.lost_legs = self.open_legs()
        self.end()
