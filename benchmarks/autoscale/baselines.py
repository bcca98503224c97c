"""Implements the baseline of the autoscaler benchmark, replicas in proportion to queue lengths, and chooses its
settings.

Most deployments scale like this, with Kubernetes' horizontal pod autoscaler or KEDA and their defaults. Every 15 s, the
wanted size of a pool is its waiting and running requests divided by a target per worker; a pool grows at once, and
shrinks only to the largest size wanted in the last 300 s. Operators tune the targets. Three settings are chosen here,
each with knowledge of the whole trace, which no operator has:

* `cheapest in time`: the fewest worker hours among the settings that meet the autoscaler's attainment; if none does,
  the setting that misses fewest. An operator with a service level would choose it.
* `fewest missed`: the fewest missed requests, at any cost.
* `equal hours`: the fewest missed among the settings that take at most the autoscaler's worker hours divided by the aim
  for them; if there are none, the cheapest.

The autoscaler has one setting for all traces, as must an operator who does not know the traffic: `over_all` compares
it with each baseline setting on all traces together. `choose_one` applies the rules to sums over several cases; on
held-out traces the autoscaler is compared with the settings that this gives for the tuned ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.scaling.signals import Change, PoolBounds, PoolSignal, Resize, Signals
from penstock.config.autoscaler import AutoscalerConfig
from penstock.types import Role


@dataclass(frozen=True, slots=True)
class QueueTargets:
    """The targets: numbers of requests for each worker."""

    prefill: float
    decode: float
    stabilization_s: float = 300.0


TARGETS = [QueueTargets(prefill, decode) for prefill in (0.5, 1.0, 1.5, 2.0) for decode in (8.0, 12.0, 32.0)]
EQUAL_HOURS = "equal hours"
AIMS = {"missed": 0.2, "worker_hours": 0.95, "changes": 0.25}
_ATTAINMENT: float = AutoscalerConfig().attainment
_TOLERANCE = 0.1  # share of the target within which nothing changes


class QueueScaler:
    """Sizes pools by their queue lengths. Implements `elastic.Scaler`."""

    interval_s = 15.0

    def __init__(self, targets: QueueTargets, bounds: Mapping[Role, PoolBounds]) -> None:
        self._targets = targets
        self._bounds = bounds
        self._wanted: dict[Role, deque[tuple[float, int]]] = {role: deque() for role in Role}

    def decide(self, signals: Signals, now_s: float) -> Sequence[Change]:
        held = {role: _num_held(pool) for role, pool in signals.pools.items()}
        held[Role.DECODE] -= held[Role.PREFILL]  # a decode worker holds requests while their prompts are computed
        targets = {Role.PREFILL: self._targets.prefill, Role.DECODE: self._targets.decode}
        changes = []
        for role, pool in signals.pools.items():
            ratio = max(0, held[role]) / targets[role] / max(1, pool.desired)
            wanted = pool.desired if abs(ratio - 1) <= _TOLERANCE else math.ceil(max(0, held[role]) / targets[role])
            memory = self._wanted[role]
            memory.append((now_s, self._bounds[role].clip(wanted)))
            while memory[0][0] < now_s - self._targets.stabilization_s:
                memory.popleft()
            decided = max(memory[-1][1], min(pool.desired, max(count for _, count in memory)))
            if decided != pool.desired:
                changes.append(Resize(role, decided))
        return changes

    def on_started(self, after_s: float) -> None: ...


def _num_held(pool: PoolSignal) -> int:
    return sum(each.load.num_running + each.load.num_waiting for each in pool.ready if each.load is not None)


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """The results of one policy on one trace after the warm-up; `warm_` figures are of the warm-up itself."""

    policy: str
    num_requests: int
    num_missed: int
    worker_hours: float
    num_changes: int
    ttft_p99_s: float
    tpot_p99_s: float
    good_per_worker_hour: float
    warm_missed: int = 0
    warm_worker_hours: float = 0.0
    warm_changes: int = 0


def choose(baselines: Sequence[PolicyResult], ours: PolicyResult) -> dict[str, PolicyResult]:
    """Returns the baseline to compare with, by rule."""
    in_time = [each for each in baselines if each.num_missed <= (1 - _ATTAINMENT) * each.num_requests]
    fewest = min(baselines, key=_missed)
    as_cheap = [each for each in baselines if each.worker_hours <= ours.worker_hours / AIMS["worker_hours"]]
    return {
        "cheapest in time": min(in_time, key=lambda result: result.worker_hours, default=fewest),
        "fewest missed": fewest,
        EQUAL_HOURS: min(as_cheap or [min(baselines, key=lambda result: result.worker_hours)], key=_missed),
    }


def ratios(ours: PolicyResult, other: PolicyResult) -> dict[str, float]:
    """Returns ours divided by the other's; a count of 0 in the denominator counts as 1."""
    return {
        "missed": ours.num_missed / max(1, other.num_missed),
        "worker_hours": ours.worker_hours / other.worker_hours,
        "changes": ours.num_changes / max(1, other.num_changes),
    }


def judge(rule: str, found: dict[str, float]) -> dict[str, bool]:
    """Returns which aims are met. A baseline that was chosen for its hours is not judged by them."""
    names = [name for name in found if (rule, name) != (EQUAL_HOURS, "worker_hours")]
    return {name: found[name] <= AIMS[name] for name in names}


def over_all(results: Sequence[PolicyResult], ours: str) -> dict[str, dict[str, float]]:
    """Returns the ratios of ours to each other policy, of figures summed over all cases."""
    totals = _totals(results)
    own_total = totals.pop(ours)
    return {name: ratios(own_total, total) for name, total in totals.items()}


def choose_one(results: Sequence[PolicyResult], ours: str) -> dict[str, str]:
    """Returns the name of the best setting for all cases together, by rule. `results` holds ours and baselines."""
    totals = _totals(results)
    own_total = totals.pop(ours)
    return {rule: total.policy for rule, total in choose(list(totals.values()), own_total).items()}


def _totals(results: Sequence[PolicyResult]) -> dict[str, PolicyResult]:
    names = dict.fromkeys(result.policy for result in results)
    return {name: _sum_up([result for result in results if result.policy == name]) for name in names}


def _sum_up(rows: Sequence[PolicyResult]) -> PolicyResult:
    num_requests, num_missed = sum(row.num_requests for row in rows), sum(row.num_missed for row in rows)
    hours = sum(row.worker_hours for row in rows)
    return PolicyResult(
        rows[0].policy,
        num_requests,
        num_missed,
        hours,
        sum(row.num_changes for row in rows),
        max(row.ttft_p99_s for row in rows),
        max(row.tpot_p99_s for row in rows),
        (num_requests - num_missed) / hours,
    )


def _missed(result: PolicyResult) -> tuple[int, float]:
    return result.num_missed, result.worker_hours
