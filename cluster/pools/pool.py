"""Bookkeeping of the pools: how many workers each should have, which it has, and what to do about the difference.

Pure: no Ray, no clock, no I/O. The controller reports what happened and carries out the actions that `reconcile`
returns. Every report names its incarnation, so that a late report of a dead one cannot change its successor.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from penstock.config import ServeConfig
from penstock.errors import InvalidInput
from penstock.types import Epoch, Member, Role, WorkerEnd, WorkerId

NO_EPOCH = Epoch(0)
ROUTER = "router"  # the name of the routers' pool; the others are named after their roles
SPARE = "spare"  # decode-spare-0: the first spare of the decode pool
FIRST_RETRY_S = 1.0  # after the second failed start in a row; the first is retried at once
MAX_RETRY_S = 30.0
FIRST_QUARANTINE_S = 10.0  # doubled each time
MAX_QUARANTINE_S = 600.0


class WorkerState(StrEnum):
    WAITING = "waiting"  # it is not its turn to start yet
    UNPLACED = "unplaced"  # no node can hold it now
    STARTING = "starting"
    READY = "ready"
    SILENT = "silent"  # was ready and stopped answering: gets no new work until it answers or counts as lost
    PAUSED = "paused"  # gets no new work while its weights are replaced
    DRAINING = "draining"  # gets no new work; its requests finish or migrate
    ENDING = "ending"  # stops as planned: it holds no requests any more
    LOST = "lost"  # it will be replaced
    QUARANTINED = "quarantined"  # answered wrongly and was stopped; its successor starts after a delay


_UP = (WorkerState.READY, WorkerState.SILENT)
COMING = (WorkerState.WAITING, WorkerState.UNPLACED, WorkerState.STARTING)
_GONE = (WorkerState.LOST, WorkerState.QUARANTINED)
# A pool that shrinks keeps serving workers before starting ones.
_KEEPING_ORDER = {
    WorkerState.READY: 0,
    WorkerState.PAUSED: 0,
    WorkerState.SILENT: 1,
    WorkerState.STARTING: 2,
}


@dataclass(frozen=True, slots=True)
class Incarnation:
    """A life of a worker. `number` counts the worker's lives from 1."""

    worker_id: WorkerId
    number: int

    @property
    def pool_name(self) -> str:
        return self.worker_id.rpartition("-")[0]

    @property
    def spare_of(self) -> str:
        """The pool that this spare belongs to; "" for a worker or a router."""
        pool, _, suffix = self.pool_name.rpartition("-")
        return pool if suffix == SPARE else ""

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
    state: WorkerState = WorkerState.WAITING
    epoch: Epoch = NO_EPOCH
    address: str = ""
    pid: int = 0
    node: str = ""  # the node it runs on, if the deployment has nodes
    detail: str = ""  # its progress while it starts, the reason once it is lost
    failures_in_a_row: int = 0  # losses since the worker was last ready
    num_restarts: int = 0
    num_quarantines: int = 0
    retry_at_s: float | None = None  # None: the lost process still has to be removed
    weights_version: int = 0  # of the update that its weights come from; 0: the checkpoint's own
    has_served: bool = False  # a worker was ready here before, so its successor starts before newcomers
    is_placed: bool = False  # its process has its resources
    is_loaded: bool = False  # its process has started; its first request comes next
    is_ending: bool = False  # its process received SIGTERM and must be drained
    is_node_leaving: bool = False  # its node goes away: it serves until replaced, and takes in no sequences
    is_leaving: bool = False  # the pool loses this place with the worker
    planned_end: WorkerEnd | None = None  # why it will stop, unless it is lost first
    loss: WorkerEnd | None = None  # how it was lost
    is_replaced: bool = (
        False  # a leaving worker counts as a replica until it is gone: its successor needs its resources
    )

    @property
    def worker_id(self) -> WorkerId:
        return self.incarnation.worker_id


class Pool:
    """Workers `NAME-0`, `NAME-1` and so on, one for each replica. Knows the current incarnation of each."""

    def __init__(self, name: str, replicas: int, last_numbers: Mapping[WorkerId, int] = MappingProxyType({})) -> None:
        """`last_numbers` are the incarnation numbers that an earlier controller had reached."""
        self.name = name
        self._replicas = replicas
        self._num_successors = 0  # replacements to start for drained workers
        self._slots: dict[WorkerId, Slot] = {}
        # A number is never reused, even if the pool shrinks in between.
        self._last_number: dict[WorkerId, int] = dict(last_numbers)

    @property
    def replicas(self) -> int:
        return self._replicas

    def set_replicas(self, replicas: int) -> None:
        """Sets the size that the next `reconcile` starts or stops workers to reach; the highest numbers go first."""
        self._replicas = replicas

    @property
    def slots(self) -> list[Slot]:
        return list(self._slots.values())

    def ready(self) -> Iterator[Slot]:
        return (slot for slot in self._slots.values() if slot.state is WorkerState.READY)

    @property
    def is_complete(self) -> bool:
        """Returns whether every desired worker is ready and no other is left. Unplaced and quarantined workers count as
        ready, since either state may last any time.
        """
        settled = (WorkerState.READY, WorkerState.UNPLACED, WorkerState.QUARANTINED)
        return len(self._slots) == self._replicas == sum(slot.state in settled for slot in self._slots.values())

    @property
    def is_placed(self) -> bool:
        """Returns whether as many workers as desired have their resources."""
        return sum(slot.is_placed and slot.state not in _GONE for slot in self._slots.values()) >= self._replicas

    @property
    def last_numbers(self) -> Mapping[WorkerId, int]:
        return MappingProxyType(self._last_number)

    def restore(self, incarnation: Incarnation, num_restarts: int = 0) -> None:
        """Adds an incarnation that an earlier controller started; it reports its start like a new one."""
        number = max(incarnation.number, self._last_number.get(incarnation.worker_id, 0))
        self._last_number[incarnation.worker_id] = number
        self._slots[incarnation.worker_id] = Slot(incarnation, WorkerState.STARTING, num_restarts=num_restarts)

    def reconcile(self, now_s: float) -> list[Action]:
        """Returns what to do now. The pool counts each action as begun and does not return it again."""
        num_replaced = sum(slot.is_replaced for slot in self._slots.values())
        wanted = self._choose_places(max(0, self._replicas - num_replaced))
        actions: list[Action] = []
        surplus = [name for name, slot in self._slots.items() if name not in wanted and not slot.is_leaving]
        for worker_id in surplus:
            slot = self._slots.pop(worker_id)
            slot.planned_end = WorkerEnd.SCALED_DOWN
            if slot.state not in _GONE:
                actions.append(Stop(slot.incarnation))
        for worker_id in wanted:
            held = self._slots.get(worker_id)
            if held is None:
                succeeds, self._num_successors = self._num_successors > 0, max(0, self._num_successors - 1)
                self._slots[worker_id] = Slot(self._next_incarnation(worker_id), has_served=succeeds)
            elif held.state in _GONE and held.retry_at_s is not None and held.retry_at_s <= now_s:
                self._slots[worker_id] = Slot(
                    self._next_incarnation(worker_id),
                    failures_in_a_row=held.failures_in_a_row,
                    num_restarts=held.num_restarts + 1,
                    num_quarantines=held.num_quarantines,
                    has_served=held.has_served,
                )
            else:
                continue
            actions.append(Start(self._slots[worker_id].incarnation))
        return actions

    def _choose_places(self, count: int) -> list[WorkerId]:
        """Returns the places to keep filled: held ones, serving ones and lowest numbers first, then the lowest free."""
        held = [slot for slot in self._slots.values() if not slot.is_leaving]
        held.sort(key=lambda slot: (_KEEPING_ORDER.get(slot.state, len(_KEEPING_ORDER)), slot.incarnation.place))
        staying = [slot.worker_id for slot in held]
        return [*staying[:count], *itertools.islice(self._free_places(), max(0, count - len(staying)))]

    def _free_places(self) -> Iterator[WorkerId]:
        places = (WorkerId(f"{self.name}-{number}") for number in itertools.count())
        return (place for place in places if place not in self._slots)

    def stop(self) -> None:
        """Removes every worker that is not leaving already; the caller stops the processes."""
        self._replicas = 0
        for slot in [slot for slot in self._slots.values() if not slot.is_leaving]:
            slot.planned_end = WorkerEnd.STOPPED
            del self._slots[slot.worker_id]

    def drain(
        self,
        incarnation: Incarnation,
        *,
        replaced: bool,
        at_once: bool = False,
        end: WorkerEnd = WorkerEnd.DRAINED,
    ) -> None:
        """Stops new work for a ready worker; the caller stops it once it is empty.

        With `replaced` a new worker takes its place, `at_once` or after it is gone; otherwise the pool shrinks by one.
        """
        slot = self._current(incarnation)
        if slot and slot.state in _UP:
            slot.state, slot.is_leaving, slot.is_replaced = WorkerState.DRAINING, True, replaced and not at_once
            slot.planned_end, slot.detail = end, f"to be {end.value}"
            self._replicas -= not replaced
            self._num_successors += replaced

    def remove_place(self, worker_id: WorkerId, end: WorkerEnd) -> Stop | None:
        """Removes a worker without draining it; the pool shrinks by one. Returns how to stop its process, if any."""
        slot = self._slots.get(worker_id)
        if slot is None or slot.is_leaving:
            return None
        del self._slots[worker_id]
        slot.planned_end = end
        self._replicas -= 1
        return None if slot.state in _GONE else Stop(slot.incarnation)

    def add_place(self, detail: str, *, has_served: bool = False) -> Incarnation:
        """Adds a worker; the pool grows by one. `has_served`: it succeeds a serving worker."""
        worker_id = next(self._free_places())
        self._replicas += 1
        slot = self._slots[worker_id] = Slot(self._next_incarnation(worker_id), detail=detail, has_served=has_served)
        return slot.incarnation

    def begin(self, incarnation: Incarnation) -> None:
        """Records that it is the worker's turn to start."""
        slot = self._current(incarnation)
        if slot and slot.state is WorkerState.WAITING:
            slot.state = WorkerState.STARTING

    def begin_flip(self, incarnation: Incarnation) -> None:
        """Records that a serving worker's process becomes this worker: it is placed, and has nothing to load."""
        slot = self._current(incarnation)
        if slot and slot.state is WorkerState.WAITING:
            slot.state = WorkerState.STARTING
            slot.has_served = slot.is_placed = slot.is_loaded = True

    def withdraw(self, incarnation: Incarnation) -> None:
        """Makes a worker wait for its turn again under a new incarnation number: this one's names are in use."""
        slot = self._current(incarnation)
        if slot and slot.state in COMING:
            slot.state, slot.detail, slot.is_placed = WorkerState.WAITING, "", False
            slot.incarnation = self._next_incarnation(slot.worker_id)

    def _next_incarnation(self, worker_id: WorkerId) -> Incarnation:
        self._last_number[worker_id] = number = self._last_number.get(worker_id, 0) + 1
        return Incarnation(worker_id, number)

    def next_retry_s(self) -> float | None:
        """Returns when `reconcile` will have a worker to start; None: not before another event."""
        due_s = [slot.retry_at_s for slot in self._slots.values() if slot.state in _GONE]
        return min((retry_s for retry_s in due_s if retry_s is not None), default=None)

    def on_progress(self, incarnation: Incarnation, detail: str) -> None:
        slot = self._current(incarnation)
        if slot and slot.state in COMING:
            slot.state, slot.detail = WorkerState.STARTING, detail

    def on_placed(self, incarnation: Incarnation) -> None:
        """Records that the worker's process has its resources. A worker that had to wait for them now waits for its
        turn.
        """
        slot = self._current(incarnation)
        if slot and slot.state in COMING:
            slot.is_placed = True
            if slot.state is WorkerState.UNPLACED:
                slot.state, slot.detail = WorkerState.WAITING, ""

    def on_loaded(self, incarnation: Incarnation) -> None:
        """Records that the worker's process has started."""
        slot = self._current(incarnation)
        if slot:
            slot.is_loaded = True

    def on_unplaced(self, incarnation: Incarnation, reason: str) -> None:
        """Records that no node can hold the worker now; any progress ends this state."""
        slot = self._current(incarnation)
        if slot and slot.state in COMING:
            slot.state, slot.detail = WorkerState.UNPLACED, reason

    def on_paused(self, incarnation: Incarnation, reason: str) -> None:
        """Stops new work for a worker until it is ready again, under another epoch."""
        slot = self._current(incarnation)
        if slot and slot.state in _UP:
            slot.state, slot.detail = WorkerState.PAUSED, reason

    def on_ready(
        self,
        incarnation: Incarnation,
        epoch: Epoch,
        address: str,
        pid: int,
        node: str = "",
        weights_version: int = 0,
    ) -> None:
        slot = self._current(incarnation)
        if slot and slot.state in (*COMING, WorkerState.PAUSED):
            slot.weights_version = weights_version
            slot.state, slot.detail = WorkerState.READY, ""
            slot.epoch, slot.address, slot.pid, slot.node = epoch, address, pid, node
            slot.failures_in_a_row = 0
            slot.has_served = True

    def on_doubt(self, incarnation: Incarnation, reason: str) -> bool:
        """Stops new work for the worker while it has a `reason` to; "" resumes it. Returns whether anything changed."""
        slot = self._current(incarnation)
        wanted = WorkerState.SILENT if reason else WorkerState.READY
        if slot is None or slot.state not in _UP or slot.state is wanted:
            return False
        slot.state, slot.detail = wanted, reason
        return True

    def on_ending(self, incarnation: Incarnation) -> bool:
        """Records that the worker's process was asked to stop. Returns whether that was unknown."""
        slot = self._current(incarnation)
        if slot is None or slot.is_ending:
            return False
        slot.is_ending = True
        return True

    def on_wrong_answer(self, incarnation: Incarnation, reason: str) -> None:
        """Quarantines the worker: the caller stops it and calls `on_removed`, and its place stays empty for a while."""
        slot = self._current(incarnation)
        if slot and slot.state not in _GONE:
            slot.state, slot.detail, slot.retry_at_s = WorkerState.QUARANTINED, reason, None
            slot.num_quarantines += 1

    def on_ended(self, incarnation: Incarnation) -> None:
        """Records that the worker's process stops as planned. `on_removed` must follow."""
        slot = self._current(incarnation)
        if slot and slot.state not in _GONE:
            slot.state = WorkerState.ENDING

    def on_lost(self, incarnation: Incarnation, reason: str) -> None:
        """Stops new work for the worker, whatever it was doing. `on_removed` must follow."""
        slot = self._current(incarnation)
        if slot and slot.state not in _GONE:
            slot.loss = _loss_in(slot.state)
            slot.failures_in_a_row += slot.state in COMING
            slot.state, slot.detail, slot.retry_at_s = WorkerState.LOST, reason, None
            slot.planned_end = None

    def on_removed(self, incarnation: Incarnation, now_s: float) -> None:
        """Records that a lost worker's process is gone: its resources and ports are free for the next one."""
        slot = self._current(incarnation)
        if slot and slot.is_leaving:
            del self._slots[incarnation.worker_id]
        elif slot and slot.state is WorkerState.QUARANTINED:
            wait_s = FIRST_QUARANTINE_S * 2.0 ** (slot.num_quarantines - 1)
            slot.retry_at_s = now_s + min(MAX_QUARANTINE_S, wait_s)
        elif slot and slot.state is WorkerState.LOST:
            # A worker that was ready is replaced at once; failed starts are retried at growing intervals.
            slot.retry_at_s = now_s + _backoff_s(slot.failures_in_a_row)

    def _current(self, incarnation: Incarnation) -> Slot | None:
        slot = self._slots.get(incarnation.worker_id)
        return slot if slot and slot.incarnation == incarnation else None


def _loss_in(state: WorkerState) -> WorkerEnd:
    """Returns the kind of loss for a worker that was in this state."""
    if state in COMING:
        return WorkerEnd.NOT_STARTED
    return WorkerEnd.HUNG if state is WorkerState.SILENT else WorkerEnd.DIED


def _backoff_s(failures: int) -> float:
    return 0.0 if failures <= 1 else min(MAX_RETRY_S, FIRST_RETRY_S * 2.0 ** (failures - 2))


def member_of(slot: Slot) -> Member:
    """Converts a worker's slot to a member."""
    return Member(slot.worker_id, slot.epoch, Role(slot.incarnation.pool_name), slot.address)


class Pools:
    """The prefill, decode and router pools of a deployment, by name."""

    def __init__(self, config: ServeConfig, replicas: Mapping[str, int], last_numbers: Mapping[str, int]) -> None:
        """`replicas`, by pool name, and `last_numbers`, by worker id, come from an earlier controller; pools missing
        from `replicas` get their size from `config`.
        """
        sizes = {
            Role.PREFILL.value: config.prefill_pool.replicas,
            Role.DECODE.value: config.decode_pool.replicas,
            ROUTER: config.routers,
        }
        numbers: dict[str, dict[WorkerId, int]] = {name: {} for name in sizes}
        for worker_id, number in last_numbers.items():
            pool_name = Incarnation(WorkerId(worker_id), number).pool_name
            numbers.setdefault(pool_name, {})[WorkerId(worker_id)] = number
        self._pools = {name: Pool(name, replicas.get(name, size), numbers[name]) for name, size in sizes.items()}

    def __getitem__(self, name: str) -> Pool:
        return self._pools[name]

    def __iter__(self) -> Iterator[Pool]:
        return iter(self._pools.values())

    def of(self, incarnation: Incarnation) -> Pool:
        return self._pools[incarnation.pool_name]

    @property
    def slots(self) -> list[Slot]:
        return [slot for pool in self for slot in pool.slots]

    @property
    def worker_slots(self) -> list[Slot]:
        """The slots of all workers; routers are left out."""
        return [slot for role in Role for slot in self[role.value].slots]

    def slot_of(self, incarnation: Incarnation) -> Slot | None:
        return next((slot for slot in self.of(incarnation).slots if slot.incarnation == incarnation), None)

    def is_waiting(self, incarnation: Incarnation) -> bool:
        slot = self.slot_of(incarnation)
        return slot is not None and slot.state is WorkerState.WAITING

    def slot_of_member(self, member: Member) -> Slot | None:
        return next((slot for slot in self[member.role.value].slots if slot.epoch == member.epoch), None)

    def find_worker(self, worker_id: str) -> Slot:
        """Raises InvalidInput for a worker that does not exist."""
        workers = {slot.worker_id: slot for slot in self.worker_slots}
        if worker_id not in workers:
            raise InvalidInput("worker_id", f"is {worker_id!r}; the workers are {', '.join(sorted(workers))}")
        return workers[WorkerId(worker_id)]

    def members(self) -> list[Member]:
        """Returns the workers that may get requests."""
        return [member_of(slot) for role in Role for slot in self[role.value].ready()]

    def paused(self) -> list[WorkerId]:
        """Returns the workers that pause while their weights are replaced."""
        return [slot.worker_id for slot in self.worker_slots if slot.state is WorkerState.PAUSED]

    @property
    def can_decode(self) -> bool:
        return any(self[Role.DECODE.value].ready())

    def reconcile(self, now_s: float) -> list[Action]:
        return [action for pool in self for action in pool.reconcile(now_s)]

    def next_retry_s(self) -> float | None:
        """Returns when `reconcile` will have a worker to start; None: not before another event."""
        return min((due_s for pool in self if (due_s := pool.next_retry_s()) is not None), default=None)
