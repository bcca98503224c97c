"""What admission is asked and what it answers: plain data, and the error that a refusal becomes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from penstock.errors import DeadlineExceeded, InvalidInput, Overloaded, PenstockError
from penstock.types import Lane


@dataclass(frozen=True, slots=True)
class Ask:
    """A request at the door."""

    key: int  # unique
    lane: Lane
    tenant: str
    prompt_tokens: int
    max_tokens: int  # of each sequence
    arrived_s: float
    deadline_s: float
    num_sequences: int = 1


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Goes to the workers at once."""

    key: int
    max_tokens: int  # of each sequence; fewer than were asked for where answers are shortened
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Queued:
    key: int


class Reason(StrEnum):
    """Why a request was refused, or left the queue unserved."""

    QUEUE_FULL = "queue_full"
    WAIT = "wait"  # it would wait, or has waited, longer than its lane allows
    DEADLINE = "deadline"  # it cannot end in time
    SHED = "shed"  # at random, more of them as saturation rises
    BULK_PAUSED = "bulk_paused"
    OVERLOAD = "overload"
    TOKEN_RATE = "token_rate"  # its tenant's
    TENANT_REQUESTS = "tenant_requests"  # its tenant has as many as it may
    QUOTA = "quota"  # it could never fit its tenant's quota


@dataclass(frozen=True, slots=True)
class Refused:
    key: int
    reason: Reason
    message: str
    retry_after_s: float | None = None  # None: the same request will never be served

    def error(self) -> PenstockError:
        if self.reason is Reason.QUOTA:
            return InvalidInput("max_tokens", self.message)
        if self.reason is Reason.DEADLINE:
            return DeadlineExceeded(self.message, self.retry_after_s)
        return Overloaded(self.message, self.retry_after_s)


Answer = Dispatched | Queued | Refused


@dataclass(frozen=True, slots=True)
class Used:
    """What a request that went to the workers has taken there."""

    output_tokens: int  # of all its sequences
    cached_tokens: int = 0  # of its prompt
    decode_s: float | None = None  # of one sequence, first token to last
    whole: bool = True  # it came to its end, so that others may be expected to take as much
