"""The Grafana dashboard and the Prometheus rules: they name metrics that routers have, and runbooks that exist."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
import yaml

from tests.helm_render import CHART, manifests
from tests.test_runbooks import FOLDER, PAGES, metric_names

DASHBOARD = json.loads((CHART / "files" / "grafana-dashboard.json").read_text())
RULES = yaml.safe_load((CHART / "files" / "prometheus-rules.yaml").read_text())
PANELS: list[dict[str, Any]] = [one for one in DASHBOARD["panels"] if one["type"] != "row"]
ALERTS: list[dict[str, Any]] = [rule for group in RULES["groups"] for rule in group["rules"]]
ROWS = ["Requests", "TTFT", "ITL", "Pages", "Transfers", "Hit rate", "Admission", "Pools"]


def check(expression: str) -> None:
    """Brackets match, and every metric named is one that a router exports."""
    for left, right in ("()", "[]", "{}"):
        assert expression.count(left) == expression.count(right), expression
    used = {re.sub(r"_bucket$", "", one) for one in re.findall(r"(?:vllm|penstock):\w+", expression)}
    assert used, expression
    assert used <= metric_names(), expression
    for one in re.findall(r"rate\((\S+?)[{\[]", expression):
        assert one.endswith(("_total", "_bucket")), f"{one} is no counter"


def test_the_dashboard_has_the_runbooks_rows_and_names_metrics_that_exist() -> None:
    assert [one["title"] for one in DASHBOARD["panels"] if one["type"] == "row"] == ROWS
    for panel in PANELS:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            check(target["expr"])
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            grouped = {label.strip() for by in re.findall(r"by \((.*?)\)", target["expr"]) for label in by.split(",")}
            assert shown <= grouped, f"{panel['title']}: {target['legendFormat']}"
    assert len({one["id"] for one in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_metric_but_a_few_is_on_the_dashboard() -> None:
    shown = " ".join(target["expr"] for panel in PANELS for target in panel["targets"])
    unseen = {one for one in metric_names() if one not in shown and not one.endswith("_created")}
    assert unseen == {"penstock:prefix_index_pages", "vllm:request_prompt_tokens"}


def test_panels_do_not_overlap_and_stay_on_the_page() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = set(
            itertools.product(range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"]))
        )
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_alerts_name_metrics_and_a_runbook_that_exist(alert: dict[str, Any]) -> None:
    check(alert["expr"])
    assert alert["for"]
    assert alert["labels"]["severity"] in ("page", "ticket")
    page = FOLDER.parent.parent / alert["annotations"]["runbook"]
    assert page.parent == FOLDER
    assert page.stem in PAGES
    assert alert["alert"] in page.read_text(), f"{page} does not say that this alert leads there"


def test_every_symptom_s_page_has_its_alert_and_is_named_on_the_dashboard() -> None:
    told = " ".join(panel["description"] for panel in PANELS)
    alerted = {alert["annotations"]["runbook"].rpartition("/")[2].removesuffix(".md") for alert in ALERTS}
    done_by_hand = {
        "drain-a-node",
        "upgrade-a-model",
        "ray-head-lost",
    }  # the last has no sign at the routers: that is it
    assert alerted == set(PAGES) - done_by_hand
    assert all(page in told for page in set(PAGES) - {"ray-head-lost"})


def test_the_chart_holds_both_as_they_are() -> None:
    objects = manifests({"metrics": {"dashboard": {"enabled": True}, "rules": {"enabled": True}}})
    (dashboard,) = [one for one in objects if one["kind"] == "ConfigMap"]
    assert json.loads(dashboard["data"]["penstock.json"]) == DASHBOARD
    assert dashboard["metadata"]["labels"] == {"grafana_dashboard": "1"}
    (rules,) = [one for one in objects if one["kind"] == "PrometheusRule"]
    assert rules["spec"] == RULES
    assert not [one for one in manifests() if one["kind"] in ("ConfigMap", "PrometheusRule")]
