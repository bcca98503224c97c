"""Replaces every worker: new ones start beside the old ones, pass a gate, and then take their places one by one.

New workers are a cohort of their own, whether they differ by model revision or by code alone, and serve a share of the
requests. Pages of two revisions have different hashes and never meet, and a request ends with the revision that it
started with; pages of one revision may be used by both cohorts where their layouts agree. Nothing is removed before the
gate has opened; if new workers fail, before or after that, old ones come back first. Every worker is drained before it
is removed. No Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

from cluster.lifecycle.drain import Drain
from cluster.lifecycle.progress import ProgressStream
from cluster.lifecycle.upgrade.gate_policy import (
    WITHOUT_EVIDENCE,
    GateDecision,
    RequestSample,
    UpgradeGate,
    excess_errors,
    judge_upgrade,
    sum_totals,
)
from cluster.pools.pool import Slot, WorkerState
from penstock.types import NEW_COHORT, OLD_COHORT, Epoch, Role, WorkerId
from penstock.v1 import worker_pb2

log = logging.getLogger(__name__)

_GONE = (WorkerState.LOST, WorkerState.QUARANTINED)
_GATE_INTERVAL_S = 1.0  # between two evaluations of the gate, at most


class UpgradeStage(StrEnum):
    """The present stage of an upgrade."""

    STARTING = "starting"  # the first new workers
    PROVING = "proving"  # new workers serve a share
    ROLLING = "rolling"  # old workers are replaced one by one
    ROLLING_BACK = "rolling back"
    DONE = "done"
    ROLLED_BACK = "rolled back"


ENDED = (UpgradeStage.DONE, UpgradeStage.ROLLED_BACK)


@dataclass(frozen=True, slots=True)
class UpgradePlan:
    """The request for an upgrade."""

    model: str  # the folder that new workers load
    gate: UpgradeGate = field(default_factory=UpgradeGate)
    share: float = 0.1  # of new requests, for new workers until the gate opens
    start_timeout_s: float = 300.0  # of one new worker
    drain_timeout_s: float = 300.0  # of one old worker


@dataclass(frozen=True, slots=True)
class UpgradeProgress:
    """The state of an upgrade at one moment."""

    stage: UpgradeStage = UpgradeStage.STARTING
    num_old: int = 0  # ready workers
    num_new: int = 0
    elapsed_s: float = 0.0
    detail: str = ""


class UpgradeFleet(Protocol):
    """The parts of the deployment that an upgrade sees and changes."""

    def slots(self, role: Role) -> list[Slot]: ...

    def load_of_worker(self, worker_id: WorkerId) -> worker_pb2.Load | None: ...

    def grow(self, role: Role) -> WorkerId:
        """Starts one new worker beside the others and returns its id."""
        ...

    def restore(self, role: Role, replicas: int) -> None:
        """Starts old workers until there are `replicas` of them, not counting new ones."""
        ...

    def remove(self, worker_id: WorkerId, timeout_s: float) -> Drain | None:
        """Drains and ends a worker and shrinks its pool by one. Returns None if it ends at once."""
        ...

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """Sets the shares of new requests by cohort; without shares, routers ignore cohorts."""
        ...

    async def next_change(self) -> None: ...


class _Failed(Exception):
    """The upgrade cannot continue; the message says why."""


class RollingUpgrade:
    """A rolling upgrade. `run` completes it or rolls it back."""

    def __init__(self, plan: UpgradePlan, fleet: UpgradeFleet) -> None:
        self.plan = plan
        self.new: set[WorkerId] = set()
        self.replicas = {role: sum(not slot.is_leaving for slot in fleet.slots(role)) for role in Role}
        self.decided = False  # the gate has opened: old workers go
        self.failure = ""  # why the upgrade rolls back at the next opportunity
        self._remark = ""  # what operators should know of the gate that opened
        self._fleet = fleet
        self._began_s = time.monotonic()
        self._stream = ProgressStream(UpgradeProgress(), lambda progress: progress.stage in ENDED)
        self._bases: dict[tuple[WorkerId, Epoch], worker_pb2.RequestTotals] = {}  # totals when first observed

    @property
    def progress(self) -> UpgradeProgress:
        return self._stream.latest

    def abort(self, reason: str) -> None:
        """Rolls back at the next opportunity."""
        self.failure = reason

    def restore(
        self, stage: UpgradeStage, new: Iterable[WorkerId], replicas: Mapping[Role, int], failure: str, *, decided: bool
    ) -> None:
        """Restores an upgrade that was in flight when its controller died. Call before `run`; the gate starts over."""
        self.new, self.replicas = set(new), dict(replicas)
        self.failure, self.decided = failure, decided
        self._stream.update(replace(self.progress, stage=stage, detail=failure))

    async def run(self) -> None:
        """Returns when the upgrade is done or rolled back."""
        try:
            self._check_new()
            if not self.decided:
                await self._start()
                await self._prove()
            self.decided = True
            await self._roll()
        except _Failed as failure:
            self.decided, self.failure = False, str(failure)
            log.warning("the upgrade to %s is rolled back: %s", self.plan.model, failure)
            await self._roll_back(str(failure))
        else:
            self._fleet.set_shares({})
            self._update(stage=UpgradeStage.DONE, detail=self._remark)

    def follow(self) -> AsyncIterator[UpgradeProgress]:
        """Yields the progress now and after each change, until the end."""
        return self._stream.follow()

    async def _start(self) -> None:
        """Starts the first new workers, or waits for those that exist already. Raises _Failed."""
        if self.progress.stage is UpgradeStage.STARTING:
            self._set_shares(1.0, 0.0)  # new workers get no requests before the gate evaluates them
        for role in (Role.DECODE, Role.PREFILL):  # a prefill worker is proven through a new decode worker
            existing = [slot.worker_id for slot in self._fleet.slots(role) if slot.worker_id in self.new]
            for worker_id in existing:
                await self._until_ready(worker_id)
            if self.replicas[role] and not existing:
                await self._grow(role)

    async def _grow(self, role: Role) -> None:
        """Starts one more new worker and waits until it is ready. Raises _Failed."""
        worker_id = self._fleet.grow(role)
        self.new.add(worker_id)
        self._update(detail=f"{worker_id} is starting")
        await self._until_ready(worker_id)

    async def _until_ready(self, worker_id: WorkerId) -> None:
        try:
            async with asyncio.timeout(self.plan.start_timeout_s):
                while not self._is_ready(worker_id):
                    self._check_new()
                    await self._fleet.next_change()
        except TimeoutError:
            raise _Failed(f"{worker_id} is not ready within {self.plan.start_timeout_s:g} s") from None

    def _is_ready(self, worker_id: WorkerId) -> bool:
        return any(slot.worker_id == worker_id and slot.state is WorkerState.READY for slot in self._slots())

    def _slots(self) -> list[Slot]:
        return [slot for role in Role for slot in self._fleet.slots(role)]

    def _check_new(self) -> None:
        """Raises _Failed if a new worker was lost or the upgrade was aborted."""
        if self.failure:
            raise _Failed(self.failure)
        for slot in self._slots():
            if slot.worker_id in self.new and (slot.state in _GONE or slot.num_restarts):
                raise _Failed(f"{slot.worker_id} was lost: {slot.detail or 'it had to be started again'}")

    async def _prove(self) -> None:
        """Sends a share of the requests to new workers until the gate opens. Raises _Failed if they do worse."""
        self._update(stage=UpgradeStage.PROVING, detail="")
        share = self.plan.share
        self._set_shares(1.0 - share, share)
        self._bases = {}
        began_s = time.monotonic()
        while True:
            self._check_new()
            verdict = judge_upgrade(self.plan.gate, share, *self._samples(), time.monotonic() - began_s)
            self._update(detail=verdict.reason)
            if verdict.decision is GateDecision.FAIL:
                raise _Failed(verdict.reason)
            if verdict.decision is GateDecision.PASS:
                self._remark = verdict.reason if WITHOUT_EVIDENCE in verdict.reason else ""
                return
            await self._wait_for_gate(began_s)

    async def _wait_for_gate(self, began_s: float) -> None:
        left_s = began_s + self.plan.gate.window_s - time.monotonic()
        try:
            async with asyncio.timeout(min(_GATE_INTERVAL_S, left_s) if left_s > 0 else _GATE_INTERVAL_S):
                await self._fleet.next_change()
        except TimeoutError:
            return

    def _samples(self) -> tuple[RequestSample, RequestSample]:
        """Returns outcomes at old and at new decode workers, each since it was first observed."""
        totals: tuple[list[worker_pb2.RequestTotals], ...] = ([], [])
        bases: tuple[list[worker_pb2.RequestTotals], ...] = ([], [])
        for slot in self._fleet.slots(Role.DECODE):
            load = self._fleet.load_of_worker(slot.worker_id)
            if load is not None:
                is_new = slot.worker_id in self.new
                totals[is_new].append(load.requests)
                bases[is_new].append(self._bases.setdefault((slot.worker_id, slot.epoch), load.requests))
        old, new = (sum_totals(total).since(sum_totals(base)) for total, base in zip(totals, bases, strict=True))
        return old, new

    async def _roll(self) -> None:
        """Replaces old workers one by one, so that there are never fewer than before."""
        self._update(stage=UpgradeStage.ROLLING, detail=self._remark)
        for slot in self._slots():
            if slot.worker_id in self.new:
                await self._until_ready(slot.worker_id)  # it may have been starting when a controller died
        while any(self._old(role) or self._lacks(role) for role in Role):
            for role in Role:
                if old := self._old(role):
                    self._set_shares(len(self._ready_decode(new=False)), len(self._ready_decode(new=True)))
                    await self._remove(old[-1].worker_id)
                    self._check_new()
                    if problem := excess_errors(self.plan.gate, RequestSample(), self._samples()[1]):
                        raise _Failed(problem)
                if self._lacks(role):
                    await self._grow(role)

    def _lacks(self, role: Role) -> bool:
        """Returns whether there are still too few new workers."""
        return sum(slot.worker_id in self.new for slot in self._fleet.slots(role)) < self.replicas[role]

    def _old(self, role: Role) -> list[Slot]:
        return [slot for slot in self._fleet.slots(role) if slot.worker_id not in self.new and not slot.is_leaving]

    def _ready_decode(self, *, new: bool) -> list[Slot]:
        slots = self._fleet.slots(Role.DECODE)
        return [slot for slot in slots if slot.state is WorkerState.READY and (slot.worker_id in self.new) is new]

    async def _remove(self, worker_id: WorkerId) -> None:
        drain = self._fleet.remove(worker_id, self.plan.drain_timeout_s)
        if drain is None:
            return
        async for progress in drain.follow():
            self._update(detail=f"draining {worker_id}, {progress.num_left} requests left")

    async def _roll_back(self, reason: str) -> None:
        self._update(stage=UpgradeStage.ROLLING_BACK, detail=reason)
        if self._ready_decode(new=False):
            self._set_shares(1.0, 0.0)
        for role in Role:
            self._fleet.restore(role, self.replicas[role])
        try:
            async with asyncio.timeout(self.plan.start_timeout_s):
                while any(len(self._ready(role)) < self.replicas[role] for role in Role):
                    await self._fleet.next_change()
        except TimeoutError:
            log.warning("not every old worker is back after %g s", self.plan.start_timeout_s)
        self._set_shares(1.0, 0.0)
        going = [slot.worker_id for slot in self._slots() if slot.worker_id in self.new and not slot.is_leaving]
        await asyncio.gather(*(self._remove(worker_id) for worker_id in going))
        self._fleet.set_shares({})
        self._update(stage=UpgradeStage.ROLLED_BACK, detail=reason)

    def _ready(self, role: Role) -> list[Slot]:
        return [slot for slot in self._old(role) if slot.state is WorkerState.READY]

    def _set_shares(self, old: float, new: float) -> None:
        self._fleet.set_shares({OLD_COHORT: float(old), NEW_COHORT: float(new)})

    def _update(self, **changes: Any) -> None:
        ready = [slot.worker_id in self.new for slot in self._slots() if slot.state is WorkerState.READY]
        changed = replace(self.progress, num_old=len(ready) - sum(ready), num_new=sum(ready), **changes)
        if changed != self.progress:
            self._stream.update(replace(changed, elapsed_s=time.monotonic() - self._began_s))
