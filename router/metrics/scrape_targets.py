"""The workers' own metrics ports, in the form of Prometheus' HTTP service discovery.

Source: https://prometheus.io/docs/prometheus/latest/http_sd/
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.types import WorkerId


@dataclass(frozen=True, slots=True)
class ScrapeTarget:
    """A worker's /metrics. Prometheus adds the labels to each of its series."""

    address: str  # host:port
    worker_id: WorkerId
    role: str

    def to_json(self) -> dict[str, object]:
        """Returns the target as one group of Prometheus' list."""
        return {"targets": [self.address], "labels": {"penstock_worker": self.worker_id, "penstock_role": self.role}}
