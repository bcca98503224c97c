"""What happened to the workers of a deployment, in order: the last few thousand transitions, each with its reason.

Kept by the controller in memory alone. Transitions are found by comparing slots with what they were, so that no code
that moves a worker from one state to the next has to remember to tell.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass

from cluster.pool import NO_EPOCH, Incarnation, Slot, WorkerState
from penstock.types import Epoch, WorkerId

MAX_EVENTS = 4096
GONE = "gone"
SCALED = "scaled"
BALANCED = "balanced"  # running sequences of a decode worker went to another one
STOPPED = "stopped"  # what the controller gives as the reason where it ended a worker itself
DEPLOYMENT, READY, NOT_READY = "deployment", "ready", "not ready"  # a request would succeed, or would not


@dataclass(frozen=True, slots=True)
class Event:
    number: int  # rises by one
    unix_time_s: float
    subject: str  # a worker, a pool or the deployment
    epoch: Epoch
    what: str  # a WorkerState, GONE, SCALED or BALANCED; of the deployment READY or NOT_READY
    reason: str


@dataclass(frozen=True, slots=True)
class Seen:
    """What a slot was when it was last looked at."""

    incarnation: Incarnation
    state: WorkerState
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Transition:
    subject: str
    epoch: Epoch
    what: str
    reason: str


def transitions(before: Mapping[WorkerId, Seen], slots: Iterable[Slot]) -> list[Transition]:
    """What became of each worker since `before`. Those that are gone come first: their places may be taken again."""
    now = {slot.worker_id: slot for slot in slots}
    found = [Transition(one, seen.epoch, GONE, "") for one, seen in before.items() if one not in now]
    for worker_id, slot in now.items():
        seen = before.get(worker_id)
        ends_in_order = slot.is_leaving and slot.detail == STOPPED  # it is gone in a moment, and that is told
        if (seen is None or (seen.incarnation, seen.state) != (slot.incarnation, slot.state)) and not ends_in_order:
            found.append(Transition(worker_id, slot.epoch, slot.state.value, _reason(seen, slot)))
    return found


def _reason(seen: Seen | None, slot: Slot) -> str:
    if slot.state is WorkerState.STARTING and seen is not None and seen.incarnation != slot.incarnation:
        return f"in place of the one that was lost; restart {slot.num_restarts}" if slot.num_restarts else ""
    if slot.state is WorkerState.DRAINING:
        return "to be replaced" if slot.is_replaced else "leaves the pool"
    return slot.detail


class EventLog:
    """Bounded. All of it runs on one event loop."""

    def __init__(self, clock: Callable[[], float], max_events: int = MAX_EVENTS) -> None:
        """`clock` tells Unix time in seconds."""
        self._clock = clock
        self._events: deque[Event] = deque(maxlen=max_events)
        self._seen: dict[WorkerId, Seen] = {}
        self._last_number = 0
        self._changed = asyncio.Event()
        self._closed = False
        self._ready = False

    def observe(self, slots: Iterable[Slot], ready: bool = False) -> None:
        """Notes what has changed since the last time. `slots` are all that there are; `ready` is the deployment."""
        slots = list(slots)
        for one in transitions(self._seen, slots):
            self.note(one.subject, one.what, one.reason, one.epoch)
        if ready != self._ready:
            self._ready = ready
            self.note(DEPLOYMENT, READY if ready else NOT_READY)
        self._seen = {slot.worker_id: Seen(slot.incarnation, slot.state, slot.epoch) for slot in slots}

    def note(self, subject: str, what: str, reason: str = "", epoch: Epoch = NO_EPOCH) -> None:
        self._last_number += 1
        self._events.append(Event(self._last_number, self._clock(), subject, epoch, what, reason))
        self._wake()

    def after(self, number: int) -> list[Event]:
        """Those that are kept and newer than `number`."""
        return [event for event in self._events if event.number > number]

    async def follow(self, number: int) -> AsyncIterator[Event]:
        """Those after `number`, and each new one, until the log is closed."""
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
        """Ends whoever follows."""
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
