"""Tests that the metrics and runbooks in Grafana dashboards and Prometheus rules exist."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from tests.support.repository.helm_render import CHART, load_yaml, manifests
from tests.system.test_runbooks import FOLDER, PAGES, metric_names

DASHBOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text()) for path in sorted((CHART / "files" / "dashboards").glob("*.json"))
}
RULES = load_yaml((CHART / "files" / "prometheus-rules.yaml").read_text())
PANELS: list[dict[str, Any]] = [
    panel for board in DASHBOARDS.values() for panel in board["panels"] if panel["type"] != "row"
]
ALERTS: list[dict[str, Any]] = [rule for group in RULES["groups"] for rule in group["rules"]]
ROWS = {
    "service": ["At a glance", "Requests", "Time to first token", "Output tokens", "Routers"],
    "pools": ["At a glance", "Workers", "Steps", "KV pages", "Speculation"],
    "kv-transfer": ["At a glance", "Transfers", "Prefix cache"],
    "tenants-and-lanes": ["At a glance", "Lanes", "Tenants"],
}
KINDS = {"timeseries", "stat", "gauge", "bargauge", "heatmap", "table"}


_PATTERN = re.compile(r'__name__=~"([^"]+)"')


def patterns(expression: str) -> list[str]:
    """Returns the regular expressions with which a query selects metrics by name."""
    return _PATTERN.findall(expression)


def check(expression: str) -> None:
    """Fails unless brackets match and a router or a worker exports every metric of the expression."""
    for left, right in ("()", "[]", "{}"):
        assert expression.count(left) == expression.count(right), expression
    for pattern in patterns(expression):
        assert any(re.fullmatch(pattern, each) for each in metric_names()), expression
    expression = _PATTERN.sub("", expression)
    used = {re.sub(r"_bucket$", "", each) for each in re.findall(r"(?:vllm|penstock):\w+", expression)}
    assert used or "__name__" in expression, expression
    assert used <= metric_names(), expression
    for each in re.findall(r"rate\((\S+?)[{\[]", expression):
        assert each.endswith(("_total", "_bucket")), f"{each} is not a counter"


@pytest.mark.parametrize("name", ROWS)
def test_a_dashboard_has_its_rows_and_existing_metrics(name: str) -> None:
    board = DASHBOARDS[name]
    assert board["uid"] == f"penstock-{name}"
    assert [each["title"] for each in board["panels"] if each["type"] == "row"] == ROWS[name]
    assert len({each["id"] for each in board["panels"]}) == len(board["panels"])
    panels = [each for each in board["panels"] if each["type"] != "row"]
    assert len({each["title"] for each in panels}) == len(panels)
    for panel in panels:
        assert panel["type"] in KINDS
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            check(target["expr"])
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            grouped = {label.strip() for by in re.findall(r"by \((.*?)\)", target["expr"]) for label in by.split(",")}
            assert shown <= grouped, f"{panel['title']}: {target['legendFormat']}"


def test_there_are_four_dashboards_with_more_than_graphs() -> None:
    assert set(DASHBOARDS) == set(ROWS)
    assert {panel["type"] for panel in PANELS} == KINDS
    judged = [panel for panel in PANELS if "thresholds" in panel["fieldConfig"]["defaults"]]
    assert {panel["type"] for panel in judged} >= {"timeseries", "stat", "gauge", "bargauge"}
    assert all(panel in judged for panel in PANELS if panel["type"] in ("stat", "gauge", "bargauge"))


def test_every_metric_but_a_few_is_on_a_dashboard() -> None:
    queries = [target["expr"] for panel in PANELS for target in panel["targets"]]
    shown, listed = " ".join(queries), [pattern for query in queries for pattern in patterns(query)]
    unseen = {each for each in metric_names() if each not in shown and not each.endswith("_created")}
    unseen = {each for each in unseen if not any(re.fullmatch(pattern, each) for pattern in listed)}
    assert unseen == {"penstock:prefix_index_pages", "vllm:request_prompt_tokens", "vllm:cache_config_info"}


@pytest.mark.parametrize("name", ROWS)
def test_panels_do_not_overlap_and_stay_on_the_page(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARDS[name]["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = set(
            itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))
        )
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_alerts_use_existing_metrics_and_link_a_runbook(alert: dict[str, Any]) -> None:
    check(alert["expr"])
    assert alert["for"]
    assert alert["labels"]["severity"] in ("page", "ticket")
    page = FOLDER.parent.parent / alert["annotations"]["runbook"]
    assert page.parent == FOLDER
    assert page.stem in PAGES
    assert alert["alert"] in page.read_text(), f"{page} does not say that this alert leads there"


def test_every_runbook_has_an_alert_and_is_linked_from_a_dashboard() -> None:
    text = " ".join(panel["description"] for panel in PANELS)
    alerted = {alert["annotations"]["runbook"].rpartition("/")[2].removesuffix(".md") for alert in ALERTS}
    # The loss of the Ray head shows in no router metric.
    done_by_hand = {"drain-a-node", "upgrade-a-model", "ray-head-lost"}
    assert alerted == set(PAGES) - done_by_hand
    assert all(page in text for page in set(PAGES) - {"ray-head-lost"})


def test_the_chart_holds_the_dashboards_and_the_rules_unchanged() -> None:
    objects = manifests({"metrics": {"dashboard": {"enabled": True}, "rules": {"enabled": True}}})
    (boards,) = [each for each in objects if each["kind"] == "ConfigMap"]
    held = {name: json.loads(text) for name, text in boards["data"].items()}
    assert held == {f"penstock-{name}.json": board for name, board in DASHBOARDS.items()}
    assert boards["metadata"]["labels"] == {"grafana_dashboard": "1"}
    (rules,) = [each for each in objects if each["kind"] == "PrometheusRule"]
    assert rules["spec"] == RULES
    assert not [each for each in manifests() if each["kind"] in ("ConfigMap", "PrometheusRule")]
