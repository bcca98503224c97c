"""Tests the predicted wait for pages: while pages are short, requests go where their conversation is cached."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import KvAwareConfig
from penstock.types import WorkerId, WorkerLoad
from router.routing.costs.inflight import InflightWork
from router.routing.policy import prices
from router.routing.policy.interface import PlacementDemand, WorkerLimits, WorkerView
from router.routing.policy.kv_aware import KvAwarePolicy

A, B = WorkerId("a"), WorkerId("b")
PREFILL = [WorkerView(WorkerId("p"), WorkerLoad(), 16)]
REMOTE = WorkerLimits(max_local_tokens=0)


def decode(worker_id: WorkerId, free_pages: int, num_waiting: int, num_running: int = 8) -> WorkerView:
    load = WorkerLoad(
        num_running=num_running, num_waiting=num_waiting, free_pages=free_pages, total_pages=1000, step_s=0.02
    )
    return WorkerView(worker_id, load, 16, limits=REMOTE)


def chosen(cached: dict[WorkerId, int], views: list[WorkerView], weights: KvAwareConfig | None = None) -> WorkerId:
    demand = PlacementDemand(4000, 1.0, cached_tokens=cached)
    return KvAwarePolicy(weights or KvAwareConfig()).choose(demand, views, PREFILL, random.Random(0)).decode


def test_a_conversation_stays_with_its_pages_while_others_wait_for_pages() -> None:
    busier_holder = [decode(A, 4, num_waiting=6), decode(B, 4, num_waiting=5)]
    assert chosen({A: 3900}, busier_holder) == A
    blind = KvAwareConfig(contention_weight=0.0)
    assert chosen({}, busier_holder) == chosen({}, busier_holder, blind) == B


def test_nobody_waits_while_pages_suffice() -> None:
    demand = PlacementDemand(4000, 1.0)
    assert prices.page_delay_s(demand, decode(A, 250, num_waiting=50)) == 0.0
    assert prices.page_delay_s(demand, decode(A, 249, num_waiting=0)) == 0.0
    assert prices.page_delay_s(demand, decode(A, 249, num_waiting=1)) > 0.0


@given(st.integers(0, 40), st.integers(1, 40), st.integers(0, 249), st.integers(0, 4000))
def test_more_waiting_requests_and_fewer_cached_pages_cost_more(
    waiting: int, running: int, free: int, cached: int
) -> None:
    view, longer = decode(A, free, waiting, running), decode(A, free, waiting + 1, running)
    less, more = PlacementDemand(4000, 1.0), PlacementDemand(4000, 1.0, cached_tokens={A: cached})
    assert prices.decode_queue_s(less, view) <= prices.decode_queue_s(less, longer)
    assert prices.decode_queue_s(more, view) <= prices.decode_queue_s(less, view)
    assert prices.page_delay_s(less, view) <= prices.page_delay_s(less, longer)
    assert prices.page_delay_s(more, view) <= prices.page_delay_s(less, view)


def test_the_wait_for_pages_counts_earlier_requests() -> None:
    """Eight sequences share 1000 pages; four that wait want half of them before this request gets any."""
    demand = PlacementDemand(1600, 1.0, output_tokens=100.0)
    alone, behind = (prices.decode_queue_s(demand, decode(A, 0, waiting)) for waiting in (0, 4))
    assert alone < behind
    remaining_s = 100.0 * decode(A, 0, 4).step_s / 2
    assert behind == remaining_s * (100 + 500) / 1000


def test_pages_promised_to_waiting_requests_are_counted_once() -> None:
    demand = PlacementDemand(1600, 1.0)
    load = WorkerLoad(num_running=5, num_waiting=5, free_pages=100, total_pages=1000)  # 5 more need 900 pages

    def wait_steps(num_promised: int) -> float:
        view = WorkerView(A, load, 16, InflightWork(num_pages=num_promised), limits=REMOTE)
        return prices.decode_queue_s(demand, view) / view.step_s

    assert wait_steps(400) == pytest.approx(wait_steps(900))
    assert wait_steps(1000) > wait_steps(900)
