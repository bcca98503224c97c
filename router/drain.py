"""How fast a queue moves, and means of what came last. Pure: time is passed in."""

from __future__ import annotations

import math

_WINDOW_S = 5.0
_LEAST_EVIDENCE_S = 0.5  # of backlog, before its rate is believed
_FORGET_S = 60.0  # a rate measured that long ago says nothing of today's fleet
_MEAN_SHARE = 0.05  # of a new sample in a mean


class Mean:
    """Of what came last, the first samples by their plain average. None before there is one."""

    def __init__(self) -> None:
        self._count = 0
        self.value: float | None = None

    def add(self, sample: float) -> None:
        self._count += 1
        share = max(_MEAN_SHARE, 1.0 / self._count)
        self.value = sample if self.value is None else self.value + share * (sample - self.value)


class DrainRate:
    """What leaves a queue in a second while there is one; without a queue nothing is learnt."""

    def __init__(self) -> None:
        self._seen_s: float | None = None  # while there is a queue
        self._ended_s = -math.inf
        self._left = 0.0  # decaying
        self._time_s = 0.0  # with a queue, decaying alike

    def observe(self, left: float, backlogged: bool, now_s: float) -> None:
        """So much has left since the last call, and at its end there is a queue, or none."""
        passed_s = 0.0 if self._seen_s is None else max(0.0, now_s - self._seen_s)
        decay = math.exp(-passed_s / _WINDOW_S)
        self._left = self._left * decay + left
        self._time_s = self._time_s * decay + _WINDOW_S * (1.0 - decay)
        self._seen_s = now_s if backlogged else None
        if not backlogged:
            self._ended_s = now_s

    def per_s(self, now_s: float) -> float | None:
        """None where too little has been seen, or too long ago."""
        if self._seen_s is None:
            if self._time_s < _LEAST_EVIDENCE_S or now_s - self._ended_s > _FORGET_S:
                return None
            return self._left / self._time_s
        time_s = self._time_s + max(0.0, now_s - self._seen_s)
        return self._left / time_s if time_s >= _LEAST_EVIDENCE_S else None
