"""Decides whether a silent process is in doubt or lost, for an observer that may itself stand still. Pure.

On a busy machine the observer itself may get no core. Reports then wait in its sockets, and its timers fire before it
reads them. Time in which it did not look proves nothing, so each look counts for a short while at most.
"""

from __future__ import annotations

DOUBT_AFTER_S = 2.3  # of silence: two reports are overdue
LOST_AFTER_S = 6.0  # of silence
TICK_S = 0.2  # between two calls of `look`
_LEAST_LEFT_S = 0.2
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

    @property
    def doubt(self) -> str:
        """The reason why the process gets no new work until its next sign of life, or ""."""
        return f"no sign of life for {DOUBT_AFTER_S:g} s" if self.silent_s >= DOUBT_AFTER_S else ""

    @property
    def is_loss(self) -> bool:
        """Returns whether the process counts as lost at the next look."""
        return self.silent_s >= LOST_AFTER_S - TICK_S

    @property
    def left_s(self) -> float:
        """Seconds until the silence counts as a loss; at least enough for an answer to arrive."""
        return max(_LEAST_LEFT_S, LOST_AFTER_S - self.silent_s)
