"""Who has had how much, and whose turn it is: virtual counters. Pure, without a clock.

Whoever has been served least, by its weight, goes next. One that comes back after a pause is lifted to the least of
those that stayed, so that idle time earns nothing. Reference: Sheng et al., Fairness in Serving Large Language Models,
https://arxiv.org/abs/2401.00588 (VTC). Between two that always have work, service by weight differs by no more than
their dearest requests cost, and what has been charged to them on a guess that is not settled yet.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)

_MANY = 4096  # counters, before those that say nothing are dropped


class FairCounters(Generic[KeyT]):
    """Owns a counter for each tenant, or lane, that competes now or has had more than its share."""

    def __init__(self) -> None:
        self._counters: dict[KeyT, float] = {}
        self._active: set[KeyT] = set()
        self._reached = 0.0  # the highest counter that was the least: where one starts when nobody else competes

    def __getitem__(self, key: KeyT) -> float:
        return self._counters.get(key, self._reached)

    def activate(self, key: KeyT) -> None:
        """It competes from now on. Twice is once."""
        if key in self._active:
            return
        least = min((self._counters[one] for one in self._active), default=self._reached)
        self._counters[key] = max(self._counters.get(key, least), least)
        self._active.add(key)

    def deactivate(self, key: KeyT) -> None:
        """It has no work, or may not have it served now."""
        self._active.discard(key)
        if self._counters.get(key, self._reached) <= self._reached:
            self._counters.pop(key, None)  # it would be lifted at least this far

    def serve(self, key: KeyT, cost: float) -> None:
        """It had the least of all and is served; `cost` is divided by its weight already."""
        self._reached = max(self._reached, self[key])
        self._counters[key] = self[key] + cost
        if len(self._counters) > _MANY + len(self._active):
            self._drop_idle()

    def settle(self, key: KeyT, difference: float, contended: bool) -> None:
        """A service cost that much more, or less, than was charged.

        One without rivals for it took nothing from anybody, so that giving back must not put it ahead of others.
        """
        value = self[key] + difference
        if key not in self._active:
            if value > self._reached:
                self._counters[key] = value
            else:
                self._counters.pop(key, None)
        elif contended:
            self._counters[key] = value
        else:
            self._counters[key] = max(value, min(self._counters[key], self._reached))

    def _drop_idle(self) -> None:
        """Those that would be lifted further than where they are."""
        self._counters = {
            key: value for key, value in self._counters.items() if value > self._reached or key in self._active
        }
