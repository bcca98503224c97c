"""Describes the workers' metrics ports in the format of Prometheus' HTTP service discovery.

Source: https://prometheus.io/docs/prometheus/latest/http_sd/
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.types import WorkerId


@dataclass(frozen=True, slots=True)
class ScrapeTarget:
    """The address of a worker's /metrics, with the labels that Prometheus adds to each of its series."""

    address: str  # host:port
    worker_id: WorkerId
    role: str

    def to_json(self) -> dict[str, object]:
        """Returns one entry of the list that Prometheus reads."""
        return {"targets": [self.address], "labels": {"penstock_worker": self.worker_id, "penstock_role": self.role}}
