"""Tests that each alert fires on its symptom, and that one fires when nothing is exported any more.

Prometheus' own `promtool` evaluates the rules where it is installed (`apt-get install prometheus`); the series and
labels in the expressions are checked everywhere.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.errors import Cancelled, InvalidInput, ModelNotFound, PermissionDenied, Unauthenticated
from tests.repository.test_deploy_monitoring import ALERTS
from tests.support.repository.helm_render import CHART

RULES = CHART / "files" / "prometheus-rules.yaml"
PROMTOOL = shutil.which("promtool")
EVERY_ROUTER = "vllm:num_requests_running"  # series that a router exports from its start, without the label worker
NAMES = [alert["alert"] for alert in ALERTS]
# Alerts on total absence. All other alerts watch routers' series, whose absence these report.
ABSENCE = ("PenstockNoRouter", "PenstockRouterLost", "PenstockRouterUnreachable")

Series = Mapping[str, str]  # values in promtool's notation, by series, one for each minute
M = 'model_name="m"'
R1, R2 = f'{{{M}, job="penstock", instance="r1"}}', f'{{{M}, job="penstock", instance="r2"}}'


def histogram(name: str, *, fast: int, slow: int) -> Series:
    """Returns a histogram with so many observations per minute below 10 ms, and below 60 s."""
    bounds = {"0.01": fast, "60.0": fast + slow, "+Inf": fast + slow}
    return {f'{name}_bucket{{{M}, le="{bound}"}}': f"0+{count}x600" for bound, count in bounds.items()}


# The series of each symptom, and the minute by which its alert fires.
SYMPTOMS: dict[str, tuple[Series, int]] = {
    "PenstockTtftBurning": (histogram("vllm:time_to_first_token_seconds", fast=1, slow=9), 80),
    "PenstockItlBurning": (histogram("vllm:inter_token_latency_seconds", fast=1, slow=9), 80),
    "PenstockPagesExhausted": (
        {f"vllm:kv_cache_usage_perc{R1}": "0.99x100", f"vllm:num_preemptions_total{R1}": "0+5x100"},
        20,
    ),
    "PenstockTransferFailures": ({f"penstock:open_circuits{R1}": "2x100"}, 20),
    "PenstockHitRateFell": (
        {
            f"vllm:prefix_cache_queries_total{R1}": "0+100x600",
            f"vllm:prefix_cache_hits_total{R1}": "0+80x420 33600x180",
        },
        480,
    ),
    "PenstockIndexMistaken": ({f'penstock:worker_cache_shortfall{{{M}, worker="decode-0"}}': "0.9x100"}, 30),
    "PenstockPoolIsDown": ({f'penstock:workers{{{M}, role="decode"}}': "2x10 0x600"}, 300),
    "PenstockRequestsFail": (
        {
            f"vllm:request_success_total{R1}": "0+90x100",
            f'vllm:request_errors_total{{{M}, instance="r1", reason="UNAVAILABLE"}}': "0+10x100",
        },
        30,
    ),
    "PenstockRouterLost": ({f"{EVERY_ROUTER}{R1}": "0x100", f"{EVERY_ROUTER}{R2}": "0x10 stale"}, 30),
    "PenstockNoRouter": ({}, 10),
    "PenstockRouterUnreachable": (
        {f"{EVERY_ROUTER}{R1}": "0x10 stale", 'up{job="penstock", instance="r1"}': "1x10 0x600"},
        200,
    ),
    "PenstockOverloaded": ({f"penstock:saturation{R1}": "0.9x100"}, 20),
    "PenstockFenceIsStuck": ({f'penstock:worker_oldest_fence_seconds{{{M}, worker="decode-0"}}': "0+60x100"}, 20),
    "PenstockDisaggregationMissed": (
        {
            f'penstock:prompt_tokens_planned_total{{{M}, place="prefill worker"}}': "0+100x100",
            f'penstock:prompt_tokens_by_place_total{{{M}, place="prefill worker"}}': "0+100x30 3000+50x70",
        },
        60,
    ),
    "PenstockPagesMismatched": (
        {f'penstock:worker_handoff_mismatches_total{{{M}, worker="decode-0"}}': "0x5 2x100"},
        8,
    ),
    "PenstockWeightsDiffer": (
        {f'penstock:worker_weights_version{{{M}, worker="decode-{i}"}}': f"1x5 {1 + i}x100" for i in range(2)},
        20,
    ),
    "PenstockOutOfMemory": ({f'penstock:worker_oom_kills_total{{{M}, worker="decode-0"}}': "0x5 1x100"}, 8),
    "PenstockKeysRefused": ({f'penstock:credentials_refused{{{M}, setting="tls", instance="r1"}}': "1x100"}, 20),
    "PenstockPoolsOutOfBalance": (
        {**histogram("vllm:request_queue_time_seconds", fast=1, slow=9), f"vllm:kv_cache_usage_perc{R1}": "0.1x600"},
        60,
    ),
    "PenstockTenantAbuse": (
        {
            f'penstock:tenant_tokens_total{{{M}, tenant="loud"}}': "0+900x100",
            f'penstock:tenant_tokens_total{{{M}, tenant="quiet"}}': "0+10x100",
            f"penstock:admission_refusals_total{R1}": "0+5x100",
        },
        40,
    ),
}


def test_every_alert_has_its_symptom_and_handles_missing_series_deliberately() -> None:
    assert sorted(SYMPTOMS) == sorted(NAMES)
    expressions = {alert["alert"]: alert["expr"] for alert in ALERTS}
    of_routers = re.escape(f'{EVERY_ROUTER}{{worker=""}}')
    assert re.fullmatch(rf"absent\({of_routers}\)", expressions["PenstockNoRouter"].strip())
    assert re.search(rf"or 0 \* .*\({of_routers}\[1d\]\)\)\s+unless count", expressions["PenstockRouterLost"])
    assert expressions["PenstockRouterUnreachable"].startswith("up == 0 and on (job, instance)")
    for name, expression in expressions.items():
        assert ("absent(" in expression or "unless" in expression or "up ==" in expression) is (name in ABSENCE), name


def promtool_test(tmp_path: Path, tests: list[dict[str, Any]]) -> None:
    """Fails unless `promtool test rules` passes."""
    assert PROMTOOL is not None
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES.read_text())
    spec = tmp_path / "test.yaml"
    spec.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}))
    result = subprocess.run([PROMTOOL, "test", "rules", str(spec)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr


def firing(series: Series, expected: Mapping[int, Collection[str]]) -> dict[str, Any]:
    """Returns a test of which alerts fire at each minute."""
    return {
        "interval": "1m",
        "name": f"firing: {dict(expected)}",
        "input_series": [{"series": each, "values": values} for each, values in series.items()],
        "promql_expr_test": [
            {
                "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(names)],
            }
            for minute, names in expected.items()
        ],
    }


needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (apt-get install prometheus)")


@needs_promtool
def test_promtool_accepts_the_rules() -> None:
    assert PROMTOOL is not None
    result = subprocess.run([PROMTOOL, "check", "rules", str(RULES)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert f"{len(NAMES)} rules found" in result.stdout


@needs_promtool
def test_every_alert_fires_on_its_symptom(tmp_path: Path) -> None:
    tests = []
    for name, (series, minute) in SYMPTOMS.items():
        present = {} if name in ABSENCE else {f"{EVERY_ROUTER}{R1}": "0x600"}
        also = {"PenstockNoRouter", "PenstockRouterLost"} if name == "PenstockRouterUnreachable" else set()
        tests.append(firing({**present, **series}, {minute: {name, *also}}))
    promtool_test(tmp_path, tests)


@needs_promtool
def test_what_clients_did_wrong_pages_nobody(tmp_path: Path) -> None:
    own_faults = (InvalidInput, Unauthenticated, PermissionDenied, ModelNotFound, Cancelled)
    series = {f"{EVERY_ROUTER}{R1}": "0x600", f"vllm:request_success_total{R1}": "0+90x100"}
    for error in own_faults:
        series[f'vllm:request_errors_total{{{M}, instance="r1", reason="{error.reason}"}}'] = "0+10x100"
    promtool_test(tmp_path, [firing(series, {30: ()})])


def healthy(minutes: int, then: str) -> Series:
    """Returns what two routers of a healthy deployment export for a while, and what follows."""
    exported = (EVERY_ROUTER, "vllm:kv_cache_usage_perc", "penstock:open_circuits", "penstock:overload_level")
    series = {f"{name}{router}": f"0x{minutes} {then}".strip() for name in exported for router in (R1, R2)}
    workers = [f'penstock:workers{{{M}, role="{role}"}}' for role in ("prefill", "decode")]
    return series | {name: f"2x{minutes} {then}".strip() for name in workers}


@needs_promtool
def test_the_right_alerts_fire_when_nothing_is_exported_any_more(tmp_path: Path) -> None:
    gone = healthy(60, "stale") | {f'up{{job="penstock", instance="{each}"}}': "1x60 0x200" for each in ("r1", "r2")}
    # Workers that are scraped directly do not count as a router.
    gone |= {f'{EVERY_ROUTER}{{{M}, worker="decode-0", instance="w1", job="workers"}}': "1x300"}
    # Nothing was ever exported, or Prometheus lost its targets.
    promtool_test(tmp_path, [firing(gone, {50: (), 70: ABSENCE, 200: ABSENCE}), firing({}, {10: ["PenstockNoRouter"]})])
