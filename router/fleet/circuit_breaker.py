"""Withholds requests from workers and links that failed recently (circuit breakers). Pure.

A breaker opens after several failures in a row, or when most of the recent outcomes are failures. After a rest, which
doubles if the breaker reopens before slow start ends, a single trial request is sent; its success closes the breaker.
The worker's share of requests then grows gradually to 1 (slow start), so that its cold caches are not flooded. If more
than half of the candidates are open, the fault is probably elsewhere and breakers are ignored (Envoy's panic threshold:
https://www.envoyproxy.io/docs/envoy/latest/intro/arch_overview/upstream/load_balancing/panic_threshold).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(frozen=True, slots=True)
class BreakerRules:
    max_failures: int = 3  # failures in a row that open the breaker
    window: int = 20  # number of recent outcomes considered
    max_failed_share: float = 0.5  # a higher share of failures in a full window opens the breaker
    rest_s: float = 1.0  # time open before a trial; doubles each time the breaker opens again before slow start ends
    max_rest_s: float = 30.0
    slow_start_s: float = 5.0
    min_share: float = 0.1  # share of requests at the beginning of slow start
    max_open_share: float = 0.5  # if a higher share of the candidates is open, breakers are ignored


@dataclass(slots=True)
class CircuitBreaker:
    """The breaker of one worker or link. Times are on the clock of `now_s`; None if the event has not happened."""

    rules: BreakerRules
    failures_in_a_row: int = 0
    recent: deque[bool] = field(default_factory=deque)  # whether each outcome was a failure, oldest first
    rest_s: float = 0.0  # rest of the current or latest opening
    opened_s: float | None = None  # None while closed
    tried_s: float | None = None  # when the current trial request was sent
    closed_s: float | None = None  # when the current slow start began

    def is_open(self, now_s: float) -> bool:
        """Returns whether no request may be sent now: the breaker rests, or a trial request is in flight.

        A trial without an outcome counts as in flight for as long as the rest lasted.
        """
        if self.opened_s is None:
            return False
        since_s = self.opened_s if self.tried_s is None else self.tried_s
        return now_s - since_s < self.rest_s

    def share(self, now_s: float) -> float:
        """Returns the share of its requests that the worker may take now, 0 to 1."""
        if self.opened_s is not None:
            return 0.0 if self.is_open(now_s) else 1.0
        if self.closed_s is None or now_s - self.closed_s >= self.rules.slow_start_s:
            return 1.0
        return max(self.rules.min_share, (now_s - self.closed_s) / self.rules.slow_start_s)

    def on_sent(self, now_s: float) -> None:
        """Makes this request the trial if the breaker has rested; other requests then wait for its outcome."""
        if self.opened_s is not None and not self.is_open(now_s):
            self.tried_s = now_s

    def on_success(self, now_s: float) -> None:
        self._record(failed=False)
        self.failures_in_a_row = 0
        if self.opened_s is not None and self.tried_s is not None:
            self.opened_s, self.tried_s, self.closed_s = None, None, now_s
            self.recent.clear()

    def on_failure(self, now_s: float) -> None:
        self._record(failed=True)
        self.failures_in_a_row += 1
        if self.opened_s is not None:
            if self.tried_s is not None:
                self._open(now_s)
            return  # the request was sent before the breaker opened, so its failure is no news
        is_full = len(self.recent) >= self.rules.window
        too_many = is_full and sum(self.recent) > self.rules.max_failed_share * self.rules.window
        if self.failures_in_a_row >= self.rules.max_failures or too_many:
            self._open(now_s)

    def _record(self, *, failed: bool) -> None:
        self.recent.append(failed)
        if len(self.recent) > self.rules.window:
            self.recent.popleft()

    def _open(self, now_s: float) -> None:
        rules = self.rules
        is_relapse = self.opened_s is not None or self.share(now_s) < 1.0
        self.rest_s = min(rules.max_rest_s, 2 * self.rest_s) if is_relapse and self.rest_s else rules.rest_s
        self.opened_s, self.tried_s, self.closed_s = now_s, None, None


class CircuitBreakers(Generic[KeyT]):
    """Holds a breaker for each key that has failed. Keys that never failed cost nothing."""

    def __init__(self, rules: BreakerRules | None = None) -> None:
        self._rules = rules or BreakerRules()
        self._breakers: dict[KeyT, CircuitBreaker] = {}

    @property
    def is_empty(self) -> bool:
        """Returns whether no key has ever failed."""
        return not self._breakers

    def usable(self, keys: Sequence[KeyT], now_s: float, rng: random.Random) -> list[KeyT]:
        """Returns the keys that a request may use now. The result is empty only if `keys` is."""
        if not self._breakers:
            return list(keys)
        breakers = [self._breakers.get(key) for key in keys]
        num_open = sum(breaker is not None and breaker.is_open(now_s) for breaker in breakers)
        if num_open > self._rules.max_open_share * len(keys):
            return list(keys)
        shares = [1.0 if breaker is None else breaker.share(now_s) for breaker in breakers]
        sampled = [key for key, share in zip(keys, shares, strict=True) if share >= 1.0 or rng.random() < share]
        return sampled or [key for key, share in zip(keys, shares, strict=True) if share] or list(keys)

    def num_open(self, now_s: float) -> int:
        return sum(breaker.is_open(now_s) for breaker in self._breakers.values())

    def is_open(self, key: KeyT, now_s: float) -> bool:
        breaker = self._breakers.get(key)
        return breaker is not None and breaker.is_open(now_s)

    def on_sent(self, key: KeyT, now_s: float) -> None:
        if (breaker := self._breakers.get(key)) is not None:
            breaker.on_sent(now_s)

    def on_success(self, key: KeyT, now_s: float) -> None:
        if (breaker := self._breakers.get(key)) is not None:
            breaker.on_success(now_s)

    def on_failure(self, key: KeyT, now_s: float) -> bool:
        """Returns whether this failure opened the breaker."""
        breaker = self._breakers.get(key)
        if breaker is None:
            breaker = self._breakers[key] = CircuitBreaker(self._rules)
        was_open = breaker.opened_s is not None
        breaker.on_failure(now_s)
        return breaker.opened_s is not None and not was_open

    def forget(self, key: KeyT) -> None:
        self._breakers.pop(key, None)
