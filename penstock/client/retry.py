"""Decides whether, when and where from the client retries. Pure: takes the time and random numbers as arguments."""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import grpc

from penstock.errors import PenstockError, SequenceMoved, Unavailable
from penstock.v1 import inference_pb2

_MAX_CONNECT_DELAY_S = 1.0  # a successor is found about a second after it listens


class Failure(Enum):
    """The point at which an attempt failed."""

    ANSWERED = auto()  # a server answered with the error
    BROKEN = auto()  # the connection broke, so the server may have begun
    REFUSED = auto()  # nothing accepted the connection


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with full jitter (https://aws.amazon.com/builders-library/timeouts-retries-and-backoff-with-jitter/).

    Only UNAVAILABLE is retried: it means that no worker has begun. An overloaded deployment refuses with
    RESOURCE_EXHAUSTED, which is passed to the caller, since retries would add load.

    A refused connection costs the deployment nothing: it counts neither as an attempt nor against the budget, and is
    retried until the call's deadline. `max_attempts` = 1 turns this off too.
    """

    max_attempts: int = 4
    initial_s: float = 0.2
    multiplier: float = 2.0
    max_s: float = 5.0
    connect_s: float = 60.0  # how long a call without a deadline tries to connect

    def connect_delay_s(self, refusals: int, random: Callable[[], float]) -> float:
        """Returns the seconds to wait after `refusals` refused connections in a row."""
        return min(self.max_s, _MAX_CONNECT_DELAY_S, self.initial_s * self.multiplier ** (refusals - 1)) * random()

    def delay_s(self, attempt: int, error: PenstockError, random: Callable[[], float]) -> float | None:
        """Returns the seconds to wait after failed attempt number `attempt` (from 1), or None to give up.

        `random` returns a random number in [0, 1). The server's RetryInfo is the minimum; jitter keeps clients from
        returning all at once.
        """
        if attempt >= self.max_attempts or not isinstance(error, Unavailable):
            return None
        if error.code is not grpc.StatusCode.UNAVAILABLE:
            return None
        ceiling_s = min(self.max_s, self.initial_s * self.multiplier ** (attempt - 1))
        return (error.retry_after_s or 0.0) + ceiling_s * random()


class RetryBudget:
    """Limits retries to a small share of successes, so that a failing deployment does not get more load.

    Thread-safe. Reference: the retry budgets of Finagle, https://twitter.github.io/finagle/guide/Clients.html
    """

    def __init__(self, share: float = 0.2, reserve: float = 10.0, window_s: float = 10.0) -> None:
        """Allows `reserve` retries within about `window_s`, plus `share` for each success."""
        self._share = share
        self._reserve = reserve
        self._window_s = window_s
        self._balance = reserve  # decays toward the reserve from above and below
        self._seen_s: float | None = None
        self._lock = threading.Lock()

    @property
    def balance(self) -> float:
        """Retries that are left."""
        return self._balance

    def succeed(self, now_s: float) -> None:
        with self._lock:
            self._decay(now_s)
            self._balance += self._share

    def take(self, now_s: float) -> bool:
        """Counts one more retry. Returns False if the budget does not allow it."""
        with self._lock:
            self._decay(now_s)
            if self._balance < 1.0:
                return False
            self._balance -= 1.0
            return True

    def _decay(self, now_s: float) -> None:
        """Forgets earned and spent retries within the window."""
        passed_s = 0.0 if self._seen_s is None else max(0.0, now_s - self._seen_s)
        self._seen_s = now_s
        self._balance = self._reserve + (self._balance - self._reserve) * math.exp(-passed_s / self._window_s)


DEFAULT_RETRY = RetryPolicy()


@dataclass(slots=True)
class Attempts:
    """Counts the attempts of one call against one deadline. Times are seconds of the caller's monotonic clock."""

    policy: RetryPolicy
    deadline_s: float | None
    budget: RetryBudget | None = None  # shared by all calls of a client
    number: int = 1
    has_succeeded: bool = False  # a call adds to the budget once
    refusals: int = 0  # refused connections in a row
    connect_by_s: float | None = None  # deadline while connections are refused

    def timeout_s(self, now_s: float) -> float | None:
        """Returns the gRPC timeout of an attempt that starts now."""
        return None if self.deadline_s is None else max(self.deadline_s - now_s, 0.001)

    def next_delay_s(
        self,
        error: PenstockError,
        now_s: float,
        random: Callable[[], float],
        failure: Failure = Failure.ANSWERED,
    ) -> float:
        """Counts one more attempt and returns how long to wait for it. Raises `error` if no attempt is left.

        The first attempt after a broken connection is not charged to the budget: a dying router breaks all streams of a
        client at once, and retrying them only restores the previous load.
        """
        if failure is Failure.REFUSED and self.policy.max_attempts > 1:
            return self._next_connect_delay_s(error, now_s, random)
        self.refusals, self.connect_by_s = 0, None
        if isinstance(error, SequenceMoved) and self.number == 1 and self.has_succeeded:
            self.number += 1  # a second broken connection without a token in between counts
            return 0.0
        delay_s = self.policy.delay_s(self.number, error, random)
        if delay_s is None or (self.deadline_s is not None and now_s + delay_s >= self.deadline_s):
            raise error
        is_charged = failure is not Failure.BROKEN or self.number > 1
        if self.budget is not None and is_charged and not self.budget.take(now_s):
            raise error
        self.number += 1
        return delay_s

    def _next_connect_delay_s(self, error: PenstockError, now_s: float, random: Callable[[], float]) -> float:
        if self.connect_by_s is None:
            self.connect_by_s = self.deadline_s if self.deadline_s is not None else now_s + self.policy.connect_s
        self.refusals += 1
        delay_s = self.policy.connect_delay_s(self.refusals, random)
        if now_s + delay_s >= self.connect_by_s:
            raise error
        return delay_s

    def progress(self, now_s: float) -> None:
        """Records an answer or a part of it, after which attempts count from 1 again."""
        self.number, self.refusals, self.connect_by_s = 1, 0, None
        if self.budget is not None and not self.has_succeeded:
            self.budget.succeed(now_s)
        self.has_succeeded = True


class Continuation:
    """The received part of a stream, from which another router can continue it. Fixes the seed, and with it the sampled
    tokens.
    """

    def __init__(self, request: inference_pb2.GenerateRequest) -> None:
        self._request = inference_pb2.GenerateRequest()
        self._request.CopyFrom(request)
        if not self._request.sampling.HasField("seed"):
            self._request.sampling.seed = secrets.randbits(64)
        self._emitted: dict[int, inference_pb2.Emitted] = {}

    def on_message(self, message: inference_pb2.GenerateResponse) -> None:
        self._request.request_id = self._request.request_id or message.request_id
        emitted = self._emitted.get(message.index)
        if emitted is None:
            emitted = self._emitted[message.index] = inference_pb2.Emitted(index=message.index)
        emitted.token_ids.extend(message.token_ids)
        emitted.finished = emitted.finished or bool(message.finish_reason)

    @property
    def is_over(self) -> bool:
        """Returns whether every completion has ended."""
        num_completions = max(1, self._request.sampling.n)
        return len(self._emitted) == num_completions and all(emitted.finished for emitted in self._emitted.values())

    def request(self) -> inference_pb2.GenerateRequest:
        """Returns the request for the remaining tokens."""
        rest = inference_pb2.GenerateRequest()
        rest.CopyFrom(self._request)
        rest.emitted.extend(self._emitted.values())
        return rest
