"""The autoscaler at work: gathers what controller and routers know, asks `cluster.autoscaler`, does what it says.

Part of the controller's event loop. Keeps the newest records for whoever asks why (`penstock explain`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.autoscaler import Autoscaler
from cluster.demand_book import DemandBook
from cluster.pool import Incarnation, Slot, WorkerState
from cluster.scaling_signals import Bounds, Change, PoolSignal, Record, Resize, Signals, WorkerSignal
from cluster.victims import choose_victims
from penstock import wire
from penstock.config import ServeConfig
from penstock.errors import InvalidInput
from penstock.types import Role, WorkerId
from penstock.v1 import admin_pb2, worker_pb2

log = logging.getLogger(__name__)

HOLD_S = 3600.0  # that an operator's size stands, where nothing else is said
BY = "the autoscaler"
_MAX_RECORDS = 1024
_COMING = (WorkerState.UNPLACED, WorkerState.STARTING, WorkerState.LOST)


class Deployment(Protocol):
    """What the controller lets it see and do."""

    def slots(self, role: Role) -> Sequence[Slot]: ...

    def replicas(self, pool_name: str) -> int: ...

    def loads(self) -> Mapping[Incarnation, tuple[worker_pb2.Load, float]]:
        """Each worker's last report, and when it came."""
        ...

    def routers(self) -> Collection[str]: ...

    def resize(self, pool_name: str, replicas: int, by: str) -> None: ...

    def change_role(self, worker_id: WorkerId, role: Role) -> None: ...


@dataclass(frozen=True, slots=True)
class Told:
    """A record, and what came of it."""

    record: Record
    unix_time_s: float
    failed: str = ""  # why the change could not be made


class Scaling:
    def __init__(self, config: ServeConfig, deployment: Deployment) -> None:
        self.config = config.autoscaler
        self.demand = DemandBook()
        self._deployment = deployment
        pools = {Role.PREFILL: config.prefill_pool, Role.DECODE: config.decode_pool}
        self.bounds = {role: Bounds(pool.lowest, pool.highest) for role, pool in pools.items()}
        can_flip = config.engine_config(Role.PREFILL) == config.engine_config(Role.DECODE)
        rules = self.config if can_flip else self.config.model_copy(update={"flips": False})
        self._autoscaler = Autoscaler(rules, self.bounds, config.decode.max_batch_sequences)
        self._since: dict[Incarnation, float] = {}  # of workers that are starting
        self._last: dict[Role, Told] = {}
        self._changes: deque[Told] = deque(maxlen=_MAX_RECORDS)
        self._recent: deque[Told] = deque(maxlen=_MAX_RECORDS)

    @property
    def is_on(self) -> bool:
        return self.config.mode != "off"

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.config.interval_s)
            try:
                self.step(time.monotonic())
            except Exception:
                log.exception("the autoscaler could not decide; the pools stay as they are")

    def step(self, now_s: float) -> None:
        """One decision, carried out unless this is a dry run."""
        decision = self._autoscaler.decide(self._signals(now_s), now_s)
        failed = self._carry_out(decision.changes) if self.config.mode == "on" else {}
        for record in decision.records:
            told = Told(record, time.time(), failed.get(record.role, ""))
            self._last[record.role] = told
            self._recent.append(told)
            if record.decided != record.current:
                self._changes.append(told)
                log.info(
                    "%s: %s, %d -> %d: %s", record.role, record.verdict, record.current, record.decided, record.reason
                )

    def hold(self, pool_name: str, replicas: int, hold_s: float) -> None:
        """An operator has set a pool's size."""
        self._autoscaler.override(Role(pool_name), replicas, time.monotonic() + (hold_s or HOLD_S))

    def explain(self, pool_name: str, limit: int, *, changes: bool) -> list[Told]:
        """The newest records of each pool, oldest first. Raises InvalidInput."""
        if pool_name and pool_name not in list(Role):
            raise InvalidInput("pool", f"is {pool_name!r}; give {' or '.join(Role)}")
        found: list[Told] = []
        for role in [Role(pool_name)] if pool_name else list(Role):
            own = [one for one in (self._changes if changes else self._recent) if one.record.role is role]
            found += own[-max(1, limit) :]
        return sorted(found, key=lambda one: one.unix_time_s)

    # What it sees.

    def _signals(self, now_s: float) -> Signals:
        loads = self._deployment.loads()
        slots = {role: self._deployment.slots(role) for role in Role}
        self._follow_starts([slot for some in slots.values() for slot in some], now_s)
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
                starting.append(self._since[slot.incarnation])
                unplaceable = slot.detail if slot.state is WorkerState.UNPLACED else unplaceable
        return PoolSignal(self._deployment.replicas(role.value), tuple(ready), tuple(starting), unplaceable)

    def _follow_starts(self, slots: Sequence[Slot], now_s: float) -> None:
        """How long workers take to serve is learnt from each that comes."""
        states = {slot.incarnation: slot.state for slot in slots}
        for incarnation in self._since.keys() - {one for one, state in states.items() if state in _COMING}:
            since_s = self._since.pop(incarnation)
            if states.get(incarnation) is WorkerState.READY:
                self._autoscaler.on_started(now_s - since_s)
        for incarnation, state in states.items():
            if state in _COMING:
                self._since.setdefault(incarnation, now_s)

    # What it does.

    def _carry_out(self, changes: Sequence[Change]) -> dict[Role, str]:
        """Why not, by pool, where that cannot be."""
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
        found = choose_victims(ready, loads, 1)
        if not found:
            raise InvalidInput("worker_id", f"no {role} worker is ready to change its role")
        return found[0].worker_id


def record_to_wire(told: Told) -> admin_pb2.ScaleRecord:
    record = told.record
    return admin_pb2.ScaleRecord(
        unix_time_s=told.unix_time_s,
        pool=record.role.value,
        current=record.current,
        wanted=record.wanted,
        decided=record.decided,
        verdict=record.verdict,
        reason=record.reason,
        figures=dict(record.figures),
        failed=told.failed,
    )
