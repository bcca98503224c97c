"""Learns how long reads from the shared store take. Pure: time is passed in.

The costs of pulls are forgotten after a minute without pulls (`worker.pull.policy`). These last longer, because a store
that is far away stays far away.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.scheduling.linear_cost import LinearCost
from worker.pull.store.store_threads import NUM_READERS

_PRIOR = (2e-3, 1e-9)  # seconds per object, and per byte
_STALE_S = 600.0  # after this long without a read the store may have become faster, which only a read shows


@dataclass(slots=True)
class ReadCosts:
    _cost: LinearCost = field(default_factory=lambda: LinearCost(_PRIOR))
    _learned_s: float = 0.0

    def observe(self, num_bytes: int, seconds: float, now_s: float) -> None:
        """Learns from the read of one object."""
        self._cost.observe((1, num_bytes), seconds)
        self._learned_s = now_s

    def predict(self, num_objects: int, object_bytes: int, now_s: float) -> float:
        """Returns the seconds until that many objects have been read, several at once."""
        if self._cost.num_observed and now_s > self._learned_s + _STALE_S:
            self._cost = LinearCost(_PRIOR)
        return -(-num_objects // NUM_READERS) * self._cost.predict((1, object_bytes))
