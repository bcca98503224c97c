"""Finds the cheapest deployments that meet the targets, by the flow model. Pure.

As in DistServe (arXiv:2401.09670), each pool is sized by itself, prefill workers by TTFT and decode workers by the time
per token; then the pools are combined and enlarged until enough requests meet both targets. Unlike in DistServe,
arrivals are the workload's own, and caches count: more prefill workers hold more prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.config import SloConfig
from penstock.errors import InvalidInput
from penstock.sizing.model_shape import ModelShape
from simulator.planning.deployment import (
    HIT_EFFICIENCY,
    Deployment,
    FlowResult,
    PlannedPool,
    PricedAccelerator,
    WorkerKind,
    decode_flow,
    evaluate,
    exposed_transfer_s,
    make_kind,
    meets,
    patience_of,
    prefill_ends,
)
from simulator.planning.flow import prefill_times
from simulator.planning.workload import Workload

CHUNKS = (512, 1024, 2048, 4096, 8192)
_OVERHEAD = 0.05  # largest share of a full chunk's time for the step's fixed part
_KEPT_OPTIONS = 3  # cheapest kinds of each pool that are combined
_MOST_JOINS = 40
_FAR = 1.5  # times the cheapest pool's price, beyond which no other is sized
_SHORTEST_CHUNK = 128


@dataclass(frozen=True, slots=True)
class Goal:
    """The targets that a deployment must reach, and what it may use."""

    slo: SloConfig
    attainment: float  # share of requests within both targets
    degrees: Sequence[int] = (1, 2, 4, 8)
    max_devices: int = 512

    def __post_init__(self) -> None:
        if not 0 < self.attainment < 1:
            raise InvalidInput("attainment", f"is {self.attainment:g}; give a share between 0 and 1")


@dataclass(frozen=True, slots=True)
class Plan:
    """A deployment that meets the goal, with the flow model's prediction."""

    deployment: Deployment
    result: FlowResult


def find_plans(shape: ModelShape, offers: Sequence[PricedAccelerator], workload: Workload, goal: Goal) -> list[Plan]:
    """Returns deployments that meet the goal, the cheapest first: disaggregated and colocated, by kind of worker.

    Raises InvalidInput, which names the cause: memory, the time of a prompt on an idle worker, or the number of
    devices.
    """
    kinds = _kinds(shape, offers, workload, goal, colocated=False)
    prefill = _cheapest(kinds, lambda kind: _prefill_suffices(kind, workload, goal), goal)
    decode = _cheapest(kinds, lambda kind: _decode_suffices(kind, workload, goal), goal)
    plans = []
    for first in prefill:
        for second in decode:
            if plan := _grow(Deployment(first, second), workload, goal):
                plans.append(plan)
    plans += _colocated(shape, offers, workload, goal)
    if not plans:
        raise InvalidInput("goal", _why_none(kinds, workload, goal))
    return sorted(plans, key=lambda plan: (plan.deployment.price_per_h, -plan.result.num_met))


def _kinds(
    shape: ModelShape, offers: Sequence[PricedAccelerator], workload: Workload, goal: Goal, *, colocated: bool
) -> list[WorkerKind]:
    """Returns the kinds of worker that can hold the model and the longest request."""
    found = []
    for offer in offers:
        for degree in filter(offer.allows, goal.degrees):
            kind = make_kind(shape, offer, degree, CHUNKS[-1])
            if shape.num_heads % degree or kind.kv_tokens < workload.longest_tokens:
                continue
            chunks = _itl_chunks(kind, goal.slo) if colocated else [choose_chunk(kind)]
            found += [replace(kind, chunk_tokens=chunk) for chunk in chunks]
    return found


def choose_chunk(kind: WorkerKind) -> int:
    """Returns the shortest chunk whose step is spent mostly on computing: longer ones delay others and expose
    transfers.
    """
    costs = kind.costs.prefill
    for chunk in CHUNKS:
        fixed_s = costs.step_s - min(costs.hidden_s, chunk * costs.token_s)
        if fixed_s <= _OVERHEAD * (fixed_s + chunk * costs.token_s):
            return chunk
    return CHUNKS[-1]


def _itl_chunks(kind: WorkerKind, slo: SloConfig) -> list[int]:
    """Returns the two longest chunks that keep a step of a colocated worker within the target; the shortest if none
    does."""
    costs = kind.costs.decode
    fitting = [chunk for chunk in (_SHORTEST_CHUNK, 256, *CHUNKS) if costs.batch_s(1, chunk) <= slo.itl_s]
    return fitting[-2:] or [_SHORTEST_CHUNK]


def _prefill_suffices(kind: WorkerKind, workload: Workload, goal: Goal) -> Callable[[int], bool]:
    def suffices(num_workers: int) -> bool:
        cached = workload.hit_share(num_workers * float(kind.kv_tokens)) * HIT_EFFICIENCY
        ready_s, _ = prefill_ends(PlannedPool(kind, num_workers), workload.requests, cached)
        met = sum(
            end - request.arrival_s <= goal.slo.first_token_s(request.num_input_tokens)
            for end, request in zip(ready_s, workload.requests, strict=True)
        )
        return met >= goal.attainment * len(ready_s)

    return suffices


def _decode_suffices(kind: WorkerKind, workload: Workload, goal: Goal) -> Callable[[int], bool]:
    """Returns a function that says whether a number of workers has room in time and is fast enough, if prompts take no
    time.
    """
    ready_s = [request.arrival_s for request in workload.requests]
    patience = patience_of(workload, goal.slo, goal.attainment)

    def suffices(num_workers: int) -> bool:
        flow = decode_flow(PlannedPool(kind, num_workers), colocated=False)
        return flow.run(workload.requests, ready_s, patience=patience) is not None

    return suffices


def _cheapest(
    kinds: Iterable[WorkerKind], suffices_of: Callable[[WorkerKind], Callable[[int], bool]], goal: Goal
) -> list[PlannedPool]:
    """Returns the cheapest pools, sized one kind after the other; those that cost far more than another are skipped."""
    pools: list[PlannedPool] = []
    for kind in sorted(kinds, key=lambda kind: kind.price_per_h):
        most = goal.max_devices // kind.tensor_parallel
        if pools:
            most = min(most, int(_FAR * min(pool.price_per_h for pool in pools) / kind.price_per_h))
        num_workers = _fewest(suffices_of(kind), most)
        if num_workers is not None:
            pools.append(PlannedPool(kind, num_workers))
    return sorted(pools, key=lambda pool: pool.price_per_h)[:_KEPT_OPTIONS]


def _fewest(suffices: Callable[[int], bool], most: int) -> int | None:
    """Returns the smallest number of workers that suffices, or None if `most` do not."""
    low, high = 0, 1
    while high < most and not suffices(high):
        low, high = high, min(most, 2 * high)
    if most < 1 or (high == most and not suffices(most)):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def _grow(deployment: Deployment, workload: Workload, goal: Goal) -> Plan | None:
    """Adds the worker that helps most for its price until the goal is met; None if it is not within the limits."""
    result = evaluate(deployment, workload, goal.slo)
    for _ in range(_MOST_JOINS):
        if result.attainment >= goal.attainment:
            return Plan(deployment, result)
        larger = [each for each in _larger(deployment) if each.num_devices <= goal.max_devices]
        if not larger:
            return None
        found = [(each, evaluate(each, workload, goal.slo)) for each in larger]
        before = result.num_met
        deployment, result = max(
            found, key=lambda pair: (pair[1].num_met - before) / (pair[0].price_per_h - deployment.price_per_h + 1e-9)
        )
    return None


def _larger(deployment: Deployment) -> Iterator[Deployment]:
    prefill, decode = deployment.prefill, deployment.decode
    if prefill is not None:
        yield Deployment(prefill.resized(prefill.num_workers + 1), decode)
    yield Deployment(prefill, decode.resized(decode.num_workers + 1))


def _colocated(shape: ModelShape, offers: Sequence[PricedAccelerator], workload: Workload, goal: Goal) -> list[Plan]:
    kinds = _kinds(shape, offers, workload, goal, colocated=True)

    def suffices_of(kind: WorkerKind) -> Callable[[int], bool]:
        return lambda num: meets(Deployment(None, PlannedPool(kind, num)), workload, goal.slo, goal.attainment)

    deployments = [Deployment(None, pool) for pool in _cheapest(kinds, suffices_of, goal)]
    return [Plan(each, evaluate(each, workload, goal.slo)) for each in deployments]


def resize(deployment: Deployment, workload: Workload, goal: Goal) -> Deployment | None:
    """Returns the same kinds of workers in the numbers that meet the goal, or None if none do."""
    decode, prefill = deployment.decode.kind, deployment.prefill
    if prefill is None:
        num_workers = _fewest(
            lambda num: meets(Deployment(None, PlannedPool(decode, num)), workload, goal.slo, goal.attainment),
            goal.max_devices // decode.tensor_parallel,
        )
        return Deployment(None, PlannedPool(decode, num_workers)) if num_workers else None
    num_prefill = _fewest(
        _prefill_suffices(prefill.kind, workload, goal), goal.max_devices // prefill.kind.tensor_parallel
    )
    num_decode = _fewest(_decode_suffices(decode, workload, goal), goal.max_devices // decode.tensor_parallel)
    if num_prefill is None or num_decode is None:
        return None
    plan = _grow(Deployment(PlannedPool(prefill.kind, num_prefill), PlannedPool(decode, num_decode)), workload, goal)
    return plan.deployment if plan else None


def idle_misses(kind: WorkerKind, workload: Workload, slo: SloConfig) -> float:
    """Returns the share of requests that miss TTFT even on an idle worker with every reusable token cached."""
    times_s = prefill_times(workload.requests, HIT_EFFICIENCY, kind.costs.prefill, kind.chunk_tokens)
    missed = sum(
        time_s + exposed_transfer_s(kind, request) > slo.first_token_s(request.num_input_tokens)
        for time_s, request in zip(times_s, workload.requests, strict=True)
    )
    return missed / len(times_s)


def _why_none(kinds: Sequence[WorkerKind], workload: Workload, goal: Goal) -> str:
    if not kinds:
        return (
            f"no worker holds the weights and {workload.longest_tokens:,} tokens of the longest request; offer larger "
            "accelerators, a higher --tensor-parallel, quantized weights or KV, or give --max-context"
        )
    best = min(kinds, key=lambda kind: idle_misses(kind, workload, goal.slo))
    share = idle_misses(best, workload, goal.slo)
    if share > 1 - goal.attainment:
        return (
            f"{share:.1%} of the prompts take longer than the TTFT target even on an idle worker of {best.name}, but "
            f"at most {1 - goal.attainment:.1%} may; raise --ttft or --ttft-per-token, lower --attainment, or offer "
            "faster ones"
        )
    tokens_s = best.costs.decode.decode_s(1, workload.longest_tokens)
    if tokens_s > goal.slo.itl_s:
        return (
            f"a step with the longest context takes {tokens_s * 1e3:.1f} ms on {best.name}, but --itl is "
            f"{goal.slo.itl_s * 1e3:g} ms; raise it or offer faster ones"
        )
    return f"no deployment of up to {goal.max_devices} devices meets the targets; raise --max-devices or the targets"
