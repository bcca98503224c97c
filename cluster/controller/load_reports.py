"""Holds each worker's last load report, and wakes the drains that wait for the next one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from cluster.pools.pool import Incarnation, Pools, WorkerState, member_of
from penstock.rpc.measured import MAX_TOTAL, drop_false_figures
from penstock.types import Epoch, Member, Role, WorkerId
from penstock.v1 import worker_pb2


class LoadReportStore:
    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._loads: dict[Incarnation, tuple[worker_pb2.Load, float]] = {}  # with the time of arrival
        self._awaited: dict[Epoch, asyncio.Event] = {}  # members whose next report is awaited

    def note(self, incarnation: Incarnation, load: worker_pb2.Load) -> None:
        drop_false_figures(load, MAX_TOTAL)
        self._loads[incarnation] = (load, time.monotonic())
        self._wake(incarnation)

    def forget(self, incarnation: Incarnation) -> None:
        """Drops a lost worker's report and ends every wait for another one."""
        self._loads.pop(incarnation, None)
        self._wake(incarnation)

    def _wake(self, incarnation: Incarnation) -> None:
        slot = self._pools.slot_of(incarnation)
        if slot is not None and (waiting := self._awaited.pop(slot.epoch, None)) is not None:
            waiting.set()

    def get(self, incarnation: Incarnation) -> worker_pb2.Load | None:
        load, _ = self._loads.get(incarnation, (None, 0.0))
        return load

    def loads(self) -> Mapping[Incarnation, tuple[worker_pb2.Load, float]]:
        """Returns each worker's last report and its time of arrival (monotonic)."""
        return dict(self._loads)

    def by_worker(self) -> Mapping[WorkerId, worker_pb2.Load]:
        return {incarnation.worker_id: load for incarnation, (load, _) in self._loads.items()}

    @property
    def is_awaited(self) -> bool:
        """Returns whether a drain waits for a report."""
        return bool(self._awaited)

    def is_here(self, member: Member) -> bool:
        """Returns whether the member still serves."""
        slot = self._pools.slot_of_member(member)
        return slot is not None and slot.state in (WorkerState.READY, WorkerState.DRAINING)

    def load_of(self, member: Member) -> worker_pb2.Load | None:
        slot = self._pools.slot_of_member(member)
        return self.get(slot.incarnation) if slot else None

    def members(self, role: Role) -> list[Member]:
        """Returns the ready workers to migrate to: those whose nodes stay, or else all."""
        ready = list(self._pools[role.value].ready())
        return [member_of(slot) for slot in ready if not slot.is_node_leaving] or [member_of(slot) for slot in ready]

    async def next_report(self, member: Member, seen: worker_pb2.Load | None) -> None:
        """Returns once the member's latest report is another one than `seen`, or it no longer serves."""
        while self.is_here(member) and self.load_of(member) is seen:
            await self._awaited.setdefault(member.epoch, asyncio.Event()).wait()
