"""In which order requests of different lanes are served where they compete: by age, with a head start. Pure.

A newcomer's rank is the work that was done before it came, plus a handicap for its lane (and what else its owner adds);
lower ranks go first. Ranks never change and the work done only grows, so everybody's turn comes: whoever arrives once
as much work as its handicap was done since goes behind it, whatever the lane. Work counts in the owner's own unit, so
there is no clock: a queue that stands still ages nobody.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.types import Lane


class Aging:
    """Owns the count of work done."""

    def __init__(self, handicaps: Mapping[Lane, float]) -> None:
        """Work that may be done for later arrivals before one of that lane."""
        self._handicaps = dict(handicaps)
        self._done = 0.0

    def rank(self, lane: Lane) -> float:
        return self._done + self._handicaps[lane]

    def advance(self, work: float) -> None:
        """So much work was done."""
        self._done += work
