"""Tests that plans meet their goal, that no smaller deployment of the same kind does, and that figures can be
recomputed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from penstock.bench.traces.record import Trace, TraceRecord, to_runs
from penstock.config import SloConfig
from penstock.errors import InvalidInput
from penstock.sizing.model_shape import find_shape
from simulator.costs.accelerators import find_accelerator
from simulator.planning import arithmetic
from simulator.planning.deployment import Deployment, PlannedPool, PricedAccelerator, evaluate, make_kind, meets
from simulator.planning.outlook import find_headroom, measure_economy, sweep_rates, vary
from simulator.planning.report import enlarge, make_report
from simulator.planning.search import Goal, choose_chunk, find_plans, resize
from simulator.planning.verify import Verification
from simulator.planning.workload import TrafficStatistics, Workload, longest_fitting, workload_of

LLAMA, DEEPSEEK = find_shape("llama-3.1-8b"), find_shape("deepseek-v3")
H100, L40S = PricedAccelerator(find_accelerator("H100"), 3.0), PricedAccelerator(find_accelerator("L40S"), 1.0)
GOAL = Goal(SloConfig(ttft_s=1.0, itl_s=0.03), 0.9, degrees=(1, 2), max_devices=64)


def sample(rate: float = 30.0, **more: float) -> Workload:
    return TrafficStatistics(rate, 2000, 200, **more, num_requests=300).sample(1)  # type: ignore[arg-type]


def test_the_sample_matches_the_statistics() -> None:
    workload = TrafficStatistics(5.0, 1000, 100, hit_rate=0.4, gap_cv=2.0, num_requests=4000).sample(3)
    assert workload.requests_per_s == pytest.approx(5.0, rel=0.1)
    assert workload.mean_input_tokens == pytest.approx(1000, rel=0.1)
    assert workload.mean_output_tokens == pytest.approx(100, rel=0.1)
    assert workload.reusable_share == pytest.approx(0.4, abs=0.03)


@pytest.mark.parametrize(("field", "value"), [("requests_per_s", 0), ("hit_rate", 1.0), ("input_cv", -1.0)])
def test_impossible_statistics_are_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidInput, match=field):
        replace(TrafficStatistics(1.0, 10, 10), **{field: value})  # type: ignore[arg-type]


def test_a_trace_provides_its_reuse_curve() -> None:
    records = tuple(TraceRecord(turn - 1.0, 40 * turn, 5, to_runs(range(4 * turn)), 10) for turn in range(1, 20))
    workload = workload_of(Trace("turns", records, True))
    assert workload.hit_share(0) == 0.0
    assert workload.hit_share(1e9) == 1.0
    assert workload.requests[3].reusable_tokens == 120
    fitting, num_dropped = longest_fitting(workload, 405)
    assert num_dropped == 9
    assert fitting.longest_tokens == 405
    assert len(fitting.records) == len(fitting.requests)
    with pytest.raises(InvalidInput, match="different times"):
        workload_of(Trace("one", records[:1], True))


def test_the_cheapest_plan_is_the_smallest_of_its_kind() -> None:
    workload = sample()
    plans = find_plans(LLAMA, [H100, L40S], workload, GOAL)
    assert {plan.deployment.prefill is None for plan in plans} == {True, False}
    prices = [plan.deployment.price_per_h for plan in plans]
    assert prices == sorted(prices)
    for plan in plans:
        assert plan.result.attainment >= GOAL.attainment
        assert evaluate(plan.deployment, workload, GOAL.slo) == plan.result, "the same figures whenever they are made"
    colocated = next(plan.deployment for plan in plans if plan.deployment.prefill is None)
    smaller = Deployment(None, colocated.decode.resized(colocated.decode.num_workers - 1))
    assert smaller.decode.num_workers == 0 or not meets(smaller, workload, GOAL.slo, GOAL.attainment)
    assert resize(colocated, workload, GOAL) == colocated


def test_more_traffic_needs_more_workers() -> None:
    workload = sample()
    plan = find_plans(LLAMA, [H100], workload, GOAL)[0]
    larger = resize(plan.deployment, workload.varied(rate=4.0), GOAL)
    assert larger is not None
    assert larger.price_per_h > plan.deployment.price_per_h
    headroom = find_headroom(plan.deployment, workload, GOAL)
    assert meets(plan.deployment, workload.varied(rate=headroom), GOAL.slo, GOAL.attainment)
    rates = sweep_rates(plan.deployment, workload, GOAL.slo, (1.0, 20.0))
    assert rates[0][1] >= GOAL.attainment > rates[1][1]


def test_costs_follow_from_price_and_tokens() -> None:
    workload = sample()
    plan = find_plans(LLAMA, [H100], workload, GOAL)[0]
    economy = measure_economy(plan.deployment, plan.result, workload)
    tokens_per_h = workload.requests_per_s * workload.mean_output_tokens * 3600
    assert economy.per_million_output_tokens == pytest.approx(plan.deployment.price_per_h / tokens_per_h * 1e6)
    assert economy.per_million_tokens < economy.per_million_output_tokens


def test_sensitivity_says_what_each_assumption_changes() -> None:
    workload = sample(hit_rate=0.3)
    plan = find_plans(LLAMA, [H100], workload, GOAL)[0]
    found = {each.name: each for each in vary(plan, workload, GOAL)}
    assert {"rate +20%", "prompts -20%", "answers +20%", "reuse -20%", "TTFT target +20%", "ITL target -20%"} <= set(
        found
    )
    assert found["rate +20%"].attainment <= found["rate -20%"].attainment
    assert found["prompts +20%"].attainment <= found["prompts -20%"].attainment


@pytest.mark.parametrize(
    ("goal", "offers", "message"),
    [
        (replace(GOAL, slo=SloConfig(ttft_s=0.001)), [H100], "longer than the TTFT target even on an idle worker"),
        (replace(GOAL, slo=SloConfig(ttft_s=1.0, itl_s=0.001)), [H100], "--itl is 1 ms"),
        (replace(GOAL, max_devices=1), [L40S], "up to 1 devices"),
    ],
)
def test_an_unreachable_goal_is_explained(goal: Goal, offers: list[PricedAccelerator], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        find_plans(LLAMA, offers, sample(100.0), goal)


def test_a_model_that_fits_nowhere_is_explained() -> None:
    with pytest.raises(InvalidInput, match="no worker holds the weights"):
        find_plans(DEEPSEEK, [L40S], sample(), GOAL)


def test_kv_bytes_follow_from_the_shape() -> None:
    assert "= 131,072 bytes" in arithmetic.explain_kv(LLAMA, 1000)[0]
    assert "= 70,272 bytes" in arithmetic.explain_kv(DEEPSEEK, 1000)[0]
    quantized = arithmetic.quantize_kv(LLAMA, "fp8")
    assert quantized.kv_token_bytes == 32 * 2 * 8 * (128 + 4), "a float32 scale for each token of each head"
    windowed = replace(LLAMA, window=100, num_window_layers=16)
    assert "reads 55% of a mean context" in arithmetic.explain_kv(windowed, 1000)[1]
    assert arithmetic.choose_page_size(LLAMA, 8) == 16
    tiny = replace(LLAMA, num_layers=2, num_kv_heads=2, head_dim=64)
    assert arithmetic.choose_page_size(tiny, 1) == 64


def test_chunks_are_long_enough_for_the_hardware() -> None:
    kind = make_kind(LLAMA, H100, 1, 8192)
    chunk = choose_chunk(kind)
    costs = kind.costs.prefill
    exposed_s = costs.step_s - costs.hidden_s
    assert exposed_s <= 0.05 * (exposed_s + chunk * costs.token_s)
    assert kind.kv_tokens == int(0.9 * (80e9 - (600 << 20) - LLAMA.weight_bytes) / LLAMA.kv_token_bytes)


def test_the_simulator_verifies_the_chosen_plan() -> None:
    rng = random.Random(5)
    workload = sample(20.0)
    workload = replace(workload, requests=workload.requests[:60], records=workload.records[:60])
    report = make_report(LLAMA, [PricedAccelerator(H100.device, rng.uniform(2, 3))], workload, GOAL, num_simulated=60)
    found = report.verification
    assert found is not None
    assert found.num_requests == 60
    assert report.is_verified == (found.attainment >= GOAL.attainment)
    assert report.chosen in report.plans
    unverified = make_report(LLAMA, [H100], workload, GOAL)
    assert unverified.verification is None
    assert not unverified.is_verified


def test_pools_that_the_simulator_finds_too_small_grow() -> None:
    kind = make_kind(LLAMA, H100, 1, 2048)
    late = Verification(100, 0, 0.8, 20, 0.0, 1.0, 9.0, 0.01, 0.02)
    slow = replace(late, num_late=1)
    pools = Deployment(PlannedPool(kind, 2), PlannedPool(kind, 3))
    assert str(enlarge(pools, late)) == "prefill 3 of H100, decode 3 of H100"
    assert str(enlarge(pools, slow)) == "prefill 2 of H100, decode 4 of H100"
    assert str(enlarge(Deployment(None, PlannedPool(kind, 1)), late)) == "colocated, 2 of H100, chunks of 2048"


def test_measured_costs_replace_derived_ones() -> None:
    derived = make_kind(LLAMA, H100, 1, 8192).costs
    slow_chunk = replace(derived.prefill, token_s=6 * derived.prefill.token_s)
    slow = replace(
        derived,
        source="fitted to 9 reports",
        prefill=slow_chunk,
        decode=replace(derived.decode, chunk=slow_chunk),
        link=replace(derived.link, bytes_per_s=1e9, token_bytes=1),
    )
    measured = replace(H100, measured=(slow,))
    kind = make_kind(LLAMA, measured, 1, 8192)
    assert kind.costs == replace(slow, link=replace(slow.link, token_bytes=derived.link.token_bytes))
    assert (measured.allows(1), measured.allows(2), H100.allows(2)) == (True, False, True)
    workload = sample(20.0)
    plans, before = (find_plans(LLAMA, [offer], workload, GOAL) for offer in (measured, H100))
    kinds = [pool.kind for plan in plans for pool in (plan.deployment.prefill, plan.deployment.decode) if pool]
    assert {each.tensor_parallel for each in kinds} == {1}
    assert plans[0].deployment.price_per_h > before[0].deployment.price_per_h
