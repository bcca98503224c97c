"""Decides whose turn it is by virtual counters of what each has been served. Pure, without a clock.

Whoever has been served least, by weight, goes next. A competitor that returns after a pause is lifted to the least of
those that stayed, so that idle time earns nothing. Reference: Sheng et al., Fairness in Serving Large Language Models,
https://arxiv.org/abs/2401.00588 (VTC). Between two that always have work, service by weight differs by no more than
the cost of their most expensive requests plus what has been charged on estimates that are not settled yet.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)

_MAX_IDLE = 4096  # counters of idle keys, before those without information are dropped


class FairCounters(Generic[KeyT]):
    """Keeps a counter for each tenant or lane that competes now or has had more than its share."""

    def __init__(self) -> None:
        self._counters: dict[KeyT, float] = {}
        self._active: set[KeyT] = set()
        self._reached = 0.0  # highest counter that was ever the least: the start of a key that competes alone

    def __getitem__(self, key: KeyT) -> float:
        return self._counters.get(key, self._reached)

    def activate(self, key: KeyT) -> None:
        """Lets a key compete from now on. Idempotent."""
        if key in self._active:
            return
        least = min((self._counters[active] for active in self._active), default=self._reached)
        self._counters[key] = max(self._counters.get(key, least), least)
        self._active.add(key)

    def deactivate(self, key: KeyT) -> None:
        """Marks a key that has no work, or whose work may not be served now."""
        self._active.discard(key)
        if self._counters.get(key, self._reached) <= self._reached:
            self._counters.pop(key, None)  # it would be lifted at least this far

    def serve(self, key: KeyT, cost: float) -> None:
        """Charges the key with the least counter for being served; `cost` is already divided by its weight."""
        self._reached = max(self._reached, self[key])
        self._counters[key] = self[key] + cost
        if len(self._counters) > _MAX_IDLE + len(self._active):
            self._drop_idle()

    def settle(self, key: KeyT, difference: float, contended: bool) -> None:
        """Adds the difference between a service's cost and what was charged for it.

        A service without competitors took nothing from others, so that a refund must not put its key ahead of them.
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
        """Drops idle counters that would be lifted beyond their value anyway."""
        self._counters = {
            key: value for key, value in self._counters.items() if value > self._reached or key in self._active
        }
