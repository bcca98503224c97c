"""Tests that the Grafana dashboard and the Prometheus rules name existing metrics and runbooks."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
import yaml

from tests.support.repository.helm_render import CHART, manifests
from tests.system.test_runbooks import FOLDER, PAGES, metric_names

DASHBOARD = json.loads((CHART / "files" / "grafana-dashboard.json").read_text())
RULES = yaml.safe_load((CHART / "files" / "prometheus-rules.yaml").read_text())
PANELS: list[dict[str, Any]] = [each for each in DASHBOARD["panels"] if each["type"] != "row"]
ALERTS: list[dict[str, Any]] = [rule for group in RULES["groups"] for rule in group["rules"]]
ROWS = [
    "At a glance",
    "Requests",
    "TTFT",
    "ITL",
    "Pages",
    "Transfers",
    "Hit rate",
    "Admission",
    "Pools",
    "Stages",
    "Workers",
]


def check(expression: str) -> None:
    """Fails unless brackets match and a router or a worker exports every named metric."""
    for left, right in ("()", "[]", "{}"):
        assert expression.count(left) == expression.count(right), expression
    used = {re.sub(r"_bucket$", "", each) for each in re.findall(r"(?:vllm|penstock):\w+", expression)}
    assert used, expression
    assert used <= metric_names(), expression
    for each in re.findall(r"rate\((\S+?)[{\[]", expression):
        assert each.endswith(("_total", "_bucket")), f"{each} is not a counter"


def test_the_dashboard_has_the_runbooks_rows_and_names_metrics_that_exist() -> None:
    assert [each["title"] for each in DASHBOARD["panels"] if each["type"] == "row"] == ROWS
    for panel in PANELS:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            check(target["expr"])
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            grouped = {label.strip() for by in re.findall(r"by \((.*?)\)", target["expr"]) for label in by.split(",")}
            assert shown <= grouped, f"{panel['title']}: {target['legendFormat']}"
    assert len({each["id"] for each in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_metric_but_a_few_is_on_the_dashboard() -> None:
    shown = " ".join(target["expr"] for panel in PANELS for target in panel["targets"])
    unseen = {each for each in metric_names() if each not in shown and not each.endswith("_created")}
    by_worker = {"penstock:worker_preemptions_total", "penstock:worker_preempted_tokens_total"}  # shown in all
    assert unseen == {"penstock:prefix_index_pages", "vllm:request_prompt_tokens", "vllm:cache_config_info", *by_worker}


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


def test_every_symptoms_page_has_an_alert_and_is_named_on_the_dashboard() -> None:
    text = " ".join(panel["description"] for panel in PANELS)
    alerted = {alert["annotations"]["runbook"].rpartition("/")[2].removesuffix(".md") for alert in ALERTS}
    # The loss of the Ray head shows in no router metric.
    done_by_hand = {"drain-a-node", "upgrade-a-model", "ray-head-lost"}
    assert alerted == set(PAGES) - done_by_hand
    assert all(page in text for page in set(PAGES) - {"ray-head-lost"})


def test_the_chart_holds_the_dashboard_and_the_rules_unchanged() -> None:
    objects = manifests({"metrics": {"dashboard": {"enabled": True}, "rules": {"enabled": True}}})
    (dashboard,) = [each for each in objects if each["kind"] == "ConfigMap"]
    assert json.loads(dashboard["data"]["penstock.json"]) == DASHBOARD
    assert dashboard["metadata"]["labels"] == {"grafana_dashboard": "1"}
    (rules,) = [each for each in objects if each["kind"] == "PrometheusRule"]
    assert rules["spec"] == RULES
    assert not [each for each in manifests() if each["kind"] in ("ConfigMap", "PrometheusRule")]
