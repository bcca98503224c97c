"""Tests pair choice: prices by stage, the search over pairs against brute force, and the contract of every policy."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import KvAwareConfig
from penstock.types import WorkerId, WorkerLoad
from router.routing.costs.cost_model import StepCost, WorkerCosts
from router.routing.costs.inflight import NO_WORK, InflightWork
from router.routing.costs.link_costs import LinkCost
from router.routing.policy import prices
from router.routing.policy.interface import PlacementDemand, WorkerLimits, WorkerView
from router.routing.policy.kv_aware import KvAwarePolicy
from router.routing.policy.policies import make_policy
from router.routing.policy.rendezvous import order, preferred
from router.routing.policy.replication import HotPrefixes
from tests.support.suite.examples import examples

PAGE_SIZE = 16
COSTS = WorkerCosts(StepCost(0.001, 5e-4, 0.0), StepCost(0.01, 1e-4, 1e-7), queued_token_s=5e-4)
REMOTE = WorkerLimits(max_local_tokens=0)
DEMAND = PlacementDemand(num_tokens=160, token_bytes=4096)
POLICIES = ["kv-aware", "least-loaded", "round-robin", "random", "consistent-hash"]


def view(name, *, sent=NO_WORK, costs=COSTS, limits=REMOTE, **load):
    full = {"free_pages": 1000, "total_pages": 1000, **load}
    return WorkerView(WorkerId(name), WorkerLoad(**full), PAGE_SIZE, sent, costs, limits)


def choose(decode, prefill, demand=DEMAND, seed=0, **weights):
    return KvAwarePolicy(KvAwareConfig(**weights)).choose(demand, decode, prefill, random.Random(seed))


@dataclass
class TableLinks:
    table: dict[tuple[str, str], LinkCost]
    ahead: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def fastest(self):
        costs = self.table.values()
        return LinkCost(min(cost.latency_s for cost in costs), min(cost.byte_s for cost in costs))

    def cost(self, prefill, decode):
        return self.table[prefill, decode]

    def bytes_ahead(self, prefill, decode):
        return self.ahead.get((prefill, decode), 0)


class TestKvAware:
    def test_the_cached_prefix_wins_when_queues_are_equal(self):
        choice = choose([view("d")], [view("p1"), view("p2")], replace(DEMAND, cached_tokens={"p2": 128}))
        assert [candidate.worker_id for candidate in choice.prefill] == ["p2", "p1"]
        assert choice.uncached_tokens == 32
        assert choice.score.prefill_cached_tokens == 128

    def test_a_long_queue_outweighs_a_cached_prefix(self):
        demand = replace(DEMAND, cached_tokens={"p2": 128})
        choice = choose([view("d")], [view("p1"), view("p2", queued_prefill_tokens=1000)], demand)
        assert choice.prefill[0].worker_id == "p1"
        assert choice.prefill[1].queue_s == pytest.approx(0.5)

    def test_a_worker_that_holds_the_adapter_wins_until_loading_elsewhere_is_cheaper(self):
        demand = replace(DEMAND, adapter="revision")
        holds, lacks = {"adapters": ("revision",)}, {"adapter_load_s": 0.4}
        choice = choose([view("d1", **lacks), view("d2", **holds)], [view("p1", **lacks), view("p2", **holds)], demand)
        assert (choice.decode, choice.prefill[0].worker_id) == ("d2", "p2")
        busy = view("p2", queued_prefill_tokens=1000, **holds)
        assert choose([view("d")], [view("p1", **lacks), busy], demand).prefill[0].worker_id == "p1"
        sent = replace(demand, adapter_sent=frozenset({"p1"}))
        assert prices.adapter_waits_s(sent, [view("p1", **lacks), view("p3"), busy]) == [0.0, 0.2, 0.0]

    def test_work_in_flight_counts_like_reported_work(self):
        choice = choose([view("d")], [view("p1", sent=InflightWork(prefill_tokens=500)), view("p2")])
        assert choice.prefill[0].worker_id == "p2"
        assert choose([view("d1", sent=InflightWork(num_requests=3)), view("d2", num_running=2)], []).decode == "d2"

    def test_a_decode_worker_without_pages_is_avoided(self):
        full = view("d1", free_pages=2, num_running=3)
        assert choose([full, view("d2", num_running=5)], [view("p")]).decode == "d2"

    def test_a_decode_worker_without_a_slot_is_avoided(self):
        limits = WorkerLimits(max_local_tokens=0, max_running=4)
        decode = [view("d1", num_running=4, limits=limits), view("d2", num_running=6)]
        assert choose(decode, [view("p")]).decode == "d2"

    def test_pages_at_the_decode_worker_need_not_move(self):
        links = TableLinks({("p", "d1"): LinkCost(0.0, 1e-6), ("p", "d2"): LinkCost(0.0, 1e-6)})
        demand = replace(DEMAND, links=links, cached_tokens={"d2": 144})
        choice = choose([view("d1"), view("d2", num_running=3)], [view("p")], demand)
        assert choice.decode == "d2"
        assert choice.score.transfer_s == pytest.approx(16 * 4096 * 1e-6)

    def test_prefill_and_decode_workers_are_chosen_together(self):
        """The slowest link connects the best prefill worker with the best decode worker."""
        slow, fast = LinkCost(0.0, 1e-6), LinkCost(0.0, 1e-9)
        links = TableLinks({("p1", "d1"): slow, ("p1", "d2"): fast, ("p2", "d1"): fast, ("p2", "d2"): slow})
        demand = replace(DEMAND, links=links, cached_tokens={"p1": 32})
        choice = choose([view("d1"), view("d2", num_running=1)], [view("p1"), view("p2")], demand)
        assert (choice.prefill[0].worker_id, choice.decode) in {("p1", "d2"), ("p2", "d1")}

    def test_bytes_in_flight_make_a_link_expensive(self):
        cost = LinkCost(0.001, 1e-9)
        links = TableLinks({("p1", "d"): cost, ("p2", "d"): cost}, {("p1", "d"): 1 << 30})
        assert choose([view("d")], [view("p1"), view("p2")], replace(DEMAND, links=links)).prefill[0].worker_id == "p2"

    def test_local_prefill_is_one_more_candidate(self):
        """A short uncached suffix is computed on the decode worker, unless that delays many sequences or exceeds its
        limit."""
        demand = replace(DEMAND, cached_tokens={"d": 144})
        able = WorkerLimits(max_local_tokens=32)
        assert choose([view("d", limits=able)], [view("p")], demand).prefill == ()
        assert choose([view("d", limits=able, num_running=40)], [view("p")], demand).prefill
        assert choose([view("d", limits=REMOTE)], [view("p")], demand).prefill
        # 160 tokens exceed the limit
        assert choose([view("d", limits=able)], [view("p", queued_prefill_tokens=0)]).prefill

    def test_without_prefill_workers_the_decode_cache_decides(self):
        choice = choose([view("d1"), view("d2", num_running=1)], [], replace(DEMAND, cached_tokens={"d2": 144}))
        assert choice.decode == "d2"
        assert choice.prefill == ()
        assert choice.uncached_tokens == 16

    def test_equal_workers_share_the_load(self):
        decode, prefill = [view("d1"), view("d2")], [view("p1"), view("p2")]
        choices = [choose(decode, prefill, seed=seed) for seed in range(200)]
        pairs = Counter((choice.decode, choice.prefill[0].worker_id) for choice in choices)
        assert len(pairs) == 4
        assert min(pairs.values()) > 20

    def test_temperature_spreads_requests_among_cheap_pairs(self):
        decode = [view("d")]
        prefill = [view("p1"), view("p2", queued_prefill_tokens=20), view("p3", queued_prefill_tokens=4000)]
        chosen = Counter(
            choose(decode, prefill, seed=seed, temperature_s=0.01).prefill[0].worker_id for seed in range(300)
        )
        assert 150 < chosen["p1"] < 270  # e to 1
        assert chosen["p1"] + chosen["p2"] == 300
        assert {choose(decode, prefill, seed=seed).prefill[0].worker_id for seed in range(20)} == {"p1"}

    def test_a_session_keeps_its_workers_while_that_costs_little(self):
        decode, prefill = [view("d1"), view("d2"), view("d3")], [view("p1"), view("p2"), view("p3")]
        demand = replace(DEMAND, session="alice")
        choice = choose(decode, prefill, demand)
        again = {choose(decode, prefill, demand, seed).decode for seed in range(20)}
        assert again == {choice.decode}
        assert choice.score.bonus_s == 1.0  # both ends
        at = prefill.index(
            next(candidate for candidate in prefill if candidate.worker_id == choice.prefill[0].worker_id)
        )
        busy = list(prefill)
        busy[at] = view(prefill[at].worker_id, queued_prefill_tokens=800)  # 0.4 s
        assert choose(decode, busy, demand).prefill[0].worker_id == choice.prefill[0].worker_id
        busy[at] = view(prefill[at].worker_id, queued_prefill_tokens=1200)
        assert choose(decode, busy, demand).prefill[0].worker_id != choice.prefill[0].worker_id

    def test_a_hot_prefix_goes_to_a_worker_without_it(self):
        cached = {"p1": 144}
        prefill = [view("p1", queued_prefill_tokens=10), view("p2")]
        assert choose([view("d")], prefill, replace(DEMAND, cached_tokens=cached)).prefill[0].worker_id == "p1"
        hot = replace(DEMAND, cached_tokens=cached, replicate=True)
        assert choose([view("d")], prefill, hot).prefill[0].worker_id == "p2"
        assert choose([view("d")], prefill, hot, replica_s=0.001).prefill[0].worker_id == "p1"

    def test_explained_choices_list_the_considered_pairs(self):
        choice = choose([view("d1"), view("d2")], [view("p1"), view("p2")], replace(DEMAND, explain=True))
        assert len(choice.considered) == 4
        assert [score.total_s for score in choice.considered] == sorted(score.total_s for score in choice.considered)
        assert choice.score in choice.considered


_VIEW = st.builds(
    view,
    st.just("w"),
    num_running=st.integers(0, 50),
    queued_prefill_tokens=st.integers(0, 5000),
    free_pages=st.integers(0, 1000),
    limits=st.sampled_from([REMOTE, WorkerLimits(), WorkerLimits(chunk_tokens=64, max_running=8, max_local_tokens=64)]),
)


def _named(prefix, views):
    return [replace(view, worker_id=WorkerId(f"{prefix}{at}")) for at, view in enumerate(views)]


@st.composite
def fleets(draw):
    decode = _named("d", draw(st.lists(_VIEW, min_size=1, max_size=7)))
    prefill = _named("p", draw(st.lists(_VIEW, max_size=7)))
    names = [view.worker_id for view in (*decode, *prefill)]
    cached = draw(st.dictionaries(st.sampled_from(names), st.integers(1, 10).map(lambda pages: pages * PAGE_SIZE)))
    cost = st.builds(LinkCost, st.floats(0, 0.1), st.floats(0, 1e-6))
    table = {(p.worker_id, d.worker_id): draw(cost) for p in prefill for d in decode}
    ahead = {link: draw(st.integers(0, 10**7)) for link in table}
    links = TableLinks(table, ahead) if table else DEMAND.links
    session, replicate = draw(st.sampled_from(["", "s"])), draw(st.booleans())
    demand = replace(DEMAND, cached_tokens=cached, links=links, session=session, replicate=replicate)
    return demand, decode, prefill


@given(fleet=fleets(), seed=st.integers(0, 9))
@examples(75)
def test_no_pair_is_cheaper_than_the_chosen_one(fleet, seed):
    """The pruned search finds the same cost as pricing every pair."""
    demand, decode, prefill = fleet
    demand = replace(demand, session="", replicate=False)
    choice = choose(decode, prefill, demand, seed, decode_weight=1.0)
    pairs = [(d, p) for d in decode for p in prefill]
    for d in decode:
        limit = d.limits.max_local_tokens
        if not prefill or limit is None or demand.uncached_on(d.worker_id) <= limit:
            pairs.append((d, None))
    context_s = demand.output_tokens * demand.num_tokens * COSTS.decode.context_s / 2
    mean = sum(d.num_requests for d in decode) / len(decode)
    least_s = min(prices.price(demand, d, p).total_s + (mean - d.num_requests) * context_s for d, p in pairs)
    assert choice.score.total_s == pytest.approx(least_s, rel=1e-9, abs=1e-9)


@given(
    views=st.lists(st.builds(view, st.just("d"), num_running=st.integers(0, 50), free_pages=st.integers(500, 1000))),
    tokens=st.tuples(st.integers(1, 8000), st.integers(1, 8000)),
)
@examples(75)
def test_equal_decode_workers_with_pages_rank_alike_for_prompts_of_all_lengths(views, tokens):
    """Long contexts do not gather where few sequences run."""
    short, long = (prices.all_decode_s(replace(DEMAND, num_tokens=each), views, 0.5, 4.0) for each in tokens)
    assert [a - short[0] for a in short] == pytest.approx([b - long[0] for b in long], abs=1e-9)


@pytest.mark.parametrize("name", POLICIES)
@given(fleet=fleets(), seed=st.integers(0, 9))
@examples(40)
def test_every_policy_chooses_existing_workers(name, fleet, seed):
    demand, decode, prefill = fleet
    choice = make_policy(name).choose(demand, decode, prefill, random.Random(seed))
    assert choice.decode in {view.worker_id for view in decode}
    names = [view.worker_id for view in choice.prefill]
    assert len(set(names)) == len(names) <= min(3, len(prefill))
    assert names or not prefill or name == "kv-aware"
    assert set(names) <= {view.worker_id for view in prefill}
    assert 1 <= choice.uncached_tokens <= demand.num_tokens
    assert choice.score.decode == choice.decode
    assert choice.score.prefill == (names[0] if names else None)
    assert make_policy(name).choose(demand, decode, prefill, random.Random(seed)) == choice


def test_round_robin_takes_turns():
    policy = make_policy("round-robin")
    decode, prefill = [view("d1"), view("d2")], [view("p1"), view("p2"), view("p3")]
    choices = [policy.choose(DEMAND, decode, prefill, random.Random(0)) for _ in range(6)]
    assert Counter(choice.decode for choice in choices) == {"d1": 3, "d2": 3}
    assert Counter(choice.prefill[0].worker_id for choice in choices) == {"p1": 2, "p2": 2, "p3": 2}


class TestConsistentHash:
    PREFILL = tuple(view(f"p{number}") for number in range(8))

    def choose(self, prefix, prefill, seed=0):
        demand = replace(DEMAND, prefix=prefix)
        return make_policy("consistent-hash").choose(demand, [view("d")], prefill, random.Random(seed))

    def test_a_prefix_stays_and_prefixes_spread(self):
        assert len({self.choose(b"same", self.PREFILL, seed).prefill[0].worker_id for seed in range(9)}) == 1
        spread = Counter(self.choose(bytes([n]), self.PREFILL).prefill[0].worker_id for n in range(200))
        assert len(spread) == 8

    def test_a_loaded_worker_passes_its_keys_on(self):
        first = self.choose(b"same", self.PREFILL).prefill[0].worker_id
        loaded = [
            replace(view, load=WorkerLoad(queued_prefill_tokens=100 * (view.worker_id == first)))
            for view in self.PREFILL
        ]
        assert self.choose(b"same", loaded).prefill[0].worker_id != first


@given(st.binary(max_size=20), st.lists(st.text(min_size=1, max_size=6), min_size=2, max_size=12, unique=True))
@settings(deadline=None)
def test_a_worker_that_leaves_moves_only_its_own_keys(key, names):
    ranked = order(key, names)
    assert preferred(key, names) == ranked[0]
    left = [name for at, name in enumerate(names) if at != ranked[-1]]
    assert left[preferred(key, left)] == names[ranked[0]]


class TestHotPrefixes:
    def test_copies_follow_the_share_and_stop_at_the_limit(self):
        """A prefix of half of all requests gets 4 of 8 workers, but never more than the limit."""
        for limit, expected in ((8, 4), (3, 3), (1, 1)):
            hot, holders = HotPrefixes(max_replicas=limit), 1
            for turn in range(400):
                hot.wants_copy(bytes([turn % 200]) + b"cold", 0, 8, turn * 0.5)
                holders += hot.wants_copy(b"hot", holders, 8, turn * 0.5)
            assert holders == expected

    def test_copies_are_requested_one_at_a_time(self):
        hot = HotPrefixes(max_replicas=8)
        asked = [hot.wants_copy(b"hot", 1, 8, now_s=10 + turn / 100) for turn in range(100)]
        assert sum(asked) == 1

    def test_no_copy_of_a_prefix_without_holders_or_with_few_requests(self):
        hot = HotPrefixes(max_replicas=8)
        assert not any(hot.wants_copy(b"hot", 0, 8, now_s=turn) for turn in range(50))
        assert not any(hot.wants_copy(bytes([turn]), 1, 8, now_s=turn) for turn in range(50))
        assert not any(hot.wants_copy(b"", 1, 8, now_s=turn) for turn in range(50))


def test_bulk_requests_at_a_worker_do_not_count_as_load():
    busy = view("d1", num_running=9, num_waiting=3, num_bulk=12, queued_prefill_tokens=5000, queued_bulk_tokens=5000)
    assert (busy.num_requests, busy.queue_s) == (0, 0.0)
    assert choose([busy, view("d2", num_running=1)], []).decode == "d1"
