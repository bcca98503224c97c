"""Tests the autoscaler's policy: reactions to load, missing signals, bounds, overrides and flips."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.scaling.autoscaler_policy import AutoscalerPolicy
from cluster.scaling.demand_totals import DemandTotals
from cluster.scaling.signals import (
    DemandSignal,
    Flip,
    PoolBounds,
    PoolSignal,
    Resize,
    ScalingDecision,
    Signals,
    WorkerSignal,
)
from cluster.scaling.traffic import Trend, share_late, weighted_quantile
from penstock.config.autoscaler import AutoscalerConfig, SloConfig
from penstock.types import Role, StepTotals, WorkerId, WorkerLoad
from penstock.v1 import admin_pb2
from tests.support.suite.examples import examples

CONFIG = AutoscalerConfig(
    mode="on", slo=SloConfig(ttft_s=2.0, itl_s=0.05), start_s=20.0, history_s=300.0, flip_after_s=0.0
)
BOUNDS = {role: PoolBounds(1, 10) for role in Role}
TOKEN_S = 0.001  # in tokens of a prompt, on every worker
STEP_S = 0.02


@dataclass
class World:
    """Simulates workers that start at once and prefill 1000 tokens/s each; other prompts queue."""

    scaler: AutoscalerPolicy
    sizes: dict[Role, int] = field(default_factory=lambda: {Role.PREFILL: 2, Role.DECODE: 2})
    now_s: float = 0.0
    queued: float = 0.0
    requests: int = 0
    tokens: int = 0
    totals: dict[WorkerId, WorkerLoad] = field(default_factory=dict)
    changes: list[tuple[float, object]] = field(default_factory=list)
    unplaceable: str = ""
    fitting: int | None = None
    age_s: float = 0.0  # the age of the last worker's report
    starting: int = 0
    starting_role: Role = Role.PREFILL
    cached: float = 0.0  # share of prompt tokens that workers find in their caches
    last: ScalingDecision | None = None

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

    def tick(
        self,
        tokens_per_s: float,
        running: int,
        *,
        has_demand: bool = True,
        silent: bool = False,
        waiting: int = 0,
    ) -> ScalingDecision:
        """Advances by one interval; `running` is the sum over decode workers, `waiting` the sum over routers."""
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
            if ready and self.age_s:
                ready[-1] = replace(ready[-1], age_s=self.age_s)
            stuck = (0.0,) * self.starting if role is self.starting_role else ()
            why = self.unplaceable if role is Role.PREFILL else ""
            pools[role] = PoolSignal(size + len(stuck), tuple(ready), stuck, why, self.fitting)
        demand = DemandSignal(
            requests=self.requests,
            prompt_tokens=self.tokens,
            ended_prompt_tokens=self.tokens,
            cached_tokens=round(self.cached * self.tokens),
            waiting=waiting,
            waiting_tokens=500 * waiting,
        )
        demand = demand if has_demand else None
        self.last = self.scaler.decide(Signals(pools, demand), self.now_s)
        for change in self.last.changes:
            self.changes.append((self.now_s, change))
            if isinstance(change, Resize):
                self.sizes[change.role] = change.replicas - (self.starting if change.role is self.starting_role else 0)
            else:
                self.sizes[change.from_role] -= 1
                self.sizes[change.to_role] += 1
        return self.last

    def run(self, seconds: float, tokens_per_s: float, running: int) -> None:
        for _ in range(round(seconds / CONFIG.interval_s)):
            self.tick(tokens_per_s, running)


def world(**config: object) -> World:
    return World(AutoscalerPolicy(CONFIG.model_copy(update=config), BOUNDS, 64))


def test_a_pool_grows_and_shrinks_with_its_load() -> None:
    fleet = world(flips=False)
    fleet.run(120, 4000, 8)
    assert 5 <= fleet.sizes[Role.PREFILL] <= 9
    fleet.run(700, 500, 8)
    assert fleet.sizes[Role.PREFILL] == 1


def test_pools_shrink_to_their_minimum_without_traffic() -> None:
    fleet = world(flips=False)
    fleet.run(700, 0, 0)
    assert fleet.sizes == {Role.PREFILL: 1, Role.DECODE: 1}


def test_a_pool_may_shrink_to_zero() -> None:
    scaler = AutoscalerPolicy(
        CONFIG.model_copy(update={"flips": False}), {**BOUNDS, Role.PREFILL: PoolBounds(0, 4)}, 64
    )
    fleet = World(scaler)
    fleet.run(700, 0, 0)
    assert fleet.sizes[Role.PREFILL] == 0


def test_missing_signals_do_not_count_as_zero_load() -> None:
    fleet = world()
    fleet.run(100, 1800, 8)
    before = dict(fleet.sizes)
    for silent, has_demand in ((True, True), (False, False)):
        for _ in range(200):
            decision = fleet.tick(0, 0, silent=silent, has_demand=has_demand)
            assert not decision.changes
            assert {record.verdict for record in decision.records} == {"missing"}
    assert fleet.sizes == before
    assert "router" in fleet.last.records[0].reason  # type: ignore[union-attr]


def test_an_override_holds_until_it_expires() -> None:
    fleet = world(flips=False)
    fleet.scaler.override(Role.PREFILL, 3, until_s=200.0)
    fleet.run(198, 6000, 8)
    assert fleet.sizes[Role.PREFILL] == 3
    fleet.run(60, 6000, 8)
    assert fleet.sizes[Role.PREFILL] > 6


def test_a_released_pool_is_scaled_again() -> None:
    fleet = world(flips=False)
    fleet.scaler.override(Role.PREFILL, 2, until_s=1e9)
    fleet.run(60, 6000, 8)
    fleet.scaler.release(Role.PREFILL)
    fleet.run(60, 6000, 8)
    assert fleet.sizes[Role.PREFILL] > 6


def test_unplaceable_workers_do_not_count_and_do_not_block_scaling() -> None:
    fleet = world(flips=False)
    fleet.unplaceable, fleet.starting = "no node has GPU: 1", 2
    fleet.run(100, 4000, 8)
    record = next(record for record in fleet.last.records if record.role is Role.PREFILL)  # type: ignore[union-attr]
    assert fleet.sizes[Role.PREFILL] == 2  # no more workers are requested
    assert "2 requested workers never became ready (no node has GPU: 1)" in record.reason
    fleet.run(100, 4000, 400)
    assert fleet.sizes[Role.DECODE] > 2  # the other pool still scales
    fleet.unplaceable, fleet.starting = "", 0
    fleet.run(40, 4000, 8)
    assert fleet.sizes[Role.PREFILL] > 4


def test_a_worker_flips_when_one_pool_has_a_surplus_and_the_other_a_deficit() -> None:
    fleet = world()
    fleet.sizes = {Role.PREFILL: 2, Role.DECODE: 4}
    fleet.run(8, 2600, 4)
    assert Flip(Role.DECODE, Role.PREFILL) in [change for _, change in fleet.changes]


def test_a_worker_flips_when_requested_workers_never_become_ready() -> None:
    fleet = world()
    fleet.sizes = {Role.PREFILL: 2, Role.DECODE: 4}
    fleet.unplaceable, fleet.starting = "no node has GPU: 1", 6
    fleet.run(8, 2600, 4)
    assert [change for _, change in fleet.changes] == [Flip(Role.DECODE, Role.PREFILL)]


def test_every_decision_has_a_reason_and_figures() -> None:
    fleet = world()
    fleet.run(60, 3000, 20)
    assert fleet.last is not None
    assert {record.role for record in fleet.last.records} == set(Role)
    assert all(record.reason for record in fleet.last.records)
    assert all(record.figures["worker_tokens_per_s"] > 0 for record in fleet.last.records)


@examples(10)
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
    bounds = {Role.PREFILL: PoolBounds(lowest, highest), Role.DECODE: PoolBounds(1, highest)}
    fleet = World(AutoscalerPolicy(CONFIG, bounds, 64), {Role.PREFILL: max(lowest, 1), Role.DECODE: 2})
    for tokens_per_s, running, has_demand, silent in steps:
        before = dict(fleet.sizes)
        fleet.tick(tokens_per_s, running, has_demand=has_demand, silent=silent)
        if silent or not has_demand:
            assert fleet.sizes == before
        assert lowest <= fleet.sizes[Role.PREFILL] <= highest
        assert 1 <= fleet.sizes[Role.DECODE] <= highest


@examples(3)
@given(st.floats(100, 8000), st.integers(0, 200))
def test_constant_load_leads_to_constant_pools(tokens_per_s: float, running: int) -> None:
    fleet = world()
    fleet.run(500, tokens_per_s, running)
    settled = len(fleet.changes)
    fleet.run(500, tokens_per_s, running)
    assert len(fleet.changes) == settled, fleet.changes[settled:]
    assert settled <= 8


@examples(8)
@given(st.floats(0, 20_000), st.integers(1, 10), st.integers(0, 300))
def test_an_override_holds_under_any_load(tokens_per_s: float, replicas: int, running: int) -> None:
    fleet = world()
    fleet.scaler.override(Role.PREFILL, replicas, until_s=1e9)
    fleet.run(60, tokens_per_s, running)
    assert fleet.sizes[Role.PREFILL] == replicas


def test_share_late_counts_tokens_that_wait_beyond_the_limit() -> None:
    assert share_late([100.0] * 10, 100.0, 1.0, 0.5) == 0.0
    assert share_late([200.0] * 10, 100.0, 1.0, 2.0) == pytest.approx(0.8)
    assert share_late([0.0] * 5, 100.0, 1.0, 1.0) == 0.0
    assert weighted_quantile([1.0] * 50 + [50.0], 0.4) == 1.0
    assert weighted_quantile([1.0] * 50 + [50.0], 0.6) == 50.0


def test_a_rising_trend_is_extrapolated_and_a_level_is_not() -> None:
    rising, level = Trend(), Trend()
    for number in range(300):
        rising.add(float(number), 1.0)
        level.add(100.0, 1.0)
    assert 310.0 < rising.ahead(60.0) < 360.0
    assert level.ahead(60.0) == pytest.approx(100.0)


def test_totals_never_fall_when_routers_restart_or_leave() -> None:
    totals = DemandTotals()
    totals.on_report(admin_pb2.DemandReport(router="a", epoch=1, requests=10, waiting=3), 0.0)
    totals.on_report(admin_pb2.DemandReport(router="b", epoch=1, requests=5), 0.0)
    demand = totals.signal(["a", "b"], 1.0, 10.0)
    assert demand is not None
    assert (demand.requests, demand.waiting) == (15, 3)
    totals.on_report(admin_pb2.DemandReport(router="a", epoch=2, requests=2), 5.0)
    assert totals.signal(["a", "b", "c"], 6.0, 10.0) is None  # c has not reported yet
    assert totals.signal(["a", "b"], 11.0, 10.0) is None  # b is silent
    demand = totals.signal(["a"], 11.0, 10.0)
    assert demand is not None
    assert (demand.requests, demand.waiting) == (17, 0)
    assert totals.signal([], 11.0, 10.0) is None


def test_requests_queued_in_routers_grow_the_pool_that_they_wait_for() -> None:
    """400 prompts wait, first while each decode slot is taken, then while nearly all are free."""
    for running, grows in ((64, True), (4, False)):
        fleet = world(flips=False)
        fleet.run(60, 500, 8)
        assert fleet.sizes[Role.DECODE] == 2
        for _ in range(5):
            fleet.tick(500, running * fleet.sizes[Role.DECODE], waiting=400)
        assert (fleet.sizes[Role.DECODE] > 2) == grows
        assert fleet.last is not None
        (prefill,) = [record for record in fleet.last.records if record.role is Role.PREFILL]
        assert prefill.figures["queued_tokens"] == (0 if grows else 400 * 500)
