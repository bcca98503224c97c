"""What other routers have sent to workers and the workers' load reports do not show yet. Pure.

Reports are whole states, not changes: a lost, late or repeated one does no harm, and a router that falls silent is
forgotten after a moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.types import Epoch, WorkerId
from router.inflight import NO_WORK, Work

STALE_S = 2.0  # a report comes every half second


@dataclass(slots=True)
class _Report:
    epoch: Epoch
    number: int
    heard_s: float
    work: Mapping[WorkerId, Work]


class PeerLoad:
    """The newest report of each other router, by its address."""

    def __init__(self) -> None:
        self._reports: dict[str, _Report] = {}

    def apply(self, peer: str, epoch: Epoch, number: int, work: Mapping[WorkerId, Work], now_s: float) -> None:
        """Replaces what the peer said before; without effect where this is the older one."""
        known = self._reports.get(peer)
        if known is None or (epoch, number) > (known.epoch, known.number):
            self._reports[peer] = _Report(epoch, number, now_s, work)

    def sent_to(self, worker_id: WorkerId, now_s: float) -> Work:
        total = NO_WORK
        for report in self._reports.values():
            if worker_id in report.work and now_s - report.heard_s < STALE_S:
                total += report.work[worker_id]
        return total

    def drop(self, peer: str) -> None:
        """The router has left."""
        self._reports.pop(peer, None)
