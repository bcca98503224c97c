"""Refuses changes that the machines cannot hold: sizes, flips, and workers that an upgrade starts beside the others.

`capacity_policy` counts; this module passes it the present pools and words the refusals for operators. `Machines`
(`cluster.ray.machines`) knows what the machines have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from cluster.pools.capacity_policy import Capacity, Fit, PoolPlan, WorkerNeed, count_fitting
from cluster.pools.pool import Pools, Slot
from penstock.errors import InvalidInput
from penstock.types import Role

_FIX = "add a node, or ask for less for each worker (num_cpus, num_gpus or resources of its pool)"


class Machines(Protocol):
    """The machines that the deployment runs on."""

    @property
    def needs(self) -> Mapping[Role, WorkerNeed]:
        """Returns what one worker of each pool takes."""
        ...

    @property
    def num_cores(self) -> float:
        """The cores of all machines."""
        ...

    async def read(self, pids: Iterable[int]) -> Capacity:
        """Returns what the machines have now; `pids` are those of the workers that run. Raises Unavailable."""
        ...


class CapacityCheck:
    """Refuses nothing without `machines`. Call `refresh` before the others."""

    def __init__(self, pools: Pools, machines: Machines | None) -> None:
        self._pools = pools
        self._machines = machines
        self._capacity: Capacity | None = None

    async def refresh(self) -> None:
        """Raises Unavailable while the machines' state cannot be read."""
        if self._machines is not None:
            self._capacity = None
            self._capacity = await self._machines.read([slot.pid for slot in self._pools.worker_slots if slot.pid])

    def count(self, role: Role) -> int | None:
        """Returns how many workers the pool can have; None: unknown."""
        fit = self._fit(role, {})
        return fit.workers if fit is not None else None

    def check_scale(self, role: Role, replicas: int) -> None:
        """Raises InvalidInput if the pool grows to a size that does not fit."""
        fit = self._fit(role, {})
        if fit is not None and self._pools[role.value].replicas < replicas > fit.workers:
            raise InvalidInput(
                "replicas",
                f"is {replicas}; the {role.value} pool can have {fit.workers} beside {self._describe_others(role)}: "
                f"{fit.limit}; give {fit.workers} or fewer, {_FIX}, or give --force: the rest then stays unplaced",
            )

    def check_upgrade(self) -> None:
        """Raises InvalidInput if one more worker of each pool does not fit: new workers start beside the old ones."""
        growing = {role: 1 for role in Role if self._pools[role.value].replicas}
        for role in growing:
            fit = self._fit(role, growing)
            wanted = self._pools[role.value].replicas + 1
            if fit is not None and wanted > fit.workers:
                raise InvalidInput(
                    "model",
                    f"cannot be upgraded: new workers start beside the old ones, which makes {wanted} in the "
                    f"{role.value} pool, and {fit.workers} fit: {fit.limit}; scale a pool down by one first, {_FIX}, "
                    "or give --force: the upgrade then waits for room, and rolls back without it",
                )

    def check_flip(self, slot: Slot, role: Role) -> None:
        """Raises InvalidInput if the pools' workers take different resources and one more does not fit: the process
        keeps what it has, but there would be no room for a successor."""
        source = Role(slot.incarnation.pool_name)
        if self._machines is None or self._machines.needs[source] == self._machines.needs[role]:
            return
        fit = self._fit(role, {source: -1}, without=slot)
        wanted = self._pools[role.value].replicas + 1
        if fit is not None and wanted > fit.workers:
            raise InvalidInput(
                "role",
                f"is {role.value}; with {slot.worker_id} that pool has {wanted} workers, and {fit.workers} fit: "
                f"{fit.limit}; {_FIX}, or give --force",
            )

    def _fit(self, role: Role, changes: Mapping[Role, int], without: Slot | None = None) -> Fit | None:
        """Returns how many workers the pool can have if the other pools change their sizes by `changes`."""
        if self._machines is None or self._capacity is None:
            return None
        plans = {each: self._plan(each, self._machines.needs[each], without) for each in Role}
        others = [
            replace(plan, replicas=plan.replicas + changes.get(each, 0))
            for each, plan in plans.items()
            if each is not role
        ]
        return count_fitting(self._capacity, plans[role], others)

    def _plan(self, role: Role, need: WorkerNeed, without: Slot | None) -> PoolPlan:
        pool = self._pools[role.value]
        here = [slot for slot in pool.slots if slot.node and not slot.is_leaving and slot is not without]
        return PoolPlan(need, pool.replicas, [slot.node for slot in here])

    def _describe_others(self, role: Role) -> str:
        counts = {other: self._pools[other.value].replicas for other in Role if other is not role}
        return " and ".join(f"{count} {other.value} worker{'s' * (count != 1)}" for other, count in counts.items())
