"""Sums the traffic reports of all routers into totals that never fall, even when routers come, go or restart."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields

from cluster.scaling.signals import DemandSignal
from penstock.v1 import admin_pb2

_GAUGES = {"waiting", "waiting_tokens"}  # current values; all other fields are counters
_COUNTERS = [each.name for each in fields(DemandSignal) if each.name not in _GAUGES]


@dataclass(slots=True)
class _RouterReport:
    report: admin_pb2.DemandReport
    at_s: float


@dataclass(slots=True)
class DemandTotals:
    """Keeps each router's latest report and the sums of all."""

    _reports: dict[str, _RouterReport] = field(default_factory=dict)
    _sums: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTERS, 0))

    def on_report(self, report: admin_pb2.DemandReport, now_s: float) -> None:
        """Adds what a router has counted since its previous report."""
        before = self._reports.get(report.router)
        known = before.report if before is not None and before.report.epoch == report.epoch else None
        for name in _COUNTERS:
            self._sums[name] += max(0, getattr(report, name) - (getattr(known, name) if known else 0))
        self._reports[report.router] = _RouterReport(report, now_s)

    def signal(self, routers: Collection[str], now_s: float, stale_s: float) -> DemandSignal | None:
        """Returns the totals; None if there are no routers or one has not reported for `stale_s`."""
        for gone in self._reports.keys() - set(routers):
            del self._reports[gone]
        reports = self._reports
        if not routers or any(name not in reports or now_s - reports[name].at_s > stale_s for name in routers):
            return None
        gauges = {name: sum(getattr(each.report, name) for each in reports.values()) for name in _GAUGES}
        return DemandSignal(**self._sums, **gauges)
