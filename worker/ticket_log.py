"""Keeps the state of every ticket used at a worker for the router that signed it. Runs on the event loop without I/O.

Each router receives the states of its own tickets with the worker's events. A state is always complete: after a broken
call a router receives all its open tickets again, and those that have ended recently. The log holds only the worker's
open requests, which admission bounds, and a bounded number of ended ones.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from penstock.v1 import worker_pb2

_KEEP_S = 30.0  # how long ended tickets are kept; a router that is away for longer gives its tickets up
MAX_ENDED = 8192  # older ones are dropped; an absent router then counts them as admitted until their deadline


@dataclass(slots=True)
class _Entry:
    state: worker_pb2.TicketState
    version: int


class TicketLog:
    def __init__(self, now_s: Callable[[], float] = time.monotonic, max_ended: int = MAX_ENDED) -> None:
        self._now_s = now_s
        self._max_ended = max_ended
        self._version = 0
        self._ended: OrderedDict[tuple[int, str], float] = OrderedDict()  # ends of (router, ticket)
        self._by_router: dict[int, OrderedDict[str, _Entry]] = {}  # in the order of their last change
        self._listeners: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return sum(map(len, self._by_router.values()))

    def subscribe(self, on_change: Callable[[], None]) -> None:
        self._listeners.append(on_change)

    def update(self, router: int, state: worker_pb2.TicketState) -> None:
        """Records a state that is new or was changed in place."""
        now_s = self._now_s()
        entries = self._by_router.setdefault(router, OrderedDict())
        self._version += 1
        entries[state.id] = _Entry(state, self._version)
        entries.move_to_end(state.id)
        self._ended.pop((router, state.id), None)
        if state.over:
            self._ended[router, state.id] = now_s
        self._forget(now_s)
        for on_change in self._listeners:
            on_change()

    def since(self, router: int, version: int) -> tuple[list[worker_pb2.TicketState], int]:
        """Returns a router's states that changed after `version` (0: all), oldest change first, and the current
        version.
        """
        found = []
        for entry in reversed(self._by_router.get(router, {}).values()):
            if entry.version <= version:
                break
            found.append(entry.state)
        return found[::-1], self._version

    def _forget(self, now_s: float) -> None:
        while self._ended:
            (router, ticket), over_s = next(iter(self._ended.items()))
            if over_s >= now_s - _KEEP_S and len(self._ended) <= self._max_ended:
                return
            del self._ended[router, ticket]
            entries = self._by_router[router]
            del entries[ticket]
            if not entries:
                del self._by_router[router]
