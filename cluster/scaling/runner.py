"""Runs the autoscaler: gathers signals from workers and routers, asks `autoscaler_policy`, carries out its changes.

Runs on the controller's event loop. Keeps the newest records for `penstock explain`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.pools.pool import COMING, Incarnation, Slot, WorkerState
from cluster.pools.pool_policy import choose_workers_to_remove
from cluster.scaling.autoscaler_policy import AutoscalerPolicy
from cluster.scaling.demand_totals import DemandTotals
from cluster.scaling.signals import Change, PoolBounds, PoolSignal, Resize, ScalingRecord, Signals, WorkerSignal
from penstock import wire
from penstock.config import ServeConfig
from penstock.errors import InvalidInput, PenstockError
from penstock.types import Role, WorkerId
from penstock.v1 import admin_pb2, worker_pb2

log = logging.getLogger(__name__)

HOLD_S = 3600.0  # how long an operator's size holds by default
BY = "the autoscaler"
_MAX_RECORDS = 1024
_COMING = (*COMING, WorkerState.LOST)


class ScalableDeployment(Protocol):
    """The part of the deployment that the autoscaler sees and changes."""

    def slots(self, role: Role) -> Sequence[Slot]: ...

    def replicas(self, pool_name: str) -> int: ...

    def loads(self) -> Mapping[Incarnation, tuple[worker_pb2.Load, float]]:
        """Returns each worker's latest report and its arrival time."""
        ...

    def routers(self) -> Collection[str]: ...

    async def refresh(self) -> None:
        """Reads what the machines can hold. Raises PenstockError."""
        ...

    def count_fitting(self, role: Role) -> int | None:
        """Returns how many workers the pool can have; None: unknown."""
        ...

    def resize(self, pool_name: str, replicas: int, by: str) -> None: ...

    def change_role(self, worker_id: WorkerId, role: Role) -> None: ...


@dataclass(frozen=True, slots=True)
class ExplainedRecord:
    """A record and the outcome of its change."""

    record: ScalingRecord
    unix_time_s: float
    failed: str = ""  # why the change failed, or "" if it did not


class AutoscalerRunner:
    """Makes a decision every interval and keeps the records."""

    def __init__(self, config: ServeConfig, deployment: ScalableDeployment) -> None:
        self.config = config.autoscaler
        self.demand = DemandTotals()
        self._deployment = deployment
        pools = {Role.PREFILL: config.prefill_pool, Role.DECODE: config.decode_pool}
        self.bounds = {role: PoolBounds(pool.lowest, pool.highest) for role, pool in pools.items()}
        can_flip = config.engine_config(Role.PREFILL) == config.engine_config(Role.DECODE)
        rules = self.config if can_flip else self.config.model_copy(update={"flips": False})
        self._autoscaler = AutoscalerPolicy(rules, self.bounds, config.decode.max_batch_sequences)
        self._starting_since_s: dict[Incarnation, float] = {}
        self._changes: deque[ExplainedRecord] = deque(maxlen=_MAX_RECORDS)
        self._recent: deque[ExplainedRecord] = deque(maxlen=_MAX_RECORDS)

    @property
    def is_on(self) -> bool:
        return self.config.mode != "off"

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.config.interval_s)
            try:
                with contextlib.suppress(PenstockError):  # an unknown capacity limits nothing
                    await self._deployment.refresh()
                self.step(time.monotonic())
            except Exception:
                log.exception("the autoscaler failed to decide; the pools stay as they are")

    def step(self, now_s: float) -> None:
        """Makes one decision and carries it out unless this is a dry run."""
        decision = self._autoscaler.decide(self._signals(now_s), now_s)
        failed = self._carry_out(decision.changes) if self.config.mode == "on" else {}
        for record in decision.records:
            explained = ExplainedRecord(record, time.time(), failed.get(record.role, ""))
            self._recent.append(explained)
            if record.decided != record.current:
                self._changes.append(explained)
                log.info(
                    "%s: %s, %d -> %d: %s", record.role, record.verdict, record.current, record.decided, record.reason
                )

    def hold(self, pool_name: str, replicas: int, hold_s: float) -> None:
        """Holds a pool at the size that an operator set, for `hold_s` or the default time."""
        self._autoscaler.override(Role(pool_name), replicas, time.monotonic() + (hold_s or HOLD_S))

    def explain(self, pool_name: str, limit: int, *, changes: bool) -> list[ExplainedRecord]:
        """Returns the newest `limit` records of each pool, oldest first. Raises InvalidInput."""
        if pool_name and pool_name not in list(Role):
            raise InvalidInput("pool", f"is {pool_name!r}; give {' or '.join(Role)}")
        found: list[ExplainedRecord] = []
        for role in [Role(pool_name)] if pool_name else list(Role):
            records = self._changes if changes else self._recent
            own = [explained for explained in records if explained.record.role is role]
            found += own[-max(1, limit) :]
        return sorted(found, key=lambda explained: explained.unix_time_s)

    # Signals.

    def _signals(self, now_s: float) -> Signals:
        loads = self._deployment.loads()
        slots = {role: self._deployment.slots(role) for role in Role}
        self._follow_starts([slot for pool in slots.values() for slot in pool], now_s)
        pools = {role: self._pool(role, slots[role], loads, now_s) for role in Role}
        return Signals(pools, self.demand.signal(self._deployment.routers(), now_s, self.config.stale_s))

    def _pool(
        self,
        role: Role,
        slots: Iterable[Slot],
        loads: Mapping[Incarnation, tuple[worker_pb2.Load, float]],
        now_s: float,
    ) -> PoolSignal:
        ready, starting, unplaceable = [], [], ""
        for slot in slots:
            if slot.state is WorkerState.READY:
                load, at_s = loads.get(slot.incarnation, (None, now_s))
                known = wire.load_from_wire(load) if load is not None else None
                ready.append(WorkerSignal(slot.worker_id, known, now_s - at_s, slot.epoch))
            elif slot.state in _COMING and not slot.is_leaving:
                starting.append(self._starting_since_s[slot.incarnation])
                unplaceable = slot.detail if slot.state is WorkerState.UNPLACED else unplaceable
        return PoolSignal(
            self._deployment.replicas(role.value),
            tuple(ready),
            tuple(starting),
            unplaceable,
            fitting=self._deployment.count_fitting(role),
        )

    def _follow_starts(self, slots: Sequence[Slot], now_s: float) -> None:
        """Learns from each new worker how long it took to become ready."""
        states = {slot.incarnation: slot.state for slot in slots}
        for incarnation in self._starting_since_s.keys() - {
            incarnation for incarnation, state in states.items() if state in _COMING
        }:
            since_s = self._starting_since_s.pop(incarnation)
            if states.get(incarnation) is WorkerState.READY:
                self._autoscaler.on_started(now_s - since_s)
        for incarnation, state in states.items():
            if state is WorkerState.WAITING:
                self._starting_since_s[incarnation] = now_s  # its turn has not come
            elif state in _COMING:
                self._starting_since_s.setdefault(incarnation, now_s)

    # Changes.

    def _carry_out(self, changes: Sequence[Change]) -> dict[Role, str]:
        """Makes the changes. Returns the reasons of those that failed, by pool."""
        failed: dict[Role, str] = {}
        for change in changes:
            try:
                if isinstance(change, Resize):
                    self._deployment.resize(change.role.value, change.replicas, BY)
                else:
                    self._deployment.change_role(self._least_busy(change.from_role), change.to_role)
            except InvalidInput as error:
                log.warning("the autoscaler's change could not be made: %s", error.message)
                roles = (change.role,) if isinstance(change, Resize) else (change.from_role, change.to_role)
                failed |= dict.fromkeys(roles, error.message)
        return failed

    def _least_busy(self, role: Role) -> WorkerId:
        loads = {incarnation.worker_id: load for incarnation, (load, _) in self._deployment.loads().items()}
        ready = [slot for slot in self._deployment.slots(role) if slot.state is WorkerState.READY]
        found = choose_workers_to_remove(ready, loads, 1)
        if not found:
            raise InvalidInput("worker_id", f"no {role} worker is ready to change its role")
        return found[0].worker_id


def record_to_wire(explained: ExplainedRecord) -> admin_pb2.ScaleRecord:
    """Returns the protobuf form of a record."""
    record = explained.record
    return admin_pb2.ScaleRecord(
        unix_time_s=explained.unix_time_s,
        pool=record.role.value,
        current=record.current,
        wanted=record.wanted,
        decided=record.decided,
        verdict=record.verdict,
        reason=record.reason,
        figures=dict(record.figures),
        failed=explained.failed,
    )
