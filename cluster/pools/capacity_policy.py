"""Decides how many workers the machines can hold, from what each worker takes and what the nodes have. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cluster.pools.resources import NodeResources, ResourceShare, matches_labels

_GIB = 2**30
_ACCELERATOR = "accelerator_type:"  # a label on nodes of one type rather than an amount


@dataclass(frozen=True, slots=True)
class WorkerNeed:
    """The resources that one worker takes: a share for each of its ranks, all on one node."""

    share: ResourceShare
    num_ranks: int = 1

    @property
    def amounts(self) -> dict[str, float]:
        return {name: amount * self.num_ranks for name, amount in self.share.bundle().items()}

    def __str__(self) -> str:
        return ", ".join(f"{name} {amount:g}" for name, amount in self.amounts.items()) or "nothing"


@dataclass(frozen=True, slots=True)
class MemoryRoom:
    """The memory of one machine that holds all workers."""

    free_bytes: float
    worker_bytes: float  # the largest running worker's


@dataclass(frozen=True, slots=True)
class Capacity:
    """The total resources of the machines, used or not."""

    nodes: Mapping[str, NodeResources]  # by node id
    growth: Mapping[str, float] | None = None  # totals that the cluster may grow to; None: it cannot grow
    memory: MemoryRoom | None = None


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """A pool's workers: how many there should be, and the nodes of those already placed."""

    need: WorkerNeed
    replicas: int
    nodes: Sequence[str] = field(default=())  # one entry for each placed worker


@dataclass(frozen=True, slots=True)
class Fit:
    """The number of workers that a pool can have, and what limits it."""

    workers: int
    limit: str


def count_fitting(capacity: Capacity, pool: PoolPlan, others: Sequence[PoolPlan]) -> Fit:
    """Returns how many workers `pool` can have once the `others` have theirs."""
    amounts = pool.need.amounts
    if not amounts:
        fit = Fit(2**31, "")
    else:
        placed, more = _count_on_nodes(capacity, pool, others)
        grown = _count_after_growth(capacity, pool.need, others) if capacity.growth is not None else 0
        totals = ", ".join(f"{name} {_total(capacity, name):g}" for name in amounts)
        where = "the nodes have" if grown <= placed + more else "the cluster grows to"
        fit = Fit(max(placed + more, grown), f"each needs {pool.need}, and {where} {totals} in all")
    if capacity.memory is not None:
        by_memory = _count_in_memory(capacity.memory, pool, others)
        if by_memory < fit.workers:
            taken, free = capacity.memory.worker_bytes / _GIB, capacity.memory.free_bytes / _GIB
            fit = Fit(by_memory, f"each takes {taken:.1f} GiB of memory, of which {free:.1f} are free")
    return fit


def _count_on_nodes(capacity: Capacity, pool: PoolPlan, others: Sequence[PoolPlan]) -> tuple[int, int]:
    """Returns how many workers of `pool` are placed, and how many more would fit after all others are."""
    free = {name: dict(node.resources) for name, node in capacity.nodes.items()}
    for plan in (pool, *others):
        for node in plan.nodes:
            if node in free:
                _take(free[node], plan.need.amounts)
    for plan in others:
        for _ in range(plan.replicas - len(plan.nodes)):
            found = next((node for node in free if _holds(capacity, free, node, plan.need)), None)
            if found is not None:
                _take(free[found], plan.need.amounts)
    amounts = pool.need.amounts.items()
    more = sum(
        max(0, math.floor(min(_ratio(left.get(name, 0.0), amount) for name, amount in amounts)))
        for node, left in free.items()
        if matches_labels(capacity.nodes[node], pool.need.share)
    )
    return sum(node in free for node in pool.nodes), more


def _count_after_growth(capacity: Capacity, need: WorkerNeed, others: Sequence[PoolPlan]) -> int:
    left = dict(capacity.growth or {})
    for plan in others:
        _take(left, {name: amount * plan.replicas for name, amount in plan.need.amounts.items()})
    counts = [_ratio(left.get(name, 0.0), amount) for name, amount in need.amounts.items() if _is_amount(name)]
    return max(0, math.floor(min(counts, default=0.0)))


def _count_in_memory(memory: MemoryRoom, pool: PoolPlan, others: Sequence[PoolPlan]) -> int:
    num_coming = sum(max(0, plan.replicas - len(plan.nodes)) for plan in others)
    return len(pool.nodes) + max(0, math.floor(memory.free_bytes / memory.worker_bytes) - num_coming)


def _holds(capacity: Capacity, free: Mapping[str, Mapping[str, float]], node: str, need: WorkerNeed) -> bool:
    fits = all(_ratio(free[node].get(name, 0.0), amount) >= 1.0 for name, amount in need.amounts.items())
    return fits and matches_labels(capacity.nodes[node], need.share)


def _take(left: dict[str, float], amounts: Mapping[str, float]) -> None:
    for name, amount in amounts.items():
        left[name] = left.get(name, 0.0) - amount


def _ratio(left: float, amount: float) -> float:
    return left / amount + 1e-6  # the tolerance absorbs rounding in sums of hundredths


def _total(capacity: Capacity, name: str) -> float:
    present = sum(node.resources.get(name, 0.0) for node in capacity.nodes.values())
    return max(present, (capacity.growth or {}).get(name, 0.0))


def _is_amount(name: str) -> bool:
    return not name.startswith(_ACCELERATOR)
