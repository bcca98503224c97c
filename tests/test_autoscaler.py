"""The autoscaler's decisions: what it is told, what it does about it, and what it must never do."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.autoscaler import Autoscaler
from cluster.demand_book import DemandBook
from cluster.scaling_signals import Bounds, Decision, DemandSignal, Flip, PoolSignal, Resize, Signals, WorkerSignal
from cluster.traffic import Trend, share_late, weighted_quantile
from penstock.autoscaler_config import AutoscalerConfig, SloConfig
from penstock.types import Role, StepTotals, WorkerId, WorkerLoad
from penstock.v1 import admin_pb2

CONFIG = AutoscalerConfig(
    mode="on", slo=SloConfig(ttft_s=2.0, itl_s=0.05), start_s=20.0, history_s=300.0, flip_after_s=0.0
)
BOUNDS = {role: Bounds(1, 10) for role in Role}
TOKEN_S = 0.001  # of a prompt, on every worker
STEP_S = 0.02


@dataclass
class World:
    """Workers that obey at once, each with 1000 prompt tokens/s; what cannot be computed queues."""

    scaler: Autoscaler
    sizes: dict[Role, int] = field(default_factory=lambda: {Role.PREFILL: 2, Role.DECODE: 2})
    now_s: float = 0.0
    queued: float = 0.0
    requests: int = 0
    tokens: int = 0
    totals: dict[WorkerId, WorkerLoad] = field(default_factory=dict)
    changes: list[tuple[float, object]] = field(default_factory=list)
    unplaceable: str = ""
    starting: int = 0
    last: Decision | None = None

    def load(self, role: Role, place: int, computed: float, running: int) -> WorkerSignal:
        name = WorkerId(f"{role.value}-{place}")
        before = self.totals.get(name, WorkerLoad())
        tokens = round(computed)
        load = replace(
            before,
            num_running=running,
            num_waiting=0,
            total_pages=1000,
            free_pages=1000 - min(1000, running * 4),
            queued_prefill_tokens=round(self.queued / self.sizes[role]) if role is Role.PREFILL else 0,
            step_s=STEP_S if running else 0.0,
        )
        if tokens:
            load = replace(load, prefill_steps=before.prefill_steps.plus(tokens, 0.0, tokens * TOKEN_S))
        if running:
            steps = before.decode_steps
            more = StepTotals(
                steps.steps + 50, steps.tokens + 50 * running, steps.contexts, steps.seconds + 50 * STEP_S
            )
            load = replace(load, decode_steps=more)
        self.totals[name] = load
        return WorkerSignal(name, load)

    def tick(self, tokens_per_s: float, running: int, *, told: bool = True, silent: bool = False) -> Decision:
        """`running` sequences in all."""
        after_s = CONFIG.interval_s
        self.now_s += after_s
        prompts = round(tokens_per_s * after_s / 500)
        self.requests, self.tokens = self.requests + prompts, self.tokens + prompts * 500
        self.queued += tokens_per_s * after_s
        size = max(1, self.sizes[Role.PREFILL])
        done = min(self.queued, size * after_s / TOKEN_S)
        self.queued -= done
        pools = {}
        for role, size in self.sizes.items():
            each = done / size if role is Role.PREFILL and size else 0.0
            ready = [
                self.load(role, place, each, running // size if role is Role.DECODE else 0) for place in range(size)
            ]
            if silent:
                ready[-1] = replace(ready[-1], load=None)
            stuck = (0.0,) * self.starting if role is Role.PREFILL else ()
            why = self.unplaceable if role is Role.PREFILL else ""
            pools[role] = PoolSignal(size + len(stuck), tuple(ready), stuck, why)
        demand = DemandSignal(requests=self.requests, prompt_tokens=self.tokens) if told else None
        self.last = self.scaler.decide(Signals(pools, demand), self.now_s)
        for change in self.last.changes:
            self.changes.append((self.now_s, change))
            if isinstance(change, Resize):
                self.sizes[change.role] = change.replicas - (self.starting if change.role is Role.PREFILL else 0)
            else:
                self.sizes[change.from_role] -= 1
                self.sizes[change.to_role] += 1
        return self.last

    def run(self, seconds: float, tokens_per_s: float, running: int) -> None:
        for _ in range(round(seconds / CONFIG.interval_s)):
            self.tick(tokens_per_s, running)


def world(**config: object) -> World:
    return World(Autoscaler(CONFIG.model_copy(update=config), BOUNDS, 64))


def test_a_pool_grows_to_what_comes_and_shrinks_when_it_has_gone() -> None:
    one = world(flips=False)
    one.run(120, 4000, 8)
    assert 5 <= one.sizes[Role.PREFILL] <= 9
    one.run(700, 500, 8)
    assert one.sizes[Role.PREFILL] == 1


def test_no_traffic_is_no_need() -> None:
    one = world(flips=False)
    one.run(700, 0, 0)
    assert one.sizes == {Role.PREFILL: 1, Role.DECODE: 1}


def test_a_pool_may_go_to_zero() -> None:
    scaler = Autoscaler(CONFIG.model_copy(update={"flips": False}), {**BOUNDS, Role.PREFILL: Bounds(0, 4)}, 64)
    one = World(scaler)
    one.run(700, 0, 0)
    assert one.sizes[Role.PREFILL] == 0


def test_what_is_missing_is_not_zero() -> None:
    one = world()
    one.run(100, 1800, 8)
    before = dict(one.sizes)
    for silent, told in ((True, True), (False, False)):
        for _ in range(200):
            decision = one.tick(0, 0, silent=silent, told=told)
            assert not decision.changes
            assert {record.verdict for record in decision.records} == {"missing"}
    assert one.sizes == before
    assert "router" in one.last.records[0].reason  # type: ignore[union-attr]


def test_an_operator_wins_until_the_end_of_it() -> None:
    one = world(flips=False)
    one.scaler.override(Role.PREFILL, 3, until_s=200.0)
    one.run(198, 6000, 8)
    assert one.sizes[Role.PREFILL] == 3
    one.run(60, 6000, 8)
    assert one.sizes[Role.PREFILL] > 6


def test_a_released_pool_is_decided_on_again() -> None:
    one = world(flips=False)
    one.scaler.override(Role.PREFILL, 2, until_s=1e9)
    one.run(60, 6000, 8)
    one.scaler.release(Role.PREFILL)
    one.run(60, 6000, 8)
    assert one.sizes[Role.PREFILL] > 6


def test_workers_that_cannot_be_placed_neither_count_nor_freeze() -> None:
    one = world(flips=False)
    one.unplaceable, one.starting = "no node has GPU: 1", 2
    one.run(100, 4000, 8)
    record = next(record for record in one.last.records if record.role is Role.PREFILL)  # type: ignore[union-attr]
    assert one.sizes[Role.PREFILL] == 2  # nothing more is asked for in vain
    assert "2 workers that were asked for never came (no node has GPU: 1)" in record.reason
    one.run(100, 4000, 400)
    assert one.sizes[Role.DECODE] > 2  # the other pool goes on
    one.unplaceable, one.starting = "", 0
    one.run(40, 4000, 8)
    assert one.sizes[Role.PREFILL] > 4


def test_a_worker_changes_its_role_where_one_pool_has_what_the_other_lacks() -> None:
    one = world()
    one.sizes = {Role.PREFILL: 2, Role.DECODE: 4}
    one.run(8, 2600, 4)
    assert Flip(Role.DECODE, Role.PREFILL) in [change for _, change in one.changes]


def test_a_worker_changes_its_role_where_those_asked_for_never_come() -> None:
    one = world()
    one.sizes = {Role.PREFILL: 2, Role.DECODE: 4}
    one.unplaceable, one.starting = "no node has GPU: 1", 6
    one.run(8, 2600, 4)
    assert [change for _, change in one.changes] == [Flip(Role.DECODE, Role.PREFILL)]


def test_every_decision_says_why() -> None:
    one = world()
    one.run(60, 3000, 20)
    assert one.last is not None
    assert {record.role for record in one.last.records} == set(Role)
    assert all(record.reason for record in one.last.records)
    assert all(record.figures["worker_tokens_per_s"] > 0 for record in one.last.records)


@settings(max_examples=10, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 20_000), st.integers(0, 400), st.booleans(), st.booleans()), min_size=20, max_size=60
    ),
    st.integers(0, 3),
    st.integers(3, 8),
)
def test_bounds_hold_and_missing_data_changes_nothing(
    steps: list[tuple[float, int, bool, bool]], lowest: int, highest: int
) -> None:
    bounds = {Role.PREFILL: Bounds(lowest, highest), Role.DECODE: Bounds(1, highest)}
    one = World(Autoscaler(CONFIG, bounds, 64), {Role.PREFILL: max(lowest, 1), Role.DECODE: 2})
    for tokens_per_s, running, told, silent in steps:
        before = dict(one.sizes)
        one.tick(tokens_per_s, running, told=told, silent=silent)
        if silent or not told:
            assert one.sizes == before
        assert lowest <= one.sizes[Role.PREFILL] <= highest
        assert 1 <= one.sizes[Role.DECODE] <= highest


@settings(max_examples=3, deadline=None)
@given(st.floats(100, 8000), st.integers(0, 200))
def test_constant_load_ends_in_constant_pools(tokens_per_s: float, running: int) -> None:
    one = world()
    one.run(500, tokens_per_s, running)
    settled = len(one.changes)
    one.run(500, tokens_per_s, running)
    assert len(one.changes) == settled, one.changes[settled:]
    assert settled <= 8


@settings(max_examples=8, deadline=None)
@given(st.floats(0, 20_000), st.integers(1, 10), st.integers(0, 300))
def test_an_override_holds_whatever_comes(tokens_per_s: float, replicas: int, running: int) -> None:
    one = world()
    one.scaler.override(Role.PREFILL, replicas, until_s=1e9)
    one.run(60, tokens_per_s, running)
    assert one.sizes[Role.PREFILL] == replicas


def test_late_is_what_waits_longer_than_it_may() -> None:
    assert share_late([100.0] * 10, 100.0, 1.0, 0.5) == 0.0
    assert share_late([200.0] * 10, 100.0, 1.0, 2.0) == pytest.approx(0.8)
    assert share_late([0.0] * 5, 100.0, 1.0, 1.0) == 0.0
    assert weighted_quantile([1.0] * 50 + [50.0], 0.4) == 1.0
    assert weighted_quantile([1.0] * 50 + [50.0], 0.6) == 50.0


def test_a_trend_looks_ahead_and_a_level_does_not() -> None:
    rising, level = Trend(), Trend()
    for number in range(300):
        rising.add(float(number), 1.0)
        level.add(100.0, 1.0)
    assert 310.0 < rising.ahead(60.0) < 360.0
    assert level.ahead(60.0) == pytest.approx(100.0)


def test_routers_that_begin_anew_or_go_take_nothing_back() -> None:
    book = DemandBook()
    book.tell(admin_pb2.DemandReport(router="a", epoch=1, requests=10, waiting=3), 0.0)
    book.tell(admin_pb2.DemandReport(router="b", epoch=1, requests=5), 0.0)
    told = book.signal(["a", "b"], 1.0, 10.0)
    assert told is not None
    assert (told.requests, told.waiting) == (15, 3)
    book.tell(admin_pb2.DemandReport(router="a", epoch=2, requests=2), 5.0)
    assert book.signal(["a", "b", "c"], 6.0, 10.0) is None  # c has told nothing yet
    assert book.signal(["a", "b"], 11.0, 10.0) is None  # b is silent
    told = book.signal(["a"], 11.0, 10.0)
    assert told is not None
    assert (told.requests, told.waiting) == (17, 0)
    assert book.signal([], 11.0, 10.0) is None
