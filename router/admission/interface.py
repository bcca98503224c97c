"""Defines what admission is asked and what it answers: plain data, and the error that a refusal becomes."""

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
    prepaid_tokens: int = 0  # taken from its tenant's rate before, for tokenizing it
    open_ended: bool = False  # names no max_tokens, so that its KV is charged as it grows


@dataclass(frozen=True, slots=True)
class Dispatched:
    """The request goes to the workers at once."""

    key: int
    max_tokens: int  # of each sequence; fewer than requested while answers are shortened
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Queued:
    key: int


class RefusalReason(StrEnum):
    """Says why a request was refused or left the queue unserved. A label of penstock:admission_refusals."""

    QUEUE_FULL = "queue_full"  # in requests or bytes
    WAIT = "wait"  # with `overload.shed`: it would wait, or has waited, longer than its lane's target
    DEADLINE = "deadline"  # it cannot end in time
    SHED = "shed"  # at random, more of them as saturation rises
    BULK_PAUSED = "bulk_paused"
    OVERLOAD = "overload"
    TOKEN_RATE = "token_rate"  # its tenant's rate is used up
    TENANT_REQUESTS = "tenant_requests"  # its tenant has as many requests as it may
    QUOTA = "quota"  # it could never fit its tenant's quota


# Refusals that the caller could have avoided, so it pays for the work done until then.
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
    """The usage of a dispatched request at the workers."""

    output_tokens: int  # of all its sequences
    cached_tokens: int = 0  # of its prompt
    decode_s: float | None = None  # of one sequence, first token to last
    whole: bool = True  # it ran to its end, so that others can be expected to use as much


NOTHING_USED = RequestUsage(0, whole=False)
