"""Defines leases between the two ends of a transfer, and when their owner checks them. Pure: `now_s` is passed in.

A lease expires unless progress or a heartbeat shows that the peer is alive. Each end sends heartbeats from the loop
that does the work, so a worker whose loop hangs falls silent even if its sockets still answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

HEARTBEATS_A_LEASE = 4  # so that three may be lost or late


@dataclass(slots=True)
class Lease:
    length_s: float
    renewed_s: float

    @property
    def deadline_s(self) -> float:
        return self.renewed_s + self.length_s

    def renew(self, now_s: float) -> None:
        self.renewed_s = max(self.renewed_s, now_s)

    def is_over(self, now_s: float) -> bool:
        return now_s >= self.deadline_s


class Sweeper:
    """Schedules an owner's sweeps over its leases: at the next deadline, and often enough to send heartbeats.

    A lease is only ever extended, and a new one lasts longer than `every_s`, so nothing expires between two sweeps.
    """

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self.next_s: float | None = None  # None: no lease is open

    def is_due(self, now_s: float, any_open: bool) -> bool:
        """Returns whether to sweep now; in that case the caller must call `looked` afterwards."""
        if not any_open:
            self.next_s = None
        elif self.next_s is None:
            self.next_s = now_s + self._every_s
        return self.next_s is not None and now_s >= self.next_s

    def looked(self, now_s: float, deadlines_s: Iterable[float]) -> None:
        """Schedules the next sweep; `deadlines_s` are the deadlines of the open leases."""
        self.next_s = min((now_s + self._every_s, *deadlines_s))


def heartbeat_s(lease_s: float) -> float:
    """Returns the interval between two heartbeats."""
    return lease_s / HEARTBEATS_A_LEASE


def earliest(*moments_s: float | None) -> float | None:
    """Returns the earliest moment that is set, or None."""
    return min((moment_s for moment_s in moments_s if moment_s is not None), default=None)
