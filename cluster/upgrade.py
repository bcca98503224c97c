"""A rolling upgrade: new workers beside the old ones, a gate, then one by one in their place; or back to where it was.

New workers are a cohort of their own, whether they differ by model revision or by code alone, and serve a share of the
requests, whole ones. Pages of two revisions have different hashes and never meet, and a request that has begun with one
revision ends with it; pages of one revision may be used on both sides where their layouts agree. Nothing is taken away
before the gate has opened, and where new workers fail, before or after it, old ones come back first. Every worker that
goes is emptied first. No Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

from cluster.drain import Drain
from cluster.pool import Slot, WorkerState
from cluster.promotion import Decision, Gate, Sample, add_up, errors, judge
from penstock.types import NEW_COHORT, OLD_COHORT, Epoch, Role, WorkerId
from penstock.v1 import worker_pb2

log = logging.getLogger(__name__)

_GONE = (WorkerState.LOST, WorkerState.QUARANTINED)
_LOOK_S = 1.0  # at the gate, at least


class UpgradeStage(StrEnum):
    STARTING = "starting"  # the first new workers
    PROVING = "proving"  # they serve a share
    ROLLING = "rolling"  # one old worker after the other goes
    ROLLING_BACK = "rolling back"
    DONE = "done"
    ROLLED_BACK = "rolled back"


ENDED = (UpgradeStage.DONE, UpgradeStage.ROLLED_BACK)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked for."""

    model: str  # the folder that new workers load
    gate: Gate = field(default_factory=Gate)
    share: float = 0.1  # of new requests, that new workers get until the gate opens
    start_timeout_s: float = 300.0  # of one new worker
    drain_timeout_s: float = 300.0  # of one old worker


@dataclass(frozen=True, slots=True)
class UpgradeProgress:
    stage: UpgradeStage = UpgradeStage.STARTING
    num_old: int = 0  # ready workers
    num_new: int = 0
    elapsed_s: float = 0.0
    detail: str = ""


class Fleet(Protocol):
    """The deployment as an upgrade sees and changes it."""

    def slots(self, role: Role) -> list[Slot]: ...

    def load_of_worker(self, worker_id: WorkerId) -> worker_pb2.Load | None: ...

    def grow(self, role: Role) -> WorkerId:
        """Starts one new worker beside the others."""
        ...

    def restore(self, role: Role, replicas: int) -> None:
        """Starts old workers until there are so many of them, whatever there is of new ones."""
        ...

    def let_go(self, worker_id: WorkerId, timeout_s: float) -> Drain | None:
        """Empties a worker and ends it; the pool is one smaller. None where it has nothing and ends at once."""
        ...

    def set_shares(self, shares: Mapping[str, float]) -> None:
        """Of new requests, by cohort; none: routers need not choose."""
        ...

    async def next_change(self) -> None: ...


class _Failed(Exception):
    """The upgrade cannot go on; the message says why."""


class Upgrade:
    """`run` brings it to its end, whichever that is."""

    def __init__(self, plan: Plan, fleet: Fleet) -> None:
        self.plan = plan
        self.new: set[WorkerId] = set()
        self.replicas = {role: sum(not one.is_leaving for one in fleet.slots(role)) for role in Role}
        self.progress = UpgradeProgress()
        self.decided = False  # the old workers are to go
        self.failure = ""  # why it goes back, from the next moment at which that can be
        self._fleet = fleet
        self._began_s = time.monotonic()
        self._changed = asyncio.Event()
        self._bases: dict[tuple[WorkerId, Epoch], worker_pb2.RequestTotals] = {}  # what each had counted at first

    def abort(self, reason: str) -> None:
        """Back to where it was, from the next moment at which that can be."""
        self.failure = reason

    def take_up(
        self, stage: UpgradeStage, new: Iterable[WorkerId], replicas: Mapping[Role, int], failure: str, *, decided: bool
    ) -> None:
        """Before `run`: it was under way when its controller died, and goes on where it stood. A gate looks anew."""
        self.new, self.replicas = set(new), dict(replicas)
        self.failure, self.decided = failure, decided
        self.progress = replace(self.progress, stage=stage, detail=failure)

    async def run(self) -> None:
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
            self._tell(stage=UpgradeStage.DONE, detail="")

    async def follow(self) -> AsyncIterator[UpgradeProgress]:
        """The progress now and after each change, until the end."""
        while True:
            changed, progress = self._changed, self.progress
            yield progress
            if progress.stage in ENDED:
                return
            if progress is self.progress:
                await changed.wait()

    async def _start(self) -> None:
        """The first new workers; those that are there already have their time, too. Raises _Failed."""
        if self.progress.stage is UpgradeStage.STARTING:
            self._set_shares(1.0, 0.0)  # nobody is asked before the gate looks
        for role in (Role.DECODE, Role.PREFILL):  # a prefill worker is proven through a decode worker of its kind
            there = [one.worker_id for one in self._fleet.slots(role) if one.worker_id in self.new]
            for worker_id in there:
                await self._until_ready(worker_id)
            if self.replicas[role] and not there:
                await self._grow(role)

    async def _grow(self, role: Role) -> None:
        """One new worker more. Raises _Failed where it does not come up."""
        worker_id = self._fleet.grow(role)
        self.new.add(worker_id)
        self._tell(detail=f"{worker_id} starts")
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
        return any(one.worker_id == worker_id and one.state is WorkerState.READY for one in self._all())

    def _all(self) -> list[Slot]:
        return [slot for role in Role for slot in self._fleet.slots(role)]

    def _check_new(self) -> None:
        """Raises _Failed where a new worker was lost, or somebody wants it to end."""
        if self.failure:
            raise _Failed(self.failure)
        for slot in self._all():
            if slot.worker_id in self.new and (slot.state in _GONE or slot.num_restarts):
                raise _Failed(f"{slot.worker_id} was lost: {slot.detail or 'it had to be started again'}")

    async def _prove(self) -> None:
        """Raises _Failed where new workers do worse than old ones."""
        self._tell(stage=UpgradeStage.PROVING, detail="")
        share = self.plan.share
        self._set_shares(1.0 - share, share)
        self._bases = {}
        began_s = time.monotonic()
        while True:
            self._check_new()
            verdict = judge(self.plan.gate, share, *self._happened(), time.monotonic() - began_s)
            self._tell(detail=verdict.reason)
            if verdict.decision is Decision.FAIL:
                raise _Failed(verdict.reason)
            if verdict.decision is Decision.PASS:
                return
            await self._look_again(began_s)

    async def _look_again(self, began_s: float) -> None:
        left_s = began_s + self.plan.gate.window_s - time.monotonic()
        try:
            async with asyncio.timeout(min(_LOOK_S, left_s) if left_s > 0 else _LOOK_S):
                await self._fleet.next_change()
        except TimeoutError:
            return  # the gate looks at what has come meanwhile

    def _happened(self) -> tuple[Sample, Sample]:
        """At old and at new decode workers, who tell of every request: each since it was first looked at."""
        totals: tuple[list[worker_pb2.RequestTotals], ...] = ([], [])
        bases: tuple[list[worker_pb2.RequestTotals], ...] = ([], [])
        for slot in self._fleet.slots(Role.DECODE):
            load = self._fleet.load_of_worker(slot.worker_id)
            if load is not None:
                is_new = slot.worker_id in self.new
                totals[is_new].append(load.requests)
                bases[is_new].append(self._bases.setdefault((slot.worker_id, slot.epoch), load.requests))
        old, new = (add_up(one).since(add_up(base)) for one, base in zip(totals, bases, strict=True))
        return old, new

    async def _roll(self) -> None:
        """Old workers go one by one, and new ones come, so that there are never fewer than before."""
        self._tell(stage=UpgradeStage.ROLLING, detail="")
        for slot in self._all():
            if slot.worker_id in self.new:
                await self._until_ready(slot.worker_id)  # one that was on its way when a controller died
        while any(self._old(role) or self._lacks(role) for role in Role):
            for role in Role:
                if old := self._old(role):
                    self._set_shares(len(self._ready_decode(new=False)), len(self._ready_decode(new=True)))
                    await self._let_go(old[-1].worker_id)
                    self._check_new()
                    if problem := errors(self.plan.gate, Sample(), self._happened()[1]):
                        raise _Failed(problem)
                if self._lacks(role):
                    await self._grow(role)

    def _lacks(self, role: Role) -> bool:
        """Whether new workers are too few yet."""
        return sum(one.worker_id in self.new for one in self._fleet.slots(role)) < self.replicas[role]

    def _old(self, role: Role) -> list[Slot]:
        return [one for one in self._fleet.slots(role) if one.worker_id not in self.new and not one.is_leaving]

    def _ready_decode(self, *, new: bool) -> list[Slot]:
        slots = self._fleet.slots(Role.DECODE)
        return [one for one in slots if one.state is WorkerState.READY and (one.worker_id in self.new) is new]

    async def _let_go(self, worker_id: WorkerId) -> None:
        drain = self._fleet.let_go(worker_id, self.plan.drain_timeout_s)
        if drain is None:
            return
        async for progress in drain.follow():
            self._tell(detail=f"{worker_id} is emptied, {progress.num_left} requests left")

    async def _roll_back(self, reason: str) -> None:
        self._tell(stage=UpgradeStage.ROLLING_BACK, detail=reason)
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
        going = [slot.worker_id for slot in self._all() if slot.worker_id in self.new and not slot.is_leaving]
        await asyncio.gather(*(self._let_go(one) for one in going))
        self._fleet.set_shares({})
        self._tell(stage=UpgradeStage.ROLLED_BACK, detail=reason)

    def _ready(self, role: Role) -> list[Slot]:
        return [one for one in self._old(role) if one.state is WorkerState.READY]

    def _set_shares(self, old: float, new: float) -> None:
        self._fleet.set_shares({OLD_COHORT: float(old), NEW_COHORT: float(new)})

    def _tell(self, **changes: Any) -> None:
        ready = [slot.worker_id in self.new for slot in self._all() if slot.state is WorkerState.READY]
        told = replace(self.progress, num_old=len(ready) - sum(ready), num_new=sum(ready), **changes)
        if told != self.progress:
            self.progress = replace(told, elapsed_s=time.monotonic() - self._began_s)
            self._changed.set()
            self._changed = asyncio.Event()


def cohort_of(upgrade: Upgrade | None, worker_id: WorkerId) -> str:
    """Its place in `Fleet.set_shares`, while `upgrade` is under way."""
    return NEW_COHORT if upgrade is not None and worker_id in upgrade.new else OLD_COHORT
