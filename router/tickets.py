"""Tickets that this router has signed and that are not over: who is told how each fares, and until when to wait for it.

A ticket that nobody uses ends with its time. One in use is followed by what its worker tells with its events, whole
each time, so that nothing is lost with a call that breaks; those of a worker that stays away are given up soon.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from penstock.ticket import SKEW_S
from penstock.types import Epoch
from penstock.v1 import worker_pb2

_LAG_S = 1.0  # from an end at the worker to the news of it here
_AWAY_S = 5.0  # until a worker out of reach is back, or its tickets are lost


class Holder(Protocol):
    """What is held for one ticket. Called on the event loop, returns at once; nothing follows the last two."""

    def on_state(self, state: worker_pb2.TicketState) -> None:
        """How it has fared so far; some are told twice."""
        ...

    def on_over(self, state: worker_pb2.TicketState) -> None:
        """Its stream has ended, as `state` says."""
        ...

    def on_silence(self, *, used: bool) -> None:
        """Nothing more will be heard: its worker is lost, or it was never used."""
        ...


@dataclass(slots=True)
class _Entry:
    worker: Epoch
    holder: Holder
    deadline_s: float  # monotonic
    timer: asyncio.TimerHandle
    used: bool = False


class Tickets:
    """Owned by the fleet, whose followers tell it what they hear."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch  # of this router, by which workers know whose tickets they are
        self._entries: dict[str, _Entry] = {}
        self._idle: list[tuple[Epoch, asyncio.Event]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, ticket: worker_pb2.Ticket, deadline_s: float, holder: Holder) -> None:
        """It is about to be told to a client."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(ticket.lifetime_ms / 1e3 + SKEW_S + _LAG_S, self._give_up, ticket.id)
        self._entries[ticket.id] = _Entry(Epoch(ticket.epoch), holder, deadline_s, timer)

    def on_states(self, worker: Epoch, states: Iterable[worker_pb2.TicketState]) -> None:
        for state in states:
            entry = self._entries.get(state.id)
            if entry is None or entry.worker != worker:
                continue  # over, or never ours
            entry.used = True
            self._wait(state.id, entry, max(0.0, entry.deadline_s - time.monotonic()) + _LAG_S)
            if state.over:
                self._remove(state.id)
                entry.holder.on_over(state)
            else:
                entry.holder.on_state(state)

    def on_away(self, worker: Epoch) -> None:
        """It is out of reach: either it comes back and tells of its tickets anew, or they are lost."""
        for ticket_id, entry in self._entries.items():
            if entry.worker == worker and entry.used:
                self._wait(ticket_id, entry, _AWAY_S)

    async def wait_idle(self, worker: Epoch) -> None:
        """Until no ticket for that worker is out. Bounded by their deadlines."""
        while any(entry.worker == worker for entry in self._entries.values()):
            changed = asyncio.Event()
            waiting = (worker, changed)
            self._idle.append(waiting)
            try:
                await changed.wait()
            finally:
                self._idle.remove(waiting)

    def close(self) -> None:
        for entry in self._entries.values():
            entry.timer.cancel()
        self._entries.clear()

    def _wait(self, ticket_id: str, entry: _Entry, for_s: float) -> None:
        entry.timer.cancel()
        entry.timer = asyncio.get_running_loop().call_later(for_s, self._give_up, ticket_id)

    def _give_up(self, ticket_id: str) -> None:
        entry = self._remove(ticket_id)
        entry.holder.on_silence(used=entry.used)

    def _remove(self, ticket_id: str) -> _Entry:
        entry = self._entries.pop(ticket_id)
        entry.timer.cancel()
        for worker, changed in self._idle:
            if worker == entry.worker:
                changed.set()
        return entry
