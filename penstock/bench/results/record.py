"""Defines the record of each request of a run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Ending(Enum):
    """The end of a request. All but the first two are failures and miss every SLO."""

    COMPLETE = "complete"
    CANCELLED = "cancelled"  # by the generator itself on purpose
    REFUSED = "429"
    SERVER_ERROR = "5xx"
    CLIENT_ERROR = "4xx"
    CONNECTION = "connection"
    TIMEOUT = "timeout"
    TRUNCATED = "truncated"  # the stream broke off, or ended without a finish reason
    SHORT = "short"  # complete, but not with the number of tokens requested

    @property
    def is_failure(self) -> bool:
        return self not in (Ending.COMPLETE, Ending.CANCELLED)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request as its caller saw it. `due_s` and `sent_s` count from the run's start, other times from `sent_s`."""

    number: int
    lane: str
    due_s: float
    sent_s: float
    ending: Ending
    detail: str  # explains a failure
    ttft_s: float | None  # time to the first piece of text; None: none came
    e2e_s: float
    gaps_s: tuple[float, ...]  # times between successive pieces
    planned_input_tokens: int | None
    planned_output_tokens: int
    prompt_tokens: int | None  # as counted by the server
    cached_tokens: int | None
    output_tokens: int  # as counted by the server, or else the number of pieces

    @property
    def late_s(self) -> float:
        """The generator's own delay."""
        return self.sent_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """The mean time per token after the first; None with fewer than two tokens."""
        if self.ttft_s is None or self.output_tokens < 2 or not self.gaps_s:
            return None
        return sum(self.gaps_s) / (self.output_tokens - 1)

    @property
    def input_tokens(self) -> int | None:
        """The prompt's length as counted by the server, or else as planned."""
        return self.prompt_tokens if self.prompt_tokens is not None else self.planned_input_tokens


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The requests of one run in the order of their numbers."""

    requests: tuple[RequestRecord, ...]
    elapsed_s: float  # from the start to the end of the last answer
    lags_s: tuple[float, ...]  # samples of how late the generator's event loop was
    is_interrupted: bool = False
