"""Shares service fairly between tenants or lanes, by virtual counters of the service that each received. Pure, without
a clock.

The key with the lowest counter goes next. Its counter then grows by the cost of the service divided by the key's
weight. A key that returns after a pause is raised to the lowest counter of the active keys, so that idle time earns no
credit. Reference: Sheng et al., Fairness in Serving Large Language Models, https://arxiv.org/abs/2401.00588 (VTC).
Between two keys that always have work, weighted service differs by no more than the cost of their most expensive
requests plus the estimated charges that are not settled yet.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)

_MAX_IDLE = 4096  # above this many counters of idle keys, those that carry no information are dropped


class FairCounters(Generic[KeyT]):
    """Keeps a counter for each active key and for idle keys that received more than their share."""

    def __init__(self) -> None:
        self._counters: dict[KeyT, float] = {}
        self._active: set[KeyT] = set()
        self._reached = 0.0  # highest value that the lowest counter ever had; a key that is alone starts here

    def __getitem__(self, key: KeyT) -> float:
        return self._counters.get(key, self._reached)

    def activate(self, key: KeyT) -> None:
        """Lets a key compete from now on. Idempotent."""
        if key in self._active:
            return
        lowest = min((self._counters[active] for active in self._active), default=self._reached)
        self._counters[key] = max(self._counters.get(key, lowest), lowest)
        self._active.add(key)

    def deactivate(self, key: KeyT) -> None:
        """Stops a key from competing: it has no work, or its work may not be served now."""
        self._active.discard(key)
        if self._counters.get(key, self._reached) <= self._reached:
            self._counters.pop(key, None)  # `activate` would raise it at least this far

    def serve(self, key: KeyT, cost: float) -> None:
        """Charges a key that was served; `cost` is already divided by its weight."""
        self._reached = max(self._reached, self[key])
        self._counters[key] = self[key] + cost
        if len(self._counters) > _MAX_IDLE + len(self._active):
            self._drop_idle()

    def settle(self, key: KeyT, difference: float, contended: bool) -> None:
        """Adds the difference between a service's actual cost and what was charged for it.

        A service that was not `contended` took nothing from other keys, so a refund must not put its key ahead of them.
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
            others = min((self._counters[active] for active in self._active if active != key), default=self._reached)
            self._counters[key] = max(value, min(self._counters[key], others))

    def _drop_idle(self) -> None:
        """Drops idle counters that `activate` would raise above their value anyway."""
        self._counters = {
            key: value for key, value in self._counters.items() if value > self._reached or key in self._active
        }
