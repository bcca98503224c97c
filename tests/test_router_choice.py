"""The router's decisions: prefix index, in-flight ledger and pair choice, all of them pure."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kv_events import KvEvent, KvEventBatch, KvEventKind, KvEventLog
from penstock.types import PageHash, WorkerId, WorkerLoad
from router.choice import Demand, KvAware, WorkerView, make_policy
from router.inflight import NO_WORK, InflightLedger, Work
from router.prefix_index import PrefixIndex, PrefixMatch

PAGES = [PageHash(bytes([number]) * 16) for number in range(12)]
WORKERS = [WorkerId(name) for name in ("a", "b", "c")]
PAGE_SIZE = 16
DEMAND = Demand(num_tokens=160, token_bytes=4096)


def stored(*numbers):
    return KvEvent(KvEventKind.STORED, tuple(PAGES[number] for number in numbers))


def removed(*numbers):
    return KvEvent(KvEventKind.REMOVED, tuple(PAGES[number] for number in numbers))


class TestPrefixIndex:
    def test_a_hole_ends_the_prefix(self):
        index = PrefixIndex()
        assert index.apply(WORKERS[0], KvEventBatch(1, (stored(0, 1, 2, 3), removed(1))))
        assert index.match(PAGES[:4]) == {"a": PrefixMatch(1, 1)}

    def test_each_worker_has_its_own_depth(self):
        index = PrefixIndex()
        index.apply(WORKERS[0], KvEventBatch(1, (stored(0, 1, 2),)))
        index.apply(WORKERS[1], KvEventBatch(1, (stored(0),)))
        index.apply(WORKERS[2], KvEventBatch(1, (stored(1, 2),)))
        assert index.match(PAGES[:5]) == {"a": PrefixMatch(3, 3), "b": PrefixMatch(1, 1)}
        assert index.match([]) == {}

    def test_a_gap_is_refused_and_a_snapshot_mends_it(self):
        index = PrefixIndex()
        assert index.apply(WORKERS[0], KvEventBatch(1, (stored(0),)))
        assert not index.apply(WORKERS[0], KvEventBatch(4, (stored(1),)))
        assert index.next_seq(WORKERS[0]) == 2
        assert index.match(PAGES[:2]) == {"a": PrefixMatch(1, 1)}
        assert index.apply(WORKERS[0], KvEventBatch(5, (stored(3),), snapshot=True))
        assert index.match(PAGES[:2]) == {}
        assert index.next_seq(WORKERS[0]) == 5
        assert index.apply(WORKERS[0], KvEventBatch(5, (stored(0),)))
        assert index.match(PAGES[:1]) == {"a": PrefixMatch(1, 1)}

    def test_a_worker_that_leaves_takes_its_pages_along(self):
        index = PrefixIndex()
        for worker in WORKERS:
            index.apply(worker, KvEventBatch(1, (stored(0, 1),)))
        index.drop(WORKERS[1])
        assert index.match(PAGES[:2]) == {"a": PrefixMatch(2, 2), "c": PrefixMatch(2, 2)}
        index.apply(WORKERS[1], KvEventBatch(1, (stored(0),)))
        assert index.match(PAGES[:2]) == {"a": PrefixMatch(2, 2), "b": PrefixMatch(1, 1), "c": PrefixMatch(2, 2)}
        for worker in WORKERS:
            index.drop(worker)
        assert index.num_pages == 0

    def test_memory_is_bounded(self):
        index = PrefixIndex(max_pages_per_worker=3)
        index.apply(WORKERS[0], KvEventBatch(1, (stored(*range(10)),)))
        assert index.num_pages == 3
        index.apply(WORKERS[0], KvEventBatch(2, (removed(*range(10)), stored(7))))
        assert index.match([PAGES[7]]) == {"a": PrefixMatch(1, 1)}

    @given(data=st.data())
    @settings(max_examples=150, deadline=None)
    def test_lost_repeated_and_new_events_converge_on_the_truth(self, data):
        """Any worker's log, read with losses, repeats and rebirths, ends as the caches themselves."""
        index = PrefixIndex()
        logs = {worker: KvEventLog(window=4) for worker in WORKERS}
        caches: dict[WorkerId, set[PageHash]] = {worker: set() for worker in WORKERS}
        for _ in range(data.draw(st.integers(1, 40))):
            worker = data.draw(st.sampled_from(WORKERS))
            pages = data.draw(st.lists(st.sampled_from(PAGES), min_size=1, max_size=4, unique=True))
            match data.draw(st.sampled_from(["store", "remove", "read", "repeat", "lose", "reborn"])):
                case "store":
                    logs[worker].stored(pages)
                    caches[worker].update(pages)
                case "remove":
                    logs[worker].removed(pages)
                    caches[worker].difference_update(pages)
                case "read":
                    index.apply(worker, logs[worker].read(index.next_seq(worker)))
                case "repeat":
                    index.apply(worker, logs[worker].read(max(1, index.next_seq(worker) - 2)))
                case "lose":
                    batch = logs[worker].read(index.next_seq(worker))
                    if not batch.snapshot and len(batch.events) > 1:
                        assert not index.apply(worker, KvEventBatch(batch.first_seq + 1, batch.events[1:])) or (
                            index.next_seq(worker) > batch.first_seq
                        )
                case "reborn":
                    logs[worker] = KvEventLog(window=4)
                    caches[worker] = set()
                    index.drop(worker)
            index.check_integrity()
        for worker in WORKERS:
            assert index.apply(worker, logs[worker].read(index.next_seq(worker)))
        prompt = data.draw(st.permutations(PAGES))
        expected = {}
        for worker in WORKERS:
            depth = next((at for at, page in enumerate(prompt) if page not in caches[worker]), len(prompt))
            if depth:
                expected[worker] = PrefixMatch(depth, depth)
        assert index.match(prompt) == expected


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
