"""Implements virtual time as a heap of callbacks. Everything else in this package is a callback that schedules others.

The same seed gives the same run, bit for bit: callbacks due at the same moment run in the order in which they were
scheduled, nothing reads a clock, and every part has its own random stream, so one part does not shift another's.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable

Callback = Callable[[], None]


class Timer:
    """A callback that is due at `time_s` unless it is cancelled before."""

    __slots__ = ("callback", "time_s")

    def __init__(self, time_s: float, callback: Callback) -> None:
        self.time_s = time_s
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        """Cancels the callback. Does nothing if it has run or was cancelled."""
        self.callback = None


class Simulation:
    """Owns the time. `now_s` begins at 0 and moves when `run` takes the next callback."""

    def __init__(self, seed: int = 0) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._seed = seed
        self._number = 0  # number of callbacks scheduled, which breaks ties
        self._heap: list[tuple[float, int, Timer]] = []

    def rng(self, name: str) -> random.Random:
        """Returns the random stream of that name, from its beginning."""
        return random.Random(f"{self._seed}/{name}")

    def at(self, time_s: float, callback: Callback) -> Timer:
        """Schedules the callback; a time in the past is due at once."""
        timer = Timer(max(time_s, self.now_s), callback)
        self._number += 1
        heapq.heappush(self._heap, (timer.time_s, self._number, timer))
        return timer

    def after(self, delay_s: float, callback: Callback) -> Timer:
        """Schedules the callback after a delay."""
        return self.at(self.now_s + delay_s, callback)

    def run(
        self, until: Callable[[], bool] = lambda: False, until_s: float = math.inf, on_event: Callback | None = None
    ) -> None:
        """Runs callbacks until none is left, `until` holds, or the next is due after `until_s`.

        `on_event` is called after each, for invariant checks.
        """
        heap, pop = self._heap, heapq.heappop
        while heap and not until():
            time_s, _, timer = heap[0]
            if time_s > until_s:
                self.now_s = until_s
                return
            pop(heap)
            callback, timer.callback = timer.callback, None
            if callback is None:
                continue
            self.now_s = time_s
            self.num_events += 1
            callback()
            if on_event is not None:
                on_event()
