"""Defines admission's requests and answers as plain data, and the error that a refusal becomes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from penstock.errors import DeadlineExceeded, InvalidInput, Overloaded, PenstockError
from penstock.types import Lane


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """A request as admission sees it."""

    key: int  # unique
    lane: Lane
    tenant: str
    prompt_tokens: int
    max_tokens: int  # of each sequence
    arrived_s: float
    deadline_s: float
    num_sequences: int = 1
    prepaid_tokens: int = 0  # charged to its tenant's rate before tokenizing it
    open_ended: bool = False  # sets no max_tokens, so its KV is charged as it grows


@dataclass(frozen=True, slots=True)
class Dispatched:
    """The request goes to the workers at once."""

    key: int
    max_tokens: int  # of each sequence; fewer than requested while overload shortens outputs
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Queued:
    key: int


class RefusalReason(StrEnum):
    """Names why a request was refused or dropped from the queue. A label value of penstock:admission_refusals."""

    QUEUE_FULL = "queue_full"  # full in requests or bytes
    WAIT = "wait"  # with `overload.shed`: the wait exceeds, or would exceed, the lane's target
    DEADLINE = "deadline"  # the request cannot end before its deadline
    SHED = "shed"  # refused at random, with a probability that rises with saturation
    BULK_PAUSED = "bulk_paused"  # overload refuses bulk requests
    OVERLOAD = "overload"  # overload refuses all but interactive requests
    TOKEN_RATE = "token_rate"  # the tenant has used up its rate
    TENANT_REQUESTS = "tenant_requests"  # the tenant has as many requests in flight as it may
    QUOTA = "quota"  # the request alone exceeds its tenant's quota


# Refusals that the client could have avoided, so that its tenant pays for the work done before them.
OWN_FAULT = frozenset({RefusalReason.TOKEN_RATE, RefusalReason.TENANT_REQUESTS, RefusalReason.QUOTA})


@dataclass(frozen=True, slots=True)
class Refused:
    key: int
    reason: RefusalReason
    message: str
    retry_after_s: float | None = None  # None: the same request will never be served

    def error(self) -> PenstockError:
        if self.reason is RefusalReason.QUOTA:
            return InvalidInput("max_tokens", self.message)
        if self.reason is RefusalReason.DEADLINE:
            return DeadlineExceeded(self.message, self.retry_after_s)
        return Overloaded(self.message, self.retry_after_s)


AdmissionAnswer = Dispatched | Queued | Refused


@dataclass(frozen=True, slots=True)
class RequestUsage:
    """The usage of one dispatched request at the workers."""

    output_tokens: int  # of all its sequences
    cached_tokens: int = 0  # of its prompt
    decode_s: float | None = None  # of one sequence, first token to last
    whole: bool = True  # it ran to its end, so forecasts may learn from it


NOTHING_USED = RequestUsage(0, whole=False)
