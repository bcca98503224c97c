"""The panels of the Grafana dashboards and the queries that they send to Prometheus."""

from __future__ import annotations

import json
from typing import Any

from tests.support.repository.helm_render import CHART

BOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text()) for path in sorted((CHART / "files" / "dashboards").glob("*.json"))
}


def queries(panel: dict[str, Any]) -> list[str]:
    """Returns the queries of a panel; a row has none."""
    return [target["expr"] for target in panel.get("targets", [])]


def in_prometheus(query: str) -> str:
    """Returns a query with Grafana's variables filled in: every model, and rates over ten seconds."""
    return query.replace("$__rate_interval", "10s").replace("$model", ".*")
