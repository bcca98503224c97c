"""Counts how long a process has been silent, by an observer that may itself stand still. Pure.

On a busy machine the observer gets no core either. Reports that came meanwhile wait in its sockets, and its timers fire
before it reads them. Time in which it did not look proves nothing, so each look counts for a short while at most.
"""

from __future__ import annotations

TICK_S = 0.2  # between two looks
_MOST_S = 2 * TICK_S  # that one look counts for


class SilenceClock:
    def __init__(self, now_s: float) -> None:
        self.silent_s = 0.0
        self._looked_s = now_s

    def look(self, now_s: float) -> float:
        """Returns the seconds of silence, now that nothing was heard."""
        self.silent_s += min(_MOST_S, max(0.0, now_s - self._looked_s))
        self._looked_s = now_s
        return self.silent_s

    def hear(self, now_s: float) -> None:
        self.silent_s, self._looked_s = 0.0, now_s
