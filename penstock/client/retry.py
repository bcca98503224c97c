"""Whether, when and from where the client tries again. Decides without a clock or randomness of its own."""

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

_MAX_CONNECT_DELAY_S = 1.0  # a successor that listens is found within about a second


class Failure(Enum):
    """The progress of an attempt that failed."""

    ANSWERED = auto()  # a server said so
    BROKEN = auto()  # the connection broke: the server may have begun
    REFUSED = auto()  # nothing accepted the connection


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with full jitter (https://aws.amazon.com/builders-library/timeouts-retries-and-backoff-with-jitter/).

    Only UNAVAILABLE is tried again: it says that no worker has begun. An overloaded deployment refuses with
    RESOURCE_EXHAUSTED, which the caller must see instead of answering with more load.

    A connection that nobody accepts costs a deployment nothing: it counts neither as an attempt nor for the budget, and
    is tried again until the call's deadline. `max_attempts` = 1 turns that off too.
    """

    max_attempts: int = 4
    initial_s: float = 0.2
    multiplier: float = 2.0
    max_s: float = 5.0
    connect_s: float = 60.0  # for which a call without a deadline tries to connect

    def connect_delay_s(self, refusals: int, draw: Callable[[], float]) -> float:
        """Returns the seconds to wait after connections were refused `refusals` times in a row."""
        return min(self.max_s, _MAX_CONNECT_DELAY_S, self.initial_s * self.multiplier ** (refusals - 1)) * draw()

    def delay_s(self, attempt: int, error: PenstockError, draw: Callable[[], float]) -> float | None:
        """Returns the seconds to wait after failed attempt number `attempt` (from 1), or None to give up.

        `draw` returns a random number in [0, 1). The server's RetryInfo is the minimum; jitter is added to it, so that
        clients do not return in step.
        """
        if attempt >= self.max_attempts or not isinstance(error, Unavailable):
            return None
        if error.code is not grpc.StatusCode.UNAVAILABLE:
            return None
        ceiling_s = min(self.max_s, self.initial_s * self.multiplier ** (attempt - 1))
        return (error.retry_after_s or 0.0) + ceiling_s * draw()


class RetryBudget:
    """Keeps retries a small share of successes, so that a failing deployment does not get more load.

    Safe from several threads. Reference: the retry budgets of Finagle, https://twitter.github.io/finagle/guide/Clients.html
    """

    def __init__(self, share: float = 0.2, reserve: float = 10.0, window_s: float = 10.0) -> None:
        """Allows `reserve` retries within about `window_s`, plus `share` for each success."""
        self._share = share
        self._reserve = reserve
        self._window_s = window_s
        self._balance = reserve  # decays towards the reserve from above and below
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
        """Counts one more retry; False if the budget does not allow it."""
        with self._lock:
            self._decay(now_s)
            if self._balance < 1.0:
                return False
            self._balance -= 1.0
            return True

    def _decay(self, now_s: float) -> None:
        """Forgets earned and spent retries alike within the window."""
        passed_s = 0.0 if self._seen_s is None else max(0.0, now_s - self._seen_s)
        self._seen_s = now_s
        self._balance = self._reserve + (self._balance - self._reserve) * math.exp(-passed_s / self._window_s)


DEFAULT_RETRY = RetryPolicy()


@dataclass(slots=True)
class Attempts:
    """Counts the attempts of one call against one deadline. Times are in the caller's monotonic seconds."""

    policy: RetryPolicy
    deadline_s: float | None
    budget: RetryBudget | None = None  # shared by a client's calls
    number: int = 1
    has_succeeded: bool = False  # a call counts once for the budget
    refusals: int = 0  # of the connection, in a row
    connect_by_s: float | None = None  # while connections are refused

    def timeout_s(self, now_s: float) -> float | None:
        """Returns the time left for an attempt that starts now, as gRPC takes it."""
        return None if self.deadline_s is None else max(self.deadline_s - now_s, 0.001)

    def next_delay_s(
        self,
        error: PenstockError,
        now_s: float,
        draw: Callable[[], float],
        failure: Failure = Failure.ANSWERED,
    ) -> float:
        """Counts one more attempt and returns how long to wait for it. Raises `error` if no attempt is left.

        The first attempt after a broken connection is not charged to the budget: a router that dies breaks every
        stream of a client at once, and nobody else is asked to carry more than they did before.
        """
        if failure is Failure.REFUSED and self.policy.max_attempts > 1:
            return self._next_connect_delay_s(error, now_s, draw)
        self.refusals, self.connect_by_s = 0, None
        if isinstance(error, SequenceMoved) and self.number == 1 and self.has_succeeded:
            self.number += 1  # a second move in a row, without a token between, is a failure
            return 0.0
        delay_s = self.policy.delay_s(self.number, error, draw)
        if delay_s is None or (self.deadline_s is not None and now_s + delay_s >= self.deadline_s):
            raise error
        is_charged = failure is not Failure.BROKEN or self.number > 1
        if self.budget is not None and is_charged and not self.budget.take(now_s):
            raise error
        self.number += 1
        return delay_s

    def _next_connect_delay_s(self, error: PenstockError, now_s: float, draw: Callable[[], float]) -> float:
        if self.connect_by_s is None:
            self.connect_by_s = self.deadline_s if self.deadline_s is not None else now_s + self.policy.connect_s
        self.refusals += 1
        delay_s = self.policy.connect_delay_s(self.refusals, draw)
        if now_s + delay_s >= self.connect_by_s:
            raise error
        return delay_s

    def progress(self, now_s: float) -> None:
        """Records an answer or a part of it: attempts are counted from 1 again after it."""
        self.number, self.refusals, self.connect_by_s = 1, 0, None
        if self.budget is not None and not self.has_succeeded:
            self.budget.succeed(now_s)
        self.has_succeeded = True


class Continuation:
    """The part of a stream that was received, so that another router can continue it. Fixes the seed, hence the sampled
    tokens."""

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
        """Whether every completion has ended."""
        num_completions = max(1, self._request.sampling.n)
        return len(self._emitted) == num_completions and all(emitted.finished for emitted in self._emitted.values())

    def request(self) -> inference_pb2.GenerateRequest:
        """Returns the request for the tokens that are still to come."""
        rest = inference_pb2.GenerateRequest()
        rest.CopyFrom(self._request)
        rest.emitted.extend(self._emitted.values())
        return rest
