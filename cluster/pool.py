"""One pool's bookkeeping: how many workers it should have, which it has, and what to do about the difference.

Pure: no Ray, no clock, no I/O. The controller feeds it what happened and carries out the actions that it names.
Every report names the incarnation it speaks of, so that news of a dead one cannot change its successor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from penstock.types import Epoch, WorkerId

NO_EPOCH = Epoch(0)
SPARE = "spare"  # decode-spare-0: the first process that stands ready for the decode pool
FIRST_RETRY_S = 1.0  # after the second loss in a row that never became ready; the first is replaced at once
MAX_RETRY_S = 30.0
FIRST_QUARANTINE_S = 10.0  # doubled each time
MAX_QUARANTINE_S = 600.0


class WorkerState(StrEnum):
    UNPLACED = "unplaced"  # waits for a node that can hold it
    STARTING = "starting"
    READY = "ready"
    SILENT = "silent"  # was ready and gives no sign of life: no new work, until it answers or counts as lost
    DRAINING = "draining"  # gets no new work; what it has ends, or moves away
    LOST = "lost"  # to be replaced
    QUARANTINED = "quarantined"  # gave wrong answers: it was ended, and a successor waits a while


_UP = (WorkerState.READY, WorkerState.SILENT)
_COMING = (WorkerState.UNPLACED, WorkerState.STARTING)
_GONE = (WorkerState.LOST, WorkerState.QUARANTINED)


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One life of one worker. `number` counts from 1 within the worker."""

    worker_id: WorkerId
    number: int

    @property
    def pool_name(self) -> str:
        return self.worker_id.rpartition("-")[0]

    @property
    def spare_of(self) -> str:
        """The pool that it stands ready for; "" for a worker or a router."""
        pool, _, what = self.pool_name.rpartition("-")
        return pool if what == SPARE else ""

    @property
    def place(self) -> int:
        """The worker's number in its pool, from 0."""
        return int(self.worker_id.rpartition("-")[2])


@dataclass(frozen=True, slots=True)
class Start:
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Stop:
    incarnation: Incarnation


Action = Start | Stop


@dataclass(slots=True)
class Slot:
    """A worker's place in the pool; it outlives the incarnations that fill it."""

    incarnation: Incarnation
    state: WorkerState = WorkerState.STARTING
    epoch: Epoch = NO_EPOCH
    address: str = ""
    pid: int = 0
    node: str = ""  # that it runs on, where the host has nodes
    detail: str = ""  # progress while starting, the reason when lost
    failures_in_a_row: int = 0  # losses since it was last ready
    num_restarts: int = 0
    num_quarantines: int = 0
    retry_at_s: float | None = None  # None: what is left of the lost one is not removed yet
    is_going: bool = False  # its node is about to go: it serves, and nothing is moved there
    is_leaving: bool = False  # once it is gone, its place in the pool is too
    is_replaced: bool = False  # a leaving one counts until then: its resources are its successor's

    @property
    def worker_id(self) -> WorkerId:
        return self.incarnation.worker_id


class Pool:
    """Workers `NAME-0`, `NAME-1` and so on, one a replica. Owns which incarnation of each is the current one."""

    def __init__(self, name: str, replicas: int, last_numbers: Mapping[WorkerId, int] = MappingProxyType({})) -> None:
        """`last_numbers` of incarnations that an earlier controller made."""
        self.name = name
        self._replicas = replicas
        self._slots: dict[WorkerId, Slot] = {}
        self._last_number: dict[WorkerId, int] = dict(
            last_numbers
        )  # never reused, also when the pool shrank in between

    @property
    def replicas(self) -> int:
        return self._replicas

    def set_replicas(self, replicas: int) -> None:
        """The next `reconcile` starts or stops workers; the highest numbers go first."""
        self._replicas = replicas

    @property
    def slots(self) -> list[Slot]:
        return list(self._slots.values())

    def ready(self) -> Iterator[Slot]:
        return (slot for slot in self._slots.values() if slot.state is WorkerState.READY)

    @property
    def is_complete(self) -> bool:
        """Every worker that the pool should have is ready, and no other is left; those do not count that wait for a
        node or are quarantined, which may take any time."""
        held = (WorkerState.READY, WorkerState.UNPLACED, WorkerState.QUARANTINED)
        return len(self._slots) == self._replicas == sum(slot.state in held for slot in self._slots.values())

    @property
    def last_numbers(self) -> Mapping[WorkerId, int]:
        return MappingProxyType(self._last_number)

    def adopt(self, incarnation: Incarnation, num_restarts: int = 0) -> None:
        """One that was running before this controller was; it reports as one that starts."""
        number = max(incarnation.number, self._last_number.get(incarnation.worker_id, 0))
        self._last_number[incarnation.worker_id] = number
        self._slots[incarnation.worker_id] = Slot(incarnation, num_restarts=num_restarts)

    def reconcile(self, now_s: float) -> list[Action]:
        """What to do now. The pool takes each action as begun: it is not named again."""
        num_leaving = sum(slot.is_replaced for slot in self._slots.values())
        wanted = self._choose_places(max(0, self._replicas - num_leaving))
        actions: list[Action] = []
        for worker_id in [one for one, slot in self._slots.items() if one not in wanted and not slot.is_leaving]:
            slot = self._slots.pop(worker_id)
            if slot.state not in _GONE:
                actions.append(Stop(slot.incarnation))
        for worker_id in wanted:
            held = self._slots.get(worker_id)
            if held is None:
                self._slots[worker_id] = Slot(self._next_incarnation(worker_id))
            elif held.state in _GONE and held.retry_at_s is not None and held.retry_at_s <= now_s:
                self._slots[worker_id] = Slot(
                    self._next_incarnation(worker_id),
                    failures_in_a_row=held.failures_in_a_row,
                    num_restarts=held.num_restarts + 1,
                    num_quarantines=held.num_quarantines,
                )
            else:
                continue
            actions.append(Start(self._slots[worker_id].incarnation))
        return actions

    def _choose_places(self, count: int) -> list[WorkerId]:
        """Those that are held go on being held, ready ones and lowest numbers first; then the lowest that are free."""
        held = [slot for slot in self._slots.values() if not slot.is_leaving]
        held.sort(key=lambda slot: (slot.state is not WorkerState.READY, slot.incarnation.place))
        staying = [slot.worker_id for slot in held]
        places = (WorkerId(f"{self.name}-{number}") for number in itertools.count())
        free = (one for one in places if one not in self._slots)
        return [*staying[:count], *itertools.islice(free, max(0, count - len(staying)))]

    def drain(self, incarnation: Incarnation, *, replaced: bool, at_once: bool = False) -> None:
        """A ready one gets no more work; the owner ends it when it is empty. Its place goes to a new worker where it is
        `replaced`, once it is gone or `at_once`; else the pool is one smaller from now on."""
        slot = self._current(incarnation)
        if slot and slot.state in _UP:
            slot.state, slot.is_leaving, slot.is_replaced = WorkerState.DRAINING, True, replaced and not at_once
            self._replicas -= not replaced

    def give_up(self, worker_id: WorkerId) -> Stop | None:
        """One that does no work loses its place, and the pool is one smaller."""
        slot = self._slots.get(worker_id)
        if slot is None or slot.is_leaving:
            return None
        del self._slots[worker_id]
        self._replicas -= 1
        return None if slot.state in _GONE else Stop(slot.incarnation)

    def take_over(self, detail: str) -> Incarnation:
        """A place for a worker that comes from another pool, process and all: the pool is one larger."""
        places = (WorkerId(f"{self.name}-{number}") for number in itertools.count())
        worker_id = next(one for one in places if one not in self._slots)
        self._replicas += 1
        slot = self._slots[worker_id] = Slot(self._next_incarnation(worker_id), detail=detail)
        return slot.incarnation

    def _next_incarnation(self, worker_id: WorkerId) -> Incarnation:
        self._last_number[worker_id] = number = self._last_number.get(worker_id, 0) + 1
        return Incarnation(worker_id, number)

    def next_retry_s(self) -> float | None:
        """When `reconcile` will have something to start; None: not before something else happens."""
        due_s = [slot.retry_at_s for slot in self._slots.values() if slot.state in _GONE]
        return min((one_s for one_s in due_s if one_s is not None), default=None)

    def on_progress(self, incarnation: Incarnation, detail: str) -> None:
        slot = self._current(incarnation)
        if slot and slot.state in _COMING:
            slot.state, slot.detail = WorkerState.STARTING, detail

    def on_unplaced(self, incarnation: Incarnation, reason: str) -> None:
        """No node can hold it now; any progress ends this."""
        slot = self._current(incarnation)
        if slot and slot.state in _COMING:
            slot.state, slot.detail = WorkerState.UNPLACED, reason

    def on_ready(self, incarnation: Incarnation, epoch: Epoch, address: str, pid: int, node: str = "") -> None:
        slot = self._current(incarnation)
        if slot and slot.state in _COMING:
            slot.state, slot.detail = WorkerState.READY, ""
            slot.epoch, slot.address, slot.pid, slot.node = epoch, address, pid, node
            slot.failures_in_a_row = 0

    def on_doubt(self, incarnation: Incarnation, reason: str) -> bool:
        """It takes no new work while there is a `reason`; "" ends the doubt. Returns whether that changed anything."""
        slot = self._current(incarnation)
        wanted = WorkerState.SILENT if reason else WorkerState.READY
        if slot is None or slot.state not in _UP or slot.state is wanted:
            return False
        slot.state, slot.detail = wanted, reason
        return True

    def on_poisoned(self, incarnation: Incarnation, reason: str) -> None:
        """It answered wrongly and must be ended; `on_removed` must follow. Its place stays empty for a while."""
        slot = self._current(incarnation)
        if slot and slot.state not in _GONE:
            slot.state, slot.detail, slot.retry_at_s = WorkerState.QUARANTINED, reason, None
            slot.num_quarantines += 1

    def on_lost(self, incarnation: Incarnation, reason: str) -> None:
        """It takes no more work, whatever it was doing. `on_removed` must follow."""
        slot = self._current(incarnation)
        if slot and slot.state not in _GONE:
            slot.failures_in_a_row += slot.state in _COMING
            slot.state, slot.detail, slot.retry_at_s = WorkerState.LOST, reason, None

    def on_removed(self, incarnation: Incarnation, now_s: float) -> None:
        """Nothing of a lost one is left: its resources and ports are free for the next one."""
        slot = self._current(incarnation)
        if slot and slot.is_leaving:
            del self._slots[incarnation.worker_id]
        elif slot and slot.state is WorkerState.QUARANTINED:
            wait_s = FIRST_QUARANTINE_S * 2.0 ** (slot.num_quarantines - 1)
            slot.retry_at_s = now_s + min(MAX_QUARANTINE_S, wait_s)
        elif slot and slot.state is WorkerState.LOST:
            # What was ready is replaced at once; what never gets that far is tried ever less often.
            slot.retry_at_s = now_s + _backoff_s(slot.failures_in_a_row)

    def _current(self, incarnation: Incarnation) -> Slot | None:
        slot = self._slots.get(incarnation.worker_id)
        return slot if slot and slot.incarnation == incarnation else None


def _backoff_s(failures: int) -> float:
    return 0.0 if failures <= 1 else min(MAX_RETRY_S, FIRST_RETRY_S * 2.0 ** (failures - 2))
