"""How many of the things that a rank was told to do are done, also where a GPU is behind the thread that feeds it.

A sum that never ends leaves that thread free to take step after step: only the device knows. Safe from any thread.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol


class Event(Protocol):
    """`torch.cuda.Event`."""

    def query(self) -> bool: ...


class RankProgress:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_given = 0
        self._under_way: deque[tuple[int, Event]] = deque()

    def add(self, event: Event | None = None) -> None:
        """One more is given. `event` happens when the device has come past it; None: it is done as soon as all before
        it are."""
        with self._lock:
            self._num_given += 1
            if event is not None:
                self._under_way.append((self._num_given, event))

    @property
    def num_done(self) -> int:
        """Of those given, counted from the first; each of them only after all before it."""
        with self._lock:
            while self._under_way and self._under_way[0][1].query():
                self._under_way.popleft()
            return self._under_way[0][0] - 1 if self._under_way else self._num_given
