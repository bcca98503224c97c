"""The autoscaler that most deployments have, to hold ours against: replicas in proportion to queue lengths.

As Kubernetes' horizontal pod autoscaler or KEDA do it with their defaults: every 15 s the total of what waits and runs
in a pool over a target for each worker, up at once, down to the most that was wanted in the last 300 s.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.scaling_signals import Bounds, Change, PoolSignal, Resize, Signals
from penstock.types import Role

_TOLERANCE = 0.1  # of the target, within which nothing changes


@dataclass(frozen=True, slots=True)
class QueueTargets:
    """Requests for each worker."""

    prefill: float
    decode: float
    stabilization_s: float = 300.0


class Reactive:
    interval_s = 15.0

    def __init__(self, targets: QueueTargets, bounds: Mapping[Role, Bounds]) -> None:
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

    def on_started(self, after_s: float) -> None:
        pass


def _num_held(pool: PoolSignal) -> int:
    return sum(one.load.num_running + one.load.num_waiting for one in pool.ready if one.load is not None)
