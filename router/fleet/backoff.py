"""Computes growing, jittered pauses between attempts to reach a worker, another router or the controller. Pure."""

from __future__ import annotations

import random

_FIRST_S = 0.05
_LONGEST_S = 2.0


class Backoff:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._pause_s = _FIRST_S

    def reset(self) -> None:
        self._pause_s = _FIRST_S

    def next_s(self) -> float:
        """Returns 50 to 100 % of a time that doubles with each call; the jitter keeps routers from reconnecting in
        step.
        """
        pause_s = self._pause_s
        self._pause_s = min(_LONGEST_S, 2 * pause_s)
        return pause_s * self._rng.uniform(0.5, 1.0)
