"""A request as its decode worker holds it, and what it sends back: tokens, an end, and where the time went."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np

from decode_worker.prefill_client import PrefillCandidate
from engine.sequence import SampledToken, Sequence
from penstock.errors import PenstockError
from penstock.types import Epoch, FinishReason, TransferId, TransferKey, WorkerId


@dataclass(frozen=True, slots=True)
class RequestTiming:
    """Where a finished request's time went, in seconds, and who served it."""

    queue_s: float
    prefill_s: float
    transfer_s: float  # first token to last page landed: the exposed part of the transfer
    first_token_s: float
    decode_s: float
    prefill_worker: WorkerId | None
    decode_worker: WorkerId
    cached_tokens: int
    pages_moved: int
    num_preemptions: int
    num_migrations: int
    migration_pause_s: float
    prefill_cached_tokens: int  # `cached_tokens` is the larger of these two, as long as the sequence has not moved
    decode_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Moved:
    """The sequence runs at another decode worker now, which gives it to whoever brings the ticket."""

    worker_id: WorkerId
    epoch: Epoch
    address: str
    ticket: TransferId


class PrefillFault(StrEnum):
    """Whose fault it is that a remote prefill failed."""

    WORKER = "worker"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class PrefillOutcome:
    """How an attempt at a remote prefill ended; without a fault its pages are here."""

    worker_id: WorkerId
    epoch: Epoch
    fault: PrefillFault | None = None


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """One sequence's share of a step: a token, an end, or both; or the news that it has moved, or who prefilled it."""

    stream_id: int
    token: SampledToken | None = None
    finish_reason: FinishReason | None = None
    error: PenstockError | None = None
    timing: RequestTiming | None = None  # with finish_reason
    moved: Moved | None = None  # nothing comes after it
    prefill: PrefillOutcome | None = None


@dataclass(slots=True, eq=False)
class TokenRun:
    """What most of a step's sequences have to say, all at once: a token each and nothing else. Not empty."""

    stream_ids: np.ndarray  # uint64
    token_ids: np.ndarray  # int64, one for each stream


Delta = TokenDelta | TokenRun
Send = Callable[[list[Delta]], None]


def one_by_one(deltas: Iterable[Delta]) -> Iterator[TokenDelta]:
    """The same news, of one sequence each."""
    for delta in deltas:
        if isinstance(delta, TokenDelta):
            yield delta
        else:
            for stream_id, token_id in zip(delta.stream_ids.tolist(), delta.token_ids.tolist(), strict=True):
                yield TokenDelta(stream_id, SampledToken(token_id))


@dataclass(slots=True)
class StageTimes:
    """Moments are monotonic seconds, 0 until they come; `queue_s` and `prefill_s` are durations."""

    submitted_s: float = 0.0
    started_s: float = 0.0  # first chunk computed here
    first_token_s: float = 0.0
    landed_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0

    def on_drawn(self, now_s: float) -> None:
        """A token was drawn here; the first one counts."""
        if not self.first_token_s:
            self.first_token_s = now_s
            self.queue_s = self.started_s - self.submitted_s
            self.prefill_s = now_s - self.started_s

    def on_brought(self, queue_s: float, prefill_s: float, now_s: float) -> None:
        """A prefill worker has drawn it; the first one counts: an attempt after one that failed brings a later one."""
        if not self.first_token_s:
            self.first_token_s = now_s
            self.queue_s = queue_s
            self.prefill_s = prefill_s


class Adopter(Protocol):
    """What follows once the pages of a sequence from another decode worker are here, or will not come."""

    def confirm(self) -> None: ...

    def refuse(self, error: PenstockError) -> None: ...


@dataclass(frozen=True, slots=True)
class Attempt:
    """At a remote prefill."""

    key: TransferKey
    worker_id: WorkerId


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """Owned by `DecodeWorker`, on the step loop."""

    stream_id: int
    sequence: Sequence
    send: Send  # to the request's router; called once a step with the deltas of all its requests
    candidates: deque[PrefillCandidate]
    deadline_s: float  # monotonic; bounds every leg
    times: StageTimes = field(default_factory=StageTimes)
    transfer: TransferKey | None = None  # the attempt under way
    hedge: Attempt | None = None  # a second one, until one of them begins
    prefilled_by: WorkerId | None = None
    cached_tokens: int = 0  # in the prefill worker's cache
    pages_moved: int = 0
    adopter: Adopter | None = None  # of a sequence that comes from another decode worker, until it runs here
    num_preemptions: int = 0  # at workers before this one, as are the two below
    num_migrations: int = 0
    migration_pause_s: float = 0.0
    paused_since_s: float = 0.0  # monotonic; 0 unless it has moved here and drawn no token yet

    def end_pause(self, now_s: float) -> None:
        """A token has been drawn."""
        if self.paused_since_s:
            self.migration_pause_s += now_s - self.paused_since_s
            self.paused_since_s = 0.0

    def take_over(self, other: DecodeRequest) -> None:
        """Goes on with the sequence of `other`, under its own stream, router and deadline."""
        self.sequence, self.times = other.sequence, other.times
        self.prefilled_by, self.cached_tokens, self.pages_moved = (
            other.prefilled_by,
            other.cached_tokens,
            other.pages_moved,
        )
        self.num_preemptions, self.num_migrations = other.num_preemptions, other.num_migrations
        self.migration_pause_s, self.paused_since_s = other.migration_pause_s, other.paused_since_s

    def timing(
        self, *, decode_worker: WorkerId, cached_tokens: int, num_preemptions: int, now_s: float
    ) -> RequestTiming:
        times = self.times
        return RequestTiming(
            queue_s=times.queue_s,
            prefill_s=times.prefill_s,
            transfer_s=max(0.0, times.landed_s - times.first_token_s) if times.landed_s else 0.0,
            first_token_s=times.first_token_s - times.submitted_s,
            decode_s=now_s - times.first_token_s,
            prefill_worker=self.prefilled_by,
            decode_worker=decode_worker,
            # Of the prompt, where it was computed: what a later worker's cache held is not meant.
            cached_tokens=self.cached_tokens if self.num_migrations else max(self.cached_tokens, cached_tokens),
            pages_moved=self.pages_moved,
            num_preemptions=self.num_preemptions + num_preemptions,
            num_migrations=self.num_migrations,
            migration_pause_s=self.migration_pause_s,
            prefill_cached_tokens=self.cached_tokens,
            decode_cached_tokens=cached_tokens,
        )
