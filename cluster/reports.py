"""What workers say of their load: each one's last report, and who waits for the next. Implements `drain.View`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from cluster.pool import Incarnation, WorkerState
from cluster.pools import Pools, member_of
from penstock.types import Epoch, Member, Role, WorkerId
from penstock.v1 import worker_pb2


class Reports:
    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._loads: dict[Incarnation, tuple[worker_pb2.Load, float]] = {}  # and when it came
        self._awaited: dict[Epoch, asyncio.Event] = {}  # of members whose next report is awaited

    def take(self, incarnation: Incarnation, load: worker_pb2.Load | None) -> None:
        """None: it will say nothing more."""
        if load is not None:
            self._loads[incarnation] = (load, time.monotonic())
        else:
            self._loads.pop(incarnation, None)
        slot = self._pools.slot_of(incarnation)
        if slot is not None and (waiting := self._awaited.pop(slot.epoch, None)) is not None:
            waiting.set()

    def get(self, incarnation: Incarnation) -> worker_pb2.Load | None:
        load, _ = self._loads.get(incarnation, (None, 0.0))
        return load

    def loads(self) -> Mapping[Incarnation, tuple[worker_pb2.Load, float]]:
        """Each worker's last report, and when it came."""
        return dict(self._loads)

    def by_worker(self) -> Mapping[WorkerId, worker_pb2.Load]:
        return {incarnation.worker_id: load for incarnation, (load, _) in self._loads.items()}

    @property
    def is_awaited(self) -> bool:
        """Somebody waits for a report."""
        return bool(self._awaited)

    # `drain.View`

    def is_here(self, member: Member) -> bool:
        slot = self._pools.slot_of_member(member)
        return slot is not None and slot.state in (WorkerState.READY, WorkerState.DRAINING)

    def load_of(self, member: Member) -> worker_pb2.Load | None:
        slot = self._pools.slot_of_member(member)
        return self.get(slot.incarnation) if slot else None

    def members(self, role: Role) -> list[Member]:
        ready = list(self._pools[role.value].ready())
        return [member_of(slot) for slot in ready if not slot.is_going] or [member_of(slot) for slot in ready]

    async def next_report(self, member: Member) -> None:
        if self.is_here(member):
            await self._awaited.setdefault(member.epoch, asyncio.Event()).wait()
