"""Who has failed of late and is left alone for a while: circuit breakers for workers and links. Pure.

A breaker opens after some failures in a row, or when most of the recent outcomes are failures. It rests, longer each
time it opens again at once; then one request tries it, and success closes it. After that its share of requests grows
from little to all (slow start), so that a worker with cold caches is not flooded. Where more than half of the
candidates would be left alone the fault is not theirs, and breakers are ignored (Envoy calls this the panic threshold:
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
    max_failures: int = 3  # in a row
    window: int = 20  # outcomes that count
    max_failed_share: float = 0.5  # of a full window
    rest_s: float = 1.0  # doubles each time it opens again before slow start is over
    max_rest_s: float = 30.0
    slow_start_s: float = 5.0
    min_share: float = 0.1  # of requests, at the beginning of slow start
    max_open_share: float = 0.5  # of the candidates; with more open, none is left out


@dataclass(slots=True)
class Breaker:
    """Of one worker or link. Moments are `now_s`, None where they have not come."""

    rules: BreakerRules
    failures_in_a_row: int = 0
    recent: deque[bool] = field(default_factory=deque)  # whether it failed, oldest first
    rest_s: float = 0.0  # of the present or last opening
    opened_s: float | None = None  # None: closed
    tried_s: float | None = None  # a request tries it since
    closed_s: float | None = None  # since when it is in slow start

    def is_open(self, now_s: float) -> bool:
        """Whether nobody is to be sent there: it rests, or somebody tries it."""
        if self.opened_s is None:
            return False
        since_s = self.opened_s if self.tried_s is None else self.tried_s
        return now_s - since_s < self.rest_s

    def share(self, now_s: float) -> float:
        """Of the requests that it may take, 0 to 1."""
        if self.opened_s is not None:
            return 0.0 if self.is_open(now_s) else 1.0
        if self.closed_s is None or now_s - self.closed_s >= self.rules.slow_start_s:
            return 1.0
        return max(self.rules.min_share, (now_s - self.closed_s) / self.rules.slow_start_s)

    def on_sent(self, now_s: float) -> None:
        """One that has rested is tried by this request, and by no other until it is known how it went."""
        if self.opened_s is not None and not self.is_open(now_s):
            self.tried_s = now_s

    def on_success(self, now_s: float) -> None:
        self._note(failed=False)
        self.failures_in_a_row = 0
        if self.opened_s is not None and self.tried_s is not None:
            self.opened_s, self.tried_s, self.closed_s = None, None, now_s
            self.recent.clear()

    def on_failure(self, now_s: float) -> None:
        self._note(failed=True)
        self.failures_in_a_row += 1
        if self.opened_s is not None:
            if self.tried_s is not None:
                self._open(now_s)
            return  # others that were under way when it opened say nothing new
        full = len(self.recent) >= self.rules.window
        too_many = full and sum(self.recent) > self.rules.max_failed_share * self.rules.window
        if self.failures_in_a_row >= self.rules.max_failures or too_many:
            self._open(now_s)

    def _note(self, *, failed: bool) -> None:
        self.recent.append(failed)
        if len(self.recent) > self.rules.window:
            self.recent.popleft()

    def _open(self, now_s: float) -> None:
        rules = self.rules
        again = self.opened_s is not None or self.share(now_s) < 1.0
        self.rest_s = min(rules.max_rest_s, 2 * self.rest_s) if again and self.rest_s else rules.rest_s
        self.opened_s, self.tried_s, self.closed_s = now_s, None, None


class Breakers(Generic[KeyT]):
    """One for each key that has failed; those that never did cost nothing."""

    def __init__(self, rules: BreakerRules | None = None) -> None:
        self._rules = rules or BreakerRules()
        self._breakers: dict[KeyT, Breaker] = {}

    @property
    def is_empty(self) -> bool:
        """Nobody has ever failed."""
        return not self._breakers

    def usable(self, keys: Sequence[KeyT], now_s: float, rng: random.Random) -> list[KeyT]:
        """Those that a request may go to now; not empty unless `keys` is."""
        if not self._breakers:
            return list(keys)
        known = [self._breakers.get(key) for key in keys]
        num_open = sum(one is not None and one.is_open(now_s) for one in known)
        if num_open > self._rules.max_open_share * len(keys):
            return list(keys)
        shares = [1.0 if one is None else one.share(now_s) for one in known]
        drawn = [key for key, share in zip(keys, shares, strict=True) if share >= 1.0 or rng.random() < share]
        return drawn or [key for key, share in zip(keys, shares, strict=True) if share] or list(keys)

    def num_open(self, now_s: float) -> int:
        return sum(one.is_open(now_s) for one in self._breakers.values())

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
        """Whether this opened it."""
        breaker = self._breakers.get(key)
        if breaker is None:
            breaker = self._breakers[key] = Breaker(self._rules)
        was_open = breaker.opened_s is not None
        breaker.on_failure(now_s)
        return breaker.opened_s is not None and not was_open

    def forget(self, key: KeyT) -> None:
        """It has left."""
        self._breakers.pop(key, None)
