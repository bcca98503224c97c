"""Whether and when the client tries again: pure decisions, no clock and no randomness of their own."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from penstock.errors import PenstockError, SequenceMoved, Unavailable


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff with full jitter (https://aws.amazon.com/builders-library/timeouts-retries-and-backoff-with-jitter/).

    Only UNAVAILABLE is tried again: it says that nobody began the work. An overloaded deployment refuses with
    RESOURCE_EXHAUSTED, which the caller must see, not answer with more load.
    """

    max_attempts: int = 4
    initial_s: float = 0.2
    multiplier: float = 2.0
    max_s: float = 5.0

    def delay_s(self, attempt: int, error: PenstockError, draw: Callable[[], float]) -> float | None:
        """Seconds to wait after failed attempt number `attempt` (from 1); None: give up. `draw` gives [0, 1).

        The server's own RetryInfo is the least; jitter comes on top, so that clients do not return in step.
        """
        if attempt >= self.max_attempts or not isinstance(error, Unavailable):
            return None
        if error.code is not grpc.StatusCode.UNAVAILABLE:
            return None
        ceiling_s = min(self.max_s, self.initial_s * self.multiplier ** (attempt - 1))
        return (error.retry_after_s or 0.0) + ceiling_s * draw()


class RetryBudget:
    """Keeps second attempts a small share of what succeeds, so that a failing deployment does not get more load.

    Safe from several threads. Reference: the retry budgets of Finagle, https://twitter.github.io/finagle/guide/Clients.html
    """

    def __init__(self, share: float = 0.2, reserve: float = 10.0, window_s: float = 10.0) -> None:
        """Within about `window_s`, `reserve` retries are allowed, and `share` for each success."""
        self._share = share
        self._reserve = reserve
        self._window_s = window_s
        self._balance = reserve  # what successes have earned and the window gives back, less what was taken
        self._seen_s: float | None = None
        self._lock = threading.Lock()

    @property
    def balance(self) -> float:
        """Retries that are left."""
        return self._balance

    def succeed(self, now_s: float) -> None:
        with self._lock:
            self._recover(now_s)
            self._balance += self._share

    def take(self, now_s: float) -> bool:
        """Whether one more retry is allowed; it is counted then."""
        with self._lock:
            self._recover(now_s)
            if self._balance < 1.0:
                return False
            self._balance -= 1.0
            return True

    def _recover(self, now_s: float) -> None:
        """Both what was earned and what was taken is forgotten within the window."""
        passed_s = 0.0 if self._seen_s is None else max(0.0, now_s - self._seen_s)
        self._seen_s = now_s
        self._balance = self._reserve + (self._balance - self._reserve) * math.exp(-passed_s / self._window_s)


DEFAULT_RETRY = RetryPolicy()


@dataclass(slots=True)
class Attempts:
    """Counts the attempts of one call against one deadline, in the caller's monotonic seconds."""

    policy: RetryPolicy
    deadline_s: float | None  # None: none
    budget: RetryBudget | None = None  # shared by a client's calls
    number: int = 1
    has_succeeded: bool = False  # counts once for the budget

    def timeout_s(self, now_s: float) -> float | None:
        """Time left for the attempt that starts now, what gRPC takes as its deadline."""
        return None if self.deadline_s is None else max(self.deadline_s - now_s, 0.001)

    def next_delay_s(self, error: PenstockError, now_s: float, draw: Callable[[], float]) -> float:
        """Counts one more attempt and says how long to wait for it. Raises `error` where there is none."""
        if isinstance(error, SequenceMoved) and self.number == 1 and self.has_succeeded:
            self.number += 1  # a second one in a row, without a token between, is a failure
            return 0.0
        delay_s = self.policy.delay_s(self.number, error, draw)
        if delay_s is None or (self.deadline_s is not None and now_s + delay_s >= self.deadline_s):
            raise error
        if self.budget is not None and not self.budget.take(now_s):
            raise error
        self.number += 1
        return delay_s

    def progress(self, now_s: float) -> None:
        """An answer, or a part of it, has come: what breaks off after that has not failed, and starts anew."""
        self.number = 1
        if self.budget is not None and not self.has_succeeded:
            self.budget.succeed(now_s)
        self.has_succeeded = True
