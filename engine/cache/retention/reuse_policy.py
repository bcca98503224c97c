"""Predicts when a session uses its pages again, and so which pages are evicted first. Pure.

Least-recently-used eviction fails for agents: sessions come back in turns, so that each finds its pages evicted just
before it needs them. It helps to keep the pages of sessions that come back soon. A session's rate of return is about 1
/ (gap + age): `gap` is its usual time between two turns, `age` the time since its last one. Of two sessions, the one
with the smaller rate is the one with the smaller `last use - gap`, at any time: so the order of eviction never changes
while nothing happens, and a key computed once is enough.

Gaps count relative to the usual gap of all sessions, so that pages of unknown sessions compete on equal terms, and a
cache that knows no session evicts the least recently used page.
"""

from __future__ import annotations

from dataclasses import dataclass

_SMOOTHING = 0.3  # weight of a session's newest gap
_USUAL_SMOOTHING = 0.02  # weight of any session's newest gap in the usual one
_WEIGHT = 1.0  # measured on agent sessions: 0.5 to 2 do about as well, 0 is least recently used
MAX_GAP_S = 3600.0  # longer gaps count as this long


@dataclass(slots=True)
class Gap:
    """A session's usual time between two turns."""

    last_s: float  # end of the last turn
    usual_s: float | None = None  # None until its second turn

    def on_turn(self, now_s: float, fleet_s: float) -> float:
        """Learns from a turn that ends now, and returns the gap before it. `fleet_s` is the usual gap of all."""
        gap_s = min(max(0.0, now_s - self.last_s), MAX_GAP_S)
        before_s = fleet_s if self.usual_s is None else self.usual_s
        self.usual_s = before_s + _SMOOTHING * (gap_s - before_s)
        self.last_s = now_s
        return gap_s


@dataclass(slots=True)
class ReuseModel:
    """Keeps what all sessions of a worker have in common."""

    usual_gap_s: float = 60.0  # until the first gap is known

    def learn(self, gap_s: float) -> None:
        self.usual_gap_s += _USUAL_SMOOTHING * (gap_s - self.usual_gap_s)

    def handicap_s(self, gap: Gap, num_siblings: int = 1) -> float:
        """Returns by how many seconds pages of this session count as older than they are; negative means younger.

        Pages that siblings share are used that many times as often.
        """
        usual_s = self.usual_gap_s if gap.usual_s is None else gap.usual_s
        return _WEIGHT * (usual_s / max(1, num_siblings) - self.usual_gap_s)
