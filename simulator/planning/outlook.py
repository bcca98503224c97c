"""Estimates a plan's goodput, cost, headroom and sensitivity by the flow model. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.config import SloConfig
from simulator.planning.deployment import Deployment, FlowResult, evaluate, meets
from simulator.planning.search import Goal, Plan, resize
from simulator.planning.workload import Workload

RATES = (0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0)
_MOST_HEADROOM = 8.0
_PRECISION = 0.02


@dataclass(frozen=True, slots=True)
class Economy:
    """Throughput and cost of a deployment under its workload."""

    goodput_per_s: float  # requests within both targets
    goodput_per_device_s: float
    price_per_h: float
    per_million_output_tokens: float
    per_million_tokens: float  # price of a million tokens of prompts and answers


@dataclass(frozen=True, slots=True)
class Variation:
    """A plan when one assumption is wrong."""

    name: str
    attainment: float  # attainment of the unchanged plan
    sufficient: Deployment | None  # the same kinds of workers in sufficient numbers; None: no number suffices

    @property
    def price_per_h(self) -> float | None:
        return self.sufficient.price_per_h if self.sufficient else None


def measure_economy(deployment: Deployment, result: FlowResult, workload: Workload) -> Economy:
    """Returns goodput and costs if the workload continues all the time."""
    rate = workload.requests_per_s
    output_per_h = rate * workload.mean_output_tokens * 3600
    input_per_h = rate * workload.mean_input_tokens * 3600
    price = deployment.price_per_h
    good = rate * result.attainment
    return Economy(
        good,
        good / deployment.num_devices,
        price,
        price / output_per_h * 1e6,
        price / (input_per_h + output_per_h) * 1e6,
    )


def find_headroom(deployment: Deployment, workload: Workload, goal: Goal) -> float:
    """Returns by what factor the rate may grow until the targets are missed; at most 8."""
    low, high = 1.0, 2.0
    while high <= _MOST_HEADROOM and meets(deployment, workload.varied(rate=high), goal.slo, goal.attainment):
        low, high = high, 2 * high
    if high > _MOST_HEADROOM:
        return _MOST_HEADROOM
    while high / low > 1 + _PRECISION:
        middle = (low + high) / 2
        is_met = meets(deployment, workload.varied(rate=middle), goal.slo, goal.attainment)
        low, high = (middle, high) if is_met else (low, middle)
    return low


def sweep_rates(
    deployment: Deployment, workload: Workload, slo: SloConfig, factors: Sequence[float] = RATES
) -> list[tuple[float, float]]:
    """Returns (requests per second, attainment) at multiples of the workload's rate."""
    return [
        (workload.requests_per_s * factor, evaluate(deployment, workload.varied(rate=factor), slo).attainment)
        for factor in factors
    ]


def vary(plan: Plan, workload: Workload, goal: Goal, by: float = 0.2) -> list[Variation]:
    """Returns the effect of each assumption being off by a share: rate, lengths, reuse and targets."""
    variations = []
    for sign in (1, -1):
        factor = 1 + sign * by
        label = f"{sign * by:+.0%}"
        for name, varied in (
            ("rate", workload.varied(rate=factor)),
            ("prompts", workload.varied(inputs=factor)),
            ("answers", workload.varied(outputs=factor)),
            *((("reuse", workload.varied(hits=factor)),) if workload.reusable_share else ()),
        ):
            variations.append(_variation(f"{name} {label}", plan, varied, goal))
        slo = goal.slo
        for name, changed in (
            (
                "TTFT target",
                slo.model_copy(update={"ttft_s": slo.ttft_s * factor, "ttft_token_s": slo.ttft_token_s * factor}),
            ),
            ("ITL target", slo.model_copy(update={"itl_s": slo.itl_s * factor})),
        ):
            variations.append(_variation(f"{name} {label}", plan, workload, replace(goal, slo=changed)))
    return variations


def _variation(name: str, plan: Plan, workload: Workload, goal: Goal) -> Variation:
    attainment = evaluate(plan.deployment, workload, goal.slo).attainment
    return Variation(name, attainment, resize(plan.deployment, workload, goal))
