"""Collects all that `penstock plan` reports: the choice, its alternatives, and their assumptions.

The flow model proposes plans and the simulator decides: the cheapest ones are simulated, and if none meets the goal
there, the best one is enlarged, in the pool whose target is missed, until it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.sizing.model_shape import ModelShape
from simulator.planning import arithmetic
from simulator.planning.deployment import Deployment, PlannedPool, PricedAccelerator, evaluate
from simulator.planning.outlook import Economy, Variation, find_headroom, measure_economy, sweep_rates, vary
from simulator.planning.search import Goal, Plan, find_plans, idle_misses
from simulator.planning.verify import Verification, verify
from simulator.planning.workload import Workload
from simulator.traffic.statistics import summarize_values

_MOST_VERIFIED = 3  # number of the cheapest plans that are simulated
_MOST_ENLARGED = 4


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan with its reasons. `verifications` maps a plan's place among `plans` to its simulation; enlarged plans come
    last.
    """

    shape: ModelShape
    workload: Workload
    goal: Goal
    num_dropped: int  # requests longer than the model's context
    plans: tuple[Plan, ...]
    verifications: Mapping[int, Verification]
    chosen: Plan
    page_size: int
    economy: Economy
    headroom: float
    variations: tuple[Variation, ...]
    rates: tuple[tuple[Plan, tuple[tuple[float, float], ...]], ...]  # (requests/s, attainment) of plans to compare

    @property
    def is_verified(self) -> bool:
        """Returns whether the simulator agrees that the chosen plan meets the goal."""
        found = self.verification
        return found is not None and found.attainment >= self.goal.attainment

    @property
    def verification(self) -> Verification | None:
        return self.verifications.get(self.plans.index(self.chosen))


def make_report(
    shape: ModelShape,
    offers: Sequence[PricedAccelerator],
    workload: Workload,
    goal: Goal,
    *,
    num_dropped: int = 0,
    num_simulated: int = 0,
    seed: int = 0,
) -> PlanReport:
    """Finds plans, simulates `num_simulated` requests of the cheapest, and describes the choice.

    If no plan meets the goal in the simulator, it chooses the one that comes closest. Raises what `find_plans` raises.
    """
    plans = find_plans(shape, offers, workload, goal)
    verifications: dict[int, Verification] = {}
    chosen = plans[0]
    if num_simulated and workload.records:
        chosen = _verify(plans, verifications, shape, workload.first(num_simulated), workload, goal, seed)
    page_size = arithmetic.choose_page_size(shape, most_ranks(chosen.deployment))
    compared = [chosen] + [
        next(each for each in plans if (each.deployment.prefill is None) is not colocated)
        for colocated in (chosen.deployment.prefill is None,)
        if any((each.deployment.prefill is None) is not colocated for each in plans)
    ]
    return PlanReport(
        shape,
        workload,
        goal,
        num_dropped,
        tuple(plans),
        verifications,
        chosen,
        page_size,
        measure_economy(chosen.deployment, chosen.result, workload),
        find_headroom(chosen.deployment, workload, goal),
        tuple(vary(chosen, workload, goal)),
        tuple((each, tuple(sweep_rates(each.deployment, workload, goal.slo))) for each in compared),
    )


def _verify(
    plans: list[Plan],
    verifications: dict[int, Verification],
    shape: ModelShape,
    simulated: Workload,
    workload: Workload,
    goal: Goal,
    seed: int,
) -> Plan:
    """Simulates the cheapest plans, then larger ones, until one meets the goal. Adds the larger ones to the plans."""
    index = 0
    while index < len(plans):
        deployment = plans[index].deployment
        page_size = arithmetic.choose_page_size(shape, most_ranks(deployment))
        found = verifications[index] = verify(deployment, simulated, goal.slo, page_size, seed)
        if found.attainment >= goal.attainment:
            return plans[index]
        best = max(verifications, key=lambda each: verifications[each].attainment)
        if len(verifications) >= _MOST_VERIFIED + _MOST_ENLARGED:
            return plans[best]
        if len(verifications) < min(_MOST_VERIFIED, len(plans)):
            index += 1
        else:
            larger = enlarge(plans[best].deployment, verifications[best])
            plans.append(Plan(larger, evaluate(larger, workload, goal.slo)))
            index = len(plans) - 1
    raise AssertionError("every pass ends or adds a plan")


def enlarge(deployment: Deployment, found: Verification) -> Deployment:
    """Adds a worker to the pool that causes most of the misses."""
    prefill, decode = deployment.prefill, deployment.decode
    num_missed = (1 - found.attainment) * found.num_requests
    if prefill is not None and found.num_late >= num_missed / 2:
        return Deployment(prefill.resized(prefill.num_workers + 1), decode)
    return Deployment(prefill, decode.resized(decode.num_workers + 1))


def most_ranks(deployment: Deployment) -> int:
    """Returns the largest tensor-parallel degree, which cuts pages into the smallest parts."""
    pools = [deployment.decode, *([deployment.prefill] if deployment.prefill else [])]
    return max(pool.kind.tensor_parallel for pool in pools)


def explain(report: PlanReport) -> dict[str, list[str]]:
    """Returns the reasons in words and numbers, by subject."""
    shape, workload, slo = report.shape, report.workload, report.goal.slo
    deployment, result = report.chosen.deployment, report.chosen.result
    context = workload.mean_input_tokens + workload.mean_output_tokens / 2
    computing = (deployment.prefill or deployment.decode).kind
    idle = idle_misses(computing, workload, slo)
    return {
        "KV": arithmetic.explain_kv(shape, context),
        "prompts": [
            *arithmetic.explain_prefill(
                shape, computing, workload.mean_input_tokens, moves=deployment.prefill is not None
            ),
            f"{idle:.1%} of the prompts would miss the TTFT target even on an idle worker.",
        ],
        "decoding": arithmetic.explain_decode(shape, deployment.decode.kind, result.times.mean_batch, context, slo),
        "pages": [arithmetic.explain_page(shape, most_ranks(deployment), report.page_size)],
        "pools": arithmetic.explain_pools(deployment, result, workload, slo),
    }


def as_json(report: PlanReport) -> dict[str, Any]:
    """Returns the report as plain data."""
    deployment = report.chosen.deployment
    return {
        "model": report.shape.name,
        "workload": {
            "name": report.workload.name,
            "num_requests": len(report.workload.requests),
            "num_dropped": report.num_dropped,
            "requests_per_s": report.workload.requests_per_s,
            "mean_input_tokens": report.workload.mean_input_tokens,
            "mean_output_tokens": report.workload.mean_output_tokens,
            "reusable_share": report.workload.reusable_share,
        },
        "goal": {**report.goal.slo.model_dump(), "attainment": report.goal.attainment},
        "chosen": _deployment_json(deployment),
        "page_size": report.page_size,
        "expected": _result_json(report.chosen),
        "is_verified": report.is_verified,
        "economy": asdict(report.economy),
        "headroom": report.headroom,
        "sensitivity": [
            {
                "assumption": each.name,
                "attainment": each.attainment,
                "sufficient": _deployment_json(each.sufficient) if each.sufficient else None,
            }
            for each in report.variations
        ],
        "candidates": [
            {
                **_deployment_json(plan.deployment),
                "expected": _result_json(plan),
                "simulated": asdict(found) if (found := report.verifications.get(index)) else None,
            }
            for index, plan in enumerate(report.plans)
        ],
        "reasons": explain(report),
    }


def _result_json(plan: Plan) -> dict[str, float]:
    result = plan.result
    ttft, tpot = summarize_values(result.times.ttft_s), summarize_values(result.times.tpot_s)
    return {
        "attainment": result.attainment,
        "hit_rate": result.hit_rate,
        "ttft_p50_s": ttft.p50,
        "ttft_p99_s": ttft.p99,
        "tpot_p50_s": tpot.p50,
        "tpot_p99_s": tpot.p99,
        "utilization": result.times.utilization,
        "mean_batch": result.times.mean_batch,
    }


def _deployment_json(deployment: Deployment) -> dict[str, Any]:
    return {
        "prefill": _pool_json(deployment.prefill) if deployment.prefill else None,
        "decode": _pool_json(deployment.decode),
        "num_devices": deployment.num_devices,
        "price_per_h": deployment.price_per_h,
    }


def _pool_json(pool: PlannedPool) -> dict[str, Any]:
    return {
        "workers": pool.num_workers,
        "accelerator": pool.kind.offer.device.name,
        "tensor_parallel": pool.kind.tensor_parallel,
        "chunk_tokens": pool.kind.chunk_tokens,
        "kv_tokens": pool.kind.kv_tokens,
    }
