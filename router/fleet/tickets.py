"""Follows the lookaside tickets that this router has issued until their streams are over.

Each ticket has a holder that is notified of how its stream fares. An unused ticket ends when its lifetime does. A used
ticket is followed by the ticket states that its worker sends with its events; each state is complete, so that a broken
call loses nothing. Tickets of a worker that stays out of reach are given up soon. A ticket whose deadline passes
without a report says nothing about its worker: its client may read too slowly for the stream's end to come.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from penstock.rpc.ticket import SKEW_S
from penstock.types import Epoch
from penstock.v1 import worker_pb2

_LAG_S = 1.0  # allowed between a stream's end at the worker and its report here
_AWAY_S = 5.0  # a worker that is out of reach for longer loses its tickets


class Silence(Enum):
    """Says why a ticket is no longer followed."""

    UNUSED = "unused"  # no stream began within its lifetime
    LATE = "late"  # its deadline passed, and the worker has not reported the end
    WORKER_LOST = "worker lost"


class TicketHolder(Protocol):
    """Holds a ticket's request. Its methods are called on the event loop and return at once.

    After `on_over` or `on_silence` nothing more is called."""

    def on_state(self, state: worker_pb2.TicketState) -> None:
        """Takes the stream's state so far. The same state may come twice."""
        ...

    def on_over(self, state: worker_pb2.TicketState) -> None:
        """Takes the final state of a stream that has ended."""
        ...

    def on_silence(self, why: Silence) -> None:
        """Notes that nothing more will come."""
        ...


@dataclass(slots=True)
class _Entry:
    worker: Epoch
    tenant: str
    holder: TicketHolder
    deadline_s: float  # monotonic
    timer: asyncio.TimerHandle
    used: bool = False
    away: bool = False  # its worker is out of reach


class IssuedTickets:
    """Owned by the fleet, whose followers pass on the ticket states of their workers."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch  # this router's; tickets carry it, so that workers know whom to report to
        self._entries: dict[str, _Entry] = {}
        self._num_unused: Counter[str] = Counter()  # by tenant
        self._idle: list[tuple[Epoch, asyncio.Event]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def num_unused(self, tenant: str) -> int:
        """Returns the tenant's tickets that no stream has used yet."""
        return self._num_unused[tenant]

    def add(self, ticket: worker_pb2.Ticket, tenant: str, deadline_s: float, holder: TicketHolder) -> None:
        """Follows a ticket that is about to go to a client."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(ticket.lifetime_ms / 1e3 + SKEW_S + _LAG_S, self._give_up, ticket.id)
        self._entries[ticket.id] = _Entry(Epoch(ticket.epoch), tenant, holder, deadline_s, timer)
        self._num_unused[tenant] += 1

    def on_states(self, worker: Epoch, states: Iterable[worker_pb2.TicketState]) -> None:
        for state in states:
            entry = self._entries.get(state.id)
            if entry is None or entry.worker != worker:
                continue  # over, or issued by another router
            self._use(entry)
            entry.away = False
            self._wait(state.id, entry, max(0.0, entry.deadline_s - time.monotonic()) + _LAG_S)
            if state.over:
                self._remove(state.id)
                entry.holder.on_over(state)
            else:
                entry.holder.on_state(state)

    def on_away(self, worker: Epoch) -> None:
        """Gives up the worker's used tickets unless it comes back soon and reports them again."""
        for ticket_id, entry in self._entries.items():
            if entry.worker == worker and entry.used:
                entry.away = True
                self._wait(ticket_id, entry, _AWAY_S)

    async def wait_idle(self, worker: Epoch) -> None:
        """Returns once no ticket for that worker is left. Bounded by the tickets' deadlines."""
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
        self._num_unused.clear()

    def _wait(self, ticket_id: str, entry: _Entry, for_s: float) -> None:
        entry.timer.cancel()
        entry.timer = asyncio.get_running_loop().call_later(for_s, self._give_up, ticket_id)

    def _give_up(self, ticket_id: str) -> None:
        entry = self._remove(ticket_id)
        why = Silence.UNUSED if not entry.used else Silence.WORKER_LOST if entry.away else Silence.LATE
        self._use(entry)
        entry.holder.on_silence(why)

    def _use(self, entry: _Entry) -> None:
        """Counts the ticket as unused no longer. Idempotent."""
        if not entry.used:
            entry.used = True
            self._num_unused[entry.tenant] -= 1
            if not self._num_unused[entry.tenant]:
                del self._num_unused[entry.tenant]

    def _remove(self, ticket_id: str) -> _Entry:
        entry = self._entries.pop(ticket_id)
        entry.timer.cancel()
        for worker, changed in self._idle:
            if worker == entry.worker:
                changed.set()
        return entry
