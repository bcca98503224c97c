"""The router's decisions: in-flight ledger and pair choice, both of them pure."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.types import WorkerId, WorkerLoad
from router.choice import Demand, KvAware, WorkerView, make_policy
from router.inflight import NO_WORK, InflightLedger, Work

WORKERS = [WorkerId(name) for name in ("a", "b", "c")]
PAGE_SIZE = 16
DEMAND = Demand(num_tokens=160, token_bytes=4096)


class TestInflightLedger:
    def test_work_counts_until_a_report_settles_it(self):
        ledger = InflightLedger()
        early = ledger.record(WORKERS[0], Work(1, 5, 80), now_s=10.0)
        late = ledger.record(WORKERS[0], Work(1, 2, 30), now_s=11.0)
        assert ledger.sent_to(WORKERS[0]) == Work(2, 7, 110)
        ledger.on_report(WORKERS[0], now_s=11.02)
        assert ledger.sent_to(WORKERS[0]) == Work(1, 2, 30)
        ledger.settle([early, late, late])
        assert ledger.sent_to(WORKERS[0]) == NO_WORK

    @given(ops=st.lists(st.tuples(st.sampled_from("rso"), st.sampled_from(WORKERS), st.integers(0, 30)), max_size=60))
    @settings(max_examples=100, deadline=None)
    def test_the_sum_is_never_off(self, ops):
        ledger, keys = InflightLedger(), []
        for now, (op, worker, number) in enumerate(ops):
            if op == "r":
                keys.append(ledger.record(worker, Work(1, number, number), now_s=float(now)))
            elif op == "s" and keys:
                ledger.settle([keys[number % len(keys)]])
            else:
                ledger.on_report(worker, now_s=float(now))
            assert all(value >= 0 for value in (ledger.sent_to(worker).num_requests, ledger.sent_to(worker).num_pages))
        ledger.settle(keys)
        assert all(ledger.sent_to(worker) == NO_WORK for worker in WORKERS)


def view(name, *, cached=0, sent=NO_WORK, **load):
    full = {"free_pages": 1000, "total_pages": 1000, "step_s": 0.02, "prefill_tokens_per_s": 2000.0, **load}
    return WorkerView(WorkerId(name), WorkerLoad(**full), PAGE_SIZE, sent, cached * PAGE_SIZE)


class TestKvAware:
    def choose(self, decode, prefill, seed=0):
        return KvAware().choose(DEMAND, decode, prefill, random.Random(seed))

    def test_the_cached_prefix_wins_when_queues_are_equal(self):
        choice = self.choose([view("d")], [view("p1"), view("p2", cached=8)])
        assert [one.worker_id for one in choice.prefill] == ["p2", "p1"]
        assert choice.uncached_tokens == 160 - 8 * 16

    def test_a_long_queue_outweighs_a_cached_prefix(self):
        choice = self.choose([view("d")], [view("p1"), view("p2", cached=8, queued_prefill_tokens=1000)])
        assert choice.prefill[0].worker_id == "p1"
        assert choice.prefill[1].queue_s == pytest.approx(0.5)

    def test_work_in_flight_counts_like_reported_work(self):
        choice = self.choose([view("d")], [view("p1", sent=Work(prefill_tokens=500)), view("p2")])
        assert choice.prefill[0].worker_id == "p2"
        assert self.choose([view("d1", sent=Work(num_requests=3)), view("d2", num_running=2)], []).decode == "d2"

    def test_a_decode_worker_without_pages_is_avoided(self):
        assert self.choose([view("d1", free_pages=2), view("d2", num_running=5)], [view("p")]).decode == "d2"

    def test_without_prefill_workers_the_decode_cache_decides(self):
        choice = self.choose([view("d1"), view("d2", cached=9, num_running=1)], [])
        assert choice.decode == "d2"
        assert choice.prefill == ()

    def test_equal_workers_share_the_load(self):
        drawn = Counter(
            self.choose([view("d1"), view("d2")], [view("p1"), view("p2")], seed).decode for seed in range(200)
        )
        assert min(drawn["d1"], drawn["d2"]) > 60


_VIEWS = st.lists(
    st.builds(
        lambda cached, running, queued, free: view(
            "", cached=cached, num_running=running, queued_prefill_tokens=queued, free_pages=free
        ),
        st.integers(0, 10),
        st.integers(0, 50),
        st.integers(0, 5000),
        st.integers(0, 1000),
    ),
    max_size=8,
)


def _named(views, prefix):
    return [
        WorkerView(WorkerId(f"{prefix}{rank}"), one.load, one.page_size, one.sent, one.cached_tokens)
        for rank, one in enumerate(views)
    ]


@pytest.mark.parametrize("name", ["kv-aware", "least-loaded", "round-robin", "random"])
@given(decode=_VIEWS.filter(bool), prefill=_VIEWS, seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_every_policy_names_workers_that_are_there(name, decode, prefill, seed):
    decode, prefill = _named(decode, "d"), _named(prefill, "p")
    policy = make_policy(name)
    choice = policy.choose(DEMAND, decode, prefill, random.Random(seed))
    assert choice.decode in {one.worker_id for one in decode}
    names = [one.worker_id for one in choice.prefill]
    assert len(set(names)) == len(names) == min(3, len(prefill))
    assert set(names) <= {one.worker_id for one in prefill}
    assert 1 <= choice.uncached_tokens <= DEMAND.num_tokens
    again = make_policy(name).choose(DEMAND, decode, prefill, random.Random(seed))
    assert again == choice
    if name == "kv-aware":
        costs = [one.total_s for one in choice.prefill]
        assert costs == sorted(costs)


def test_round_robin_takes_turns():
    policy = make_policy("round-robin")
    decode, prefill = [view("d1"), view("d2")], [view("p1"), view("p2"), view("p3")]
    choices = [policy.choose(DEMAND, decode, prefill, random.Random(0)) for _ in range(6)]
    assert Counter(choice.decode for choice in choices) == {"d1": 3, "d2": 3}
    assert Counter(choice.prefill[0].worker_id for choice in choices) == {"p1": 2, "p2": 2, "p3": 2}
