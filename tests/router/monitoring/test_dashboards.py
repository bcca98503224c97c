"""Runs the query of every panel against a real Prometheus: each is valid, and has data where a demo can make it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.support.router.dashboard_page import BOARDS, in_prometheus, queries
from tests.support.router.prometheus import PROMETHEUS, Prometheus, demo_load, watched_deployment

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(PROMETHEUS is None, reason="needs Prometheus (apt-get install prometheus)"),
]

# Queries that may return nothing, as (dashboard, panel), because a healthy demo on CPUs has no data for them.
NO_DATA = {
    ("kv-transfer", "KV events of other engines"),  # there are no such events
    ("kv-transfer", "Mean time of a pull"),  # the prompts are shorter than `transfer.min_pull_tokens`
    ("kv-transfer", "Pages pulled a second"),
    ("kv-transfer", "Pulls a second"),
    ("kv-transfer", "Pages that hints hold"),  # no request uses it
    ("kv-transfer", "Pages kept from dead workers"),  # there is no keeper
    ("kv-transfer", "Pages of the shared store a second"),  # there is none
    ("kv-transfer", "Calls of the shared store a second"),
    ("kv-transfer", "Bytes of the shared store a second"),
    ("kv-transfer", "Mean time of the shared store's calls"),
    ("kv-transfer", "Bytes in the shared store, and its use"),
    ("pools", "Device use"),  # no peak is published for a CPU
    ("pools", "Slots of windowed layers by state"),  # pages are whole
    ("service", "Failures a second"),
    ("service", "Gateways' calls a second"),  # there is no picker
    ("service", "Traces a second"),  # traces are off
    ("tenants-and-lanes", "Refusals a second"),
}
LOAD_S = 5.0


@pytest.fixture(scope="module")
def prometheus() -> Iterator[Prometheus]:
    with watched_deployment() as (router, keys, server):
        with demo_load(router, keys, num_callers=2):
            time.sleep(LOAD_S)  # rates need several scrapes
        yield server


@pytest.mark.parametrize("board", BOARDS)
def test_every_panel_of_a_dashboard_has_data(board: str, prometheus: Prometheus) -> None:
    empty: set[tuple[str, str, str]] = set()
    for panel in BOARDS[board]["panels"]:
        for query in queries(panel):
            if not prometheus.over_time(in_prometheus(query), 30.0):
                empty.add((board, panel["title"], query))
    assert {each[:2] for each in empty} == {each for each in NO_DATA if each[0] == board}, empty
