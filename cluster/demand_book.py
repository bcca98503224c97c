"""What routers have told of their traffic, as one: sums that never fall, whichever routers come, go or begin anew."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields

from cluster.scaling_signals import DemandSignal
from penstock.v1 import admin_pb2

_NOW = {"waiting", "waiting_tokens"}  # of this moment; everything else is counted up
_COUNTED = [one.name for one in fields(DemandSignal) if one.name not in _NOW]


@dataclass(slots=True)
class _Told:
    report: admin_pb2.DemandReport
    at_s: float


@dataclass(slots=True)
class DemandBook:
    _told: dict[str, _Told] = field(default_factory=dict)  # by router
    _sums: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0))

    def tell(self, report: admin_pb2.DemandReport, now_s: float) -> None:
        before = self._told.get(report.router)
        known = before.report if before is not None and before.report.epoch == report.epoch else None
        for name in _COUNTED:
            self._sums[name] += max(0, getattr(report, name) - (getattr(known, name) if known else 0))
        self._told[report.router] = _Told(report, now_s)

    def signal(self, routers: Collection[str], now_s: float, stale_s: float) -> DemandSignal | None:
        """None where there is no router, or one of them has been silent for too long."""
        for gone in self._told.keys() - set(routers):
            del self._told[gone]
        if not routers or any(one not in self._told or now_s - self._told[one].at_s > stale_s for one in routers):
            return None
        waiting = {name: sum(getattr(one.report, name) for one in self._told.values()) for name in _NOW}
        return DemandSignal(**self._sums, **waiting)
