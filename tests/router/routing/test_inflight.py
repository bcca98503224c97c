"""Tests the in-flight ledger: work counts until a report or its request settles it."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from penstock.types import WorkerId, WorkerLoad
from router.routing.costs.cost_model import CostBook
from router.routing.costs.inflight import NO_WORK, InflightLedger, InflightWork
from router.routing.costs.link_costs import LinkBook
from router.routing.placement_core import PlacementCore
from router.routing.policy.interface import PlacementDemand, WorkerLimits, WorkerView
from router.routing.policy.kv_aware import KvAwarePolicy
from tests.support.suite.examples import examples

WORKERS = [WorkerId(name) for name in ("a", "b", "c")]


class TestInflightLedger:
    def test_work_counts_until_a_report_settles_it(self):
        ledger = InflightLedger()
        early = ledger.record(WORKERS[0], InflightWork(1, 5, 80), now_s=10.0)
        late = ledger.record(WORKERS[0], InflightWork(1, 2, 30), now_s=11.0)
        assert ledger.sent_to(WORKERS[0]) == InflightWork(2, 7, 110)
        ledger.on_report(WORKERS[0], now_s=11.02)
        assert ledger.sent_to(WORKERS[0]) == InflightWork(1, 2, 30)
        ledger.settle([early, late, late])
        assert ledger.sent_to(WORKERS[0]) == NO_WORK

    def test_bytes_on_a_link_stay_until_they_are_settled(self):
        ledger, link = InflightLedger(), (WORKERS[0], WORKERS[1])
        key = ledger.record(link, InflightWork(num_bytes=7), now_s=1.0)
        ledger.record(link, InflightWork(num_bytes=5), now_s=1.0)
        ledger.on_report(WORKERS[1], now_s=9.0)
        assert ledger.link_bytes(link) == 12
        assert ledger.link_bytes((WORKERS[1], WORKERS[0])) == 0
        ledger.settle([key])
        assert ledger.link_bytes(link) == 5
        ledger.forget(WORKERS[1])
        assert ledger.link_bytes(link) == 0

    def test_a_report_keeps_work_that_it_may_not_show_yet(self):
        ledger = InflightLedger()
        ledger.record(WORKERS[0], InflightWork(1), now_s=9.96)  # sent while the report was in transit
        ledger.on_report(WORKERS[0], now_s=10.0)
        assert ledger.sent_to(WORKERS[0]) == InflightWork(1)
        ledger.on_report(WORKERS[0], now_s=10.02)
        assert ledger.sent_to(WORKERS[0]) == NO_WORK

    def test_pinned_work_counts_until_it_is_sent_and_reported(self):
        ledger = InflightLedger()
        key = ledger.record(WORKERS[0], InflightWork(1, 3), now_s=1.0)
        ledger.pin([key])
        ledger.on_report(WORKERS[0], now_s=5.0)
        assert ledger.sent_to(WORKERS[0]) == InflightWork(1, 3)
        ledger.unpin([key], now_s=5.0)
        ledger.unpin([key], now_s=6.0)
        ledger.on_report(WORKERS[0], now_s=5.0)
        assert ledger.totals() == [(WORKERS[0], InflightWork(1, 3))]
        ledger.on_report(WORKERS[0], now_s=5.1)
        assert ledger.totals() == []

    def test_pinned_work_is_settled_like_any_other(self):
        ledger, link = InflightLedger(), (WORKERS[0], WORKERS[1])
        keys = [ledger.record(owner, InflightWork(1, num_bytes=7), now_s=1.0) for owner in (WORKERS[0], link)]
        ledger.pin(keys)
        ledger.settle(keys)
        assert ledger.sent_to(WORKERS[0]) == NO_WORK
        assert ledger.link_bytes(link) == 0
        assert ledger.totals() == []

    def test_a_settled_link_leaves_nothing_behind(self):
        """Links are pairs of workers, so their number grows with the square of the fleet."""
        ledger = InflightLedger()
        ledger.settle([ledger.record((WORKERS[0], WORKERS[1]), InflightWork(num_bytes=7), now_s=1.0)])
        assert len(ledger._accounts) == 0

    @given(ops=st.lists(st.tuples(st.sampled_from("rso"), st.sampled_from(WORKERS), st.integers(0, 30)), max_size=60))
    @examples(100)
    def test_totals_always_match_the_entries(self, ops):
        ledger, keys = InflightLedger(), []
        for now, (op, worker, number) in enumerate(ops):
            if op == "r":
                keys.append(ledger.record(worker, InflightWork(1, number, number), now_s=float(now)))
            elif op == "s" and keys:
                ledger.settle([keys[number % len(keys)]])
            else:
                ledger.on_report(worker, now_s=float(now))
            assert all(value >= 0 for value in (ledger.sent_to(worker).num_requests, ledger.sent_to(worker).num_pages))
        ledger.settle(keys)
        assert all(ledger.sent_to(worker) == NO_WORK for worker in WORKERS)


def test_kept_work_is_credited_until_it_is_settled_whatever_is_reported() -> None:
    ledger = InflightLedger()
    pages, tokens = InflightWork(num_pages=7), InflightWork(prefill_tokens=5)
    kept, other = ledger.record(WORKERS[0], pages, 0.0, keep=True), ledger.record(WORKERS[0], tokens, 0.0)
    ledger.pin([kept, other])
    ledger.unpin([kept, other], 1.0)
    ledger.on_report(WORKERS[0], 100.0)
    assert ledger.totals() == [(WORKERS[0], pages)]
    ledger.settle([kept, kept, other])
    assert ledger.totals() == []


def test_a_decode_worker_owes_the_pages_of_a_request_until_its_first_token() -> None:
    """The worker's reports show them only when the prompt's first chunk begins."""
    ledger = InflightLedger()
    core = PlacementCore(ledger, CostBook(), LinkBook())
    decode = [WorkerView(WORKERS[0], WorkerLoad(), 16, limits=WorkerLimits(max_local_tokens=0))]
    prefill = [WorkerView(WorkerId("p"), WorkerLoad(queued_prefill_tokens=100_000), 16)]
    demand = PlacementDemand(1600, 1.0)
    choice = KvAwarePolicy().choose(demand, decode, prefill, random.Random(0))
    commitment = core.commit(choice, demand, 16, 0.0)
    ledger.on_report(WORKERS[0], 100.0)
    assert ledger.sent_to(WORKERS[0]) == InflightWork(num_pages=100)
    ledger.settle(commitment.credits)
    assert ledger.sent_to(WORKERS[0]) == NO_WORK
