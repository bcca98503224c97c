"""How the tickets that were used at a worker fare, for the routers that signed them. Lives on the event loop; no I/O.

Each router is told of its own alone, with the worker's events. States are whole: a router whose call broke off gets all
of its open ones anew, and those that have ended of late.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from penstock.v1 import worker_pb2

_KEEP_S = 30.0  # of ended ones: a router that has been away for longer has given them up


@dataclass(slots=True)
class _Entry:
    state: worker_pb2.TicketState
    version: int
    over_s: float | None = None  # monotonic


class TicketLog:
    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._now_s = now_s
        self._version = 0
        self._by_router: dict[int, OrderedDict[str, _Entry]] = {}  # in the order of their last change

    def __len__(self) -> int:
        return sum(map(len, self._by_router.values()))

    def tell(self, router: int, state: worker_pb2.TicketState) -> None:
        """The state is new, or has changed in place."""
        now_s = self._now_s()
        entries = self._by_router.setdefault(router, OrderedDict())
        self._version += 1
        entries[state.id] = _Entry(state, self._version, now_s if state.over else None)
        entries.move_to_end(state.id)
        self._forget(now_s)
        self.on_change()

    def since(self, router: int, version: int) -> tuple[list[worker_pb2.TicketState], int]:
        """A router's states that have changed since that version (0: all), oldest change first, and the latest one."""
        found = []
        for entry in reversed(self._by_router.get(router, {}).values()):
            if entry.version <= version:
                break
            found.append(entry.state)
        return found[::-1], self._version

    def _forget(self, now_s: float) -> None:
        for router, entries in list(self._by_router.items()):
            old = [one for one, entry in entries.items() if entry.over_s is not None and entry.over_s < now_s - _KEEP_S]
            for one in old:
                del entries[one]
            if not entries:
                del self._by_router[router]
