"""Follows the lookaside tickets that this router has issued until their streams are over.

Each ticket has a holder that is notified of its stream's progress. An unused ticket ends with its lifetime. Once a
ticket is used, its worker sends ticket states with its events; each state is complete, so a broken call loses nothing.
The tickets of a worker that stays unreachable are soon given up. A ticket whose deadline passes without a report says
nothing about its worker: the client may read too slowly for the stream to end.
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

_LAG_S = 1.0  # time allowed between a stream's end at the worker and its report to this router
_AWAY_S = 5.0  # the tickets of a worker that is unreachable for longer are given up


class Silence(Enum):
    """Says why a ticket is no longer followed."""

    UNUSED = "unused"  # no stream began within its lifetime
    LATE = "late"  # its deadline passed before the worker reported the end of the stream
    WORKER_LOST = "worker lost"


class TicketHolder(Protocol):
    """Receives the states of a ticket's stream. Its methods are called on the event loop and must return at once.

    No method is called after `on_over` or `on_silence`.
    """

    def on_state(self, state: worker_pb2.TicketState) -> None:
        """Receives the stream's state so far. The same state may arrive twice."""
        ...

    def on_over(self, state: worker_pb2.TicketState) -> None:
        """Receives the final state of a stream that has ended."""
        ...

    def on_silence(self, why: Silence) -> None:
        """Receives the reason why the ticket is no longer followed, although no end of its stream was reported."""
        ...


@dataclass(slots=True)
class _Entry:
    worker: Epoch
    tenant: str
    holder: TicketHolder
    deadline_s: float  # monotonic
    timer: asyncio.TimerHandle
    used: bool = False
    away: bool = False  # whether its worker is unreachable


class IssuedTickets:
    """Holds all tickets that are followed. The fleet owns it; followers pass on the ticket states of their workers."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch  # this router's; tickets carry it, so that workers know which router to report to
        self._entries: dict[str, _Entry] = {}
        self._num_unused: Counter[str] = Counter()  # by tenant
        self._idle: list[tuple[Epoch, asyncio.Event]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def num_unused(self, tenant: str) -> int:
        """Returns the number of the tenant's tickets that no stream has used yet."""
        return self._num_unused[tenant]

    def add(self, ticket: worker_pb2.Ticket, tenant: str, deadline_s: float, holder: TicketHolder) -> None:
        """Follows a ticket from now on. Call it before the ticket goes to its client."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(ticket.lifetime_ms / 1e3 + SKEW_S + _LAG_S, self._give_up, ticket.id)
        self._entries[ticket.id] = _Entry(Epoch(ticket.epoch), tenant, holder, deadline_s, timer)
        self._num_unused[tenant] += 1

    def on_states(self, worker: Epoch, states: Iterable[worker_pb2.TicketState]) -> None:
        for state in states:
            entry = self._entries.get(state.id)
            if entry is None or entry.worker != worker:
                continue  # the stream is over, or the ticket is another router's
            self._use(entry)
            entry.away = False
            self._wait(state.id, entry, max(0.0, entry.deadline_s - time.monotonic()) + _LAG_S)
            if state.over:
                self._remove(state.id)
                entry.holder.on_over(state)
            else:
                entry.holder.on_state(state)

    def on_away(self, worker: Epoch) -> None:
        """Gives up the worker's used tickets unless the worker soon returns and reports them again."""
        for ticket_id, entry in self._entries.items():
            if entry.worker == worker and entry.used:
                entry.away = True
                self._wait(ticket_id, entry, _AWAY_S)

    async def wait_idle(self, worker: Epoch) -> None:
        """Returns once no ticket for that worker is left. The tickets' deadlines bound the wait."""
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
        """Marks the ticket as used. Idempotent."""
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
