"""Whether and when the client tries again: pure decisions, no clock and no randomness of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import grpc

from penstock.errors import PenstockError, Unavailable


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


DEFAULT_RETRY = RetryPolicy()


@dataclass(slots=True)
class Attempts:
    """Counts the attempts of one call against one deadline, in the caller's monotonic seconds."""

    policy: RetryPolicy
    deadline_s: float | None  # None: none
    number: int = 1

    def timeout_s(self, now_s: float) -> float | None:
        """Time left for the attempt that starts now, what gRPC takes as its deadline."""
        return None if self.deadline_s is None else max(self.deadline_s - now_s, 0.001)

    def next_delay_s(self, error: PenstockError, now_s: float, draw: Callable[[], float]) -> float:
        """Counts one more attempt and says how long to wait for it. Raises `error` where there is none."""
        delay_s = self.policy.delay_s(self.number, error, draw)
        if delay_s is None or (self.deadline_s is not None and now_s + delay_s >= self.deadline_s):
            raise error
        self.number += 1
        return delay_s
