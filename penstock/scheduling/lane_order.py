"""Orders competing requests of different lanes by age, with a head start for urgent lanes. Pure.

A new request's rank is the work done before its arrival plus a handicap for its lane (and whatever its owner adds);
lower ranks go first. Ranks never change and the work done only grows, so every request gets its turn: once as much work
as its handicap was done since its arrival, later requests of any lane queue behind it. Work is counted in the owner's
own unit, not in time, so requests do not age in a queue that is not served.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.types import Lane


class LaneOrder:
    """Owns the count of work done. Used by the prefill and decode schedulers and the sender's queue."""

    def __init__(self, handicaps: Mapping[Lane, float]) -> None:
        """`handicaps` holds, for each lane, the work for later arrivals that may be done before a request."""
        self._handicaps = dict(handicaps)
        self._done = 0.0

    def rank(self, lane: Lane) -> float:
        """Returns the rank of a request that arrives now."""
        return self._done + self._handicaps[lane]

    def advance(self, work: float) -> None:
        """Records work that was done."""
        self._done += work
