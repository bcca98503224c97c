"""Changes the sizes of pools, and workers from one role to the other, for an operator or the autoscaler.

Owns the flips under way. Implements `scaling.Deployment`.
"""

from __future__ import annotations

from collections.abc import Mapping

from cluster.drain import TIMEOUT_S
from cluster.draining import Draining
from cluster.events import SCALED, EventLog
from cluster.flip import Flip
from cluster.pool import Incarnation, Slot, WorkerState
from cluster.pools import Pools
from cluster.publication import Publication
from cluster.reports import Reports
from cluster.supervised import SupervisedProcess
from cluster.supervision import Supervision
from cluster.upgrading import Upgrading
from cluster.victims import choose_victims
from penstock.errors import InvalidInput
from penstock.types import Role, WorkerId
from penstock.v1 import worker_pb2


class Reshaping:
    def __init__(
        self,
        pools: Pools,
        reports: Reports,
        supervision: Supervision,
        draining: Draining,
        upgrading: Upgrading,
        publication: Publication,
        events: EventLog,
        *,
        can_flip: bool,
    ) -> None:
        """`can_flip`: the pools' engines are alike."""
        self._pools = pools
        self._reports = reports
        self._supervision = supervision
        self._draining = draining
        self._upgrading = upgrading
        self._publication = publication
        self._events = events
        self._can_flip = can_flip
        self._flips: list[Flip] = []

    def replicas(self, pool_name: str) -> int:
        """How many workers a pool should have. Raises InvalidInput."""
        if pool_name not in list(Role):
            raise InvalidInput("pool", f"is {pool_name!r}; give one of {', '.join(Role)}")
        return self._pools[pool_name].replicas

    def scale(
        self, pool_name: str, replicas: int, timeout_s: float = TIMEOUT_S, by: str = "an operator"
    ) -> list[WorkerId]:
        """Sets how many workers a pool should have; returns those that are drained for it. Raises InvalidInput."""
        before = self.replicas(pool_name)
        self._upgrading.check_none("replicas")
        if pool_name == Role.DECODE and replicas < 1:
            raise InvalidInput("replicas", "is 0 for the decode pool; without a decode worker nothing is served")
        pool = self._pools[pool_name]
        draining = []
        for slot in choose_victims(pool.slots, self._reports.by_worker(), before - replicas):
            if slot.state is WorkerState.READY:
                self._draining.drain(slot.worker_id, timeout_s)
                draining.append(slot.worker_id)
        pool.set_replicas(replicas)  # of those that are left, the pool lets go of none that is ready
        self._events.note(pool_name, SCALED, f"from {before} to {replicas} workers by {by}")
        self._publication.publish()
        return draining

    def flip(self, worker_id: str, role: Role, timeout_s: float = TIMEOUT_S) -> Flip:
        """Begins to empty a worker that then serves in the other role, or joins in where that is under way: one replica
        goes from pool to pool. Raises InvalidInput."""
        slot = self._pools.find_worker(worker_id)
        self._flips = [one for one in self._flips if not one.is_over]
        known = next((one for one in self._flips if one.source.epoch == slot.epoch), None)
        if known is not None and slot.epoch:
            return known
        if role.value == slot.incarnation.pool_name:
            raise InvalidInput("role", f"is {role.value}, which {worker_id} has already; give the other one")
        self._upgrading.check_none("role")
        if not self._can_flip:
            raise InvalidInput(
                "role",
                "cannot change: the pools' engines differ; make their `engine` tables alike",
            )
        self._draining.check(slot)
        source = slot.incarnation
        drain = self._draining.begin(slot, timeout_s, replaced=False)
        target = self._pools[role.value].take_over(f"comes from {worker_id} once that is empty")

        async def take() -> SupervisedProcess | None:
            try:
                return await self._supervision.hand_over(source)
            finally:
                self._draining.forget(source)

        flip = Flip(target, drain, timeout_s, take)
        self._flips.append(flip)
        self._supervision.begin(target, flip=flip)
        self._publication.publish()
        return flip

    # `scaling.Deployment`

    def slots(self, role: Role) -> list[Slot]:
        return self._pools[role.value].slots

    def loads(self) -> Mapping[Incarnation, tuple[worker_pb2.Load, float]]:
        return self._reports.loads()

    def routers(self) -> list[str]:
        return self._publication.routers()

    def resize(self, pool_name: str, replicas: int, by: str) -> None:
        self.scale(pool_name, replicas, by=by)

    def change_role(self, worker_id: WorkerId, role: Role) -> None:
        self.flip(worker_id, role)
