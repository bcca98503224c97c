"""Changes the sizes of pools and the roles of workers, for an operator or the autoscaler.

Owns the flips in flight. Implements `cluster.scaling.runner.ScalableDeployment`.
"""

from __future__ import annotations

from collections.abc import Mapping

from cluster.controller.event_log import SCALED, EventLog
from cluster.controller.load_reports import LoadReportStore
from cluster.controller.membership import MembershipPublisher
from cluster.controller.supervised_process import SupervisedProcess
from cluster.controller.supervisor import Supervisor
from cluster.lifecycle.capacity_check import CapacityCheck
from cluster.lifecycle.drain import TIMEOUT_S
from cluster.lifecycle.drain_service import DrainService
from cluster.lifecycle.flip import RoleFlip
from cluster.lifecycle.upgrade.upgrade_service import UpgradeService
from cluster.pools.pool import Incarnation, Pools, Slot, WorkerState
from cluster.pools.pool_policy import choose_workers_to_remove
from penstock.errors import InvalidInput
from penstock.types import Role, WorkerEnd, WorkerId
from penstock.v1 import worker_pb2


class PoolService:
    """Scales pools and flips workers."""

    def __init__(
        self,
        pools: Pools,
        reports: LoadReportStore,
        supervisor: Supervisor,
        draining: DrainService,
        upgrading: UpgradeService,
        membership: MembershipPublisher,
        events: EventLog,
        capacity: CapacityCheck,
        *,
        can_flip: bool,
    ) -> None:
        """`can_flip` says that the pools' engines are alike."""
        self._pools = pools
        self._reports = reports
        self._supervisor = supervisor
        self._draining = draining
        self._upgrading = upgrading
        self._membership = membership
        self._events = events
        self._capacity = capacity
        self._can_flip = can_flip
        self._flips: list[RoleFlip] = []

    def replicas(self, pool_name: str) -> int:
        """Returns how many workers a pool should have. Raises InvalidInput."""
        if pool_name not in list(Role):
            raise InvalidInput("pool", f"is {pool_name!r}; give one of {', '.join(Role)}")
        return self._pools[pool_name].replicas

    def scale(
        self,
        pool_name: str,
        replicas: int,
        timeout_s: float = TIMEOUT_S,
        by: str = "an operator",
        *,
        force: bool = False,
    ) -> list[WorkerId]:
        """Sets how many workers a pool should have and returns those that are drained. Raises InvalidInput, also for
        more workers than fit unless with `force`; `refresh` must come first."""
        before = self.replicas(pool_name)
        self._upgrading.check_none("replicas")
        if pool_name == Role.DECODE and replicas < 1:
            raise InvalidInput(
                "replicas", "is 0 for the decode pool; without a decode worker nothing is served: give 1 or more"
            )
        if not force:
            self._capacity.check_scale(Role(pool_name), replicas)
        pool = self._pools[pool_name]
        draining = []
        for slot in choose_workers_to_remove(pool.slots, self._reports.by_worker(), before - replicas):
            if slot.state is WorkerState.READY:
                self._draining.drain(slot.worker_id, timeout_s, end=WorkerEnd.SCALED_DOWN)
                draining.append(slot.worker_id)
        pool.set_replicas(replicas)  # of the remaining workers, the pool stops none that is ready
        self._events.note(pool_name, SCALED, f"from {before} to {replicas} workers by {by}")
        self._membership.publish()
        return draining

    def flip(self, worker_id: str, role: Role, timeout_s: float = TIMEOUT_S, *, force: bool = False) -> RoleFlip:
        """Starts to flip a worker, or returns its flip in flight: one replica changes pools. Raises InvalidInput."""
        slot = self._pools.find_worker(worker_id)
        self._flips = [flip for flip in self._flips if not flip.is_over]
        known = next((flip for flip in self._flips if flip.source.epoch == slot.epoch), None)
        if known is not None and slot.epoch:
            return known
        if role.value == slot.incarnation.pool_name:
            raise InvalidInput("role", f"is {role.value}, which {worker_id} has already; give the other one")
        self._upgrading.check_none("role")
        if not self._can_flip:
            raise InvalidInput("role", "cannot change: the pools' engines differ; make their `engine` tables alike")
        self._draining.check(slot)
        if not force:
            self._capacity.check_flip(slot, role)
        source = slot.incarnation
        drain = self._draining.begin(slot, timeout_s, replaced=False, end=WorkerEnd.FLIPPED)
        target = self._pools[role.value].add_place(f"flips from {worker_id} when that is empty")

        async def take() -> SupervisedProcess | None:
            try:
                return await self._supervisor.release(source)
            finally:
                self._draining.forget(source)

        flip = RoleFlip(target, drain, timeout_s, take)
        self._flips.append(flip)
        self._pools[role.value].begin_flip(target)
        self._supervisor.begin(target, flip=flip)
        self._membership.publish()
        return flip

    # `ScalableDeployment`

    def slots(self, role: Role) -> list[Slot]:
        return self._pools[role.value].slots

    def loads(self) -> Mapping[Incarnation, tuple[worker_pb2.Load, float]]:
        return self._reports.loads()

    def routers(self) -> list[str]:
        return self._membership.routers()

    async def refresh(self) -> None:
        await self._capacity.refresh()

    def count_fitting(self, role: Role) -> int | None:
        return self._capacity.count(role)

    def resize(self, pool_name: str, replicas: int, by: str) -> None:
        self.scale(pool_name, replicas, by=by)

    def change_role(self, worker_id: WorkerId, role: Role) -> None:
        self.flip(worker_id, role)
