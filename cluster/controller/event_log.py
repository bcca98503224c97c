"""The log of what happened to a deployment's workers, in order: the last few thousand transitions with their reasons.

The controller keeps it in memory only. Transitions are found by comparing slots with their previous state, so that no
code that changes a worker's state has to remember to log it.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass

from cluster.pools.pool import NO_EPOCH, ROUTER, Incarnation, Slot, WorkerState
from penstock.types import Epoch, WorkerEnd, WorkerId

MAX_EVENTS = 4096
GONE = "gone"
SCALED = "scaled"
BALANCED = "balanced"  # running sequences of a decode worker migrated to another one
KEYS_READ, KEYS_REFUSED = "keys read again", "keys refused"  # from files that have changed; subject: the setting
WEIGHTS = "weights"  # an update of the weights began or ended
DEPLOYMENT, READY, NOT_READY = "deployment", "ready", "not ready"  # whether a request would succeed


_ENDS = {WorkerState.QUARANTINED: WorkerEnd.QUARANTINED}


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    number: int  # rises by one
    unix_time_s: float
    subject: str  # a worker, a pool, the deployment or a setting whose files changed
    epoch: Epoch
    what: (
        str  # a WorkerState, a planned WorkerEnd, GONE, SCALED, BALANCED or one of the keys'; for the deployment READY
    )
    # or NOT_READY
    reason: str


@dataclass(frozen=True, slots=True)
class SeenSlot:
    """The state of a slot when it was last compared."""

    incarnation: Incarnation
    state: WorkerState
    epoch: Epoch
    slot: Slot  # as it is now, or was when its place went away


@dataclass(frozen=True, slots=True)
class Transition:
    subject: str
    epoch: Epoch
    what: str
    reason: str
    end: WorkerEnd | None = None  # of a worker that has ended or is lost


def transitions(before: Mapping[WorkerId, SeenSlot], slots: Iterable[Slot]) -> list[Transition]:
    """Returns each worker's change since `before`. Workers that are gone come first: their places may be reused."""
    now = {slot.worker_id: slot for slot in slots}
    found = [
        Transition(name, seen.epoch, seen.slot.planned_end or GONE, "", seen.slot.planned_end)
        for name, seen in before.items()
        if name not in now
    ]
    for worker_id, slot in now.items():
        seen = before.get(worker_id)
        is_new = seen is None or (seen.incarnation, seen.state) != (slot.incarnation, slot.state)
        if is_new and slot.state is not WorkerState.ENDING:  # it will be gone in a moment, and that is logged
            end = _ENDS.get(slot.state, slot.loss if slot.state is WorkerState.LOST else None)
            found.append(Transition(worker_id, slot.epoch, slot.state.value, _reason(seen, slot), end))
    return found


def _reason(seen: SeenSlot | None, slot: Slot) -> str:
    if slot.state is WorkerState.STARTING and seen is not None and seen.incarnation != slot.incarnation:
        return f"in place of the one that was lost; restart {slot.num_restarts}" if slot.num_restarts else ""
    if slot.state is WorkerState.DRAINING:
        return f"{slot.detail}, and replaced" if slot.is_replaced else slot.detail
    return slot.detail


class EventLog:
    """A bounded log. All of it runs on one event loop."""

    def __init__(self, clock: Callable[[], float], max_events: int = MAX_EVENTS) -> None:
        """`clock` returns Unix time in seconds."""
        self._clock = clock
        self._events: deque[ClusterEvent] = deque(maxlen=max_events)
        self._seen: dict[WorkerId, SeenSlot] = {}
        self._last_number = 0
        self._changed = asyncio.Event()
        self._closed = False
        self._ready = False
        self.ends: Counter[WorkerEnd] = Counter()  # of workers, since this controller started

    def observe(self, slots: Iterable[Slot], ready: bool = False) -> None:
        """Logs what has changed since the last call. `slots` are all there are; `ready` is the deployment's state."""
        slots = list(slots)
        for transition in transitions(self._seen, slots):
            self.note(transition.subject, transition.what, transition.reason, transition.epoch)
            if transition.end is not None and not transition.subject.startswith(ROUTER):
                self.ends[transition.end] += 1
        if ready != self._ready:
            self._ready = ready
            self.note(DEPLOYMENT, READY if ready else NOT_READY)
        self._seen = {slot.worker_id: SeenSlot(slot.incarnation, slot.state, slot.epoch, slot) for slot in slots}

    def note(self, subject: str, what: str, reason: str = "", epoch: Epoch = NO_EPOCH) -> None:
        self._last_number += 1
        self._events.append(ClusterEvent(self._last_number, self._clock(), subject, epoch, what, reason))
        self._wake()

    def after(self, number: int) -> list[ClusterEvent]:
        """Returns the kept events that are newer than `number`."""
        return [event for event in self._events if event.number > number]

    async def follow(self, number: int) -> AsyncIterator[ClusterEvent]:
        """Yields the events after `number` and each new one, until the log is closed."""
        while True:
            changed = self._changed
            for event in self.after(number):
                number = event.number
                yield event
            if self._closed:
                return
            if not self.after(number):
                await changed.wait()

    def close(self) -> None:
        """Ends every `follow`."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
