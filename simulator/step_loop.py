"""A worker's step loop in virtual time: calls run between two steps, in order, as `engine.step_loop` does it."""

from __future__ import annotations

from collections.abc import Callable

from simulator.events import Callback
from simulator.network import Node


class StepLoop:
    def __init__(self, node: Node, begin: Callable[[], float | None], end: Callback) -> None:
        """`begin` schedules a step and says how long it takes, None where there is nothing to do; `end` commits it."""
        self._node = node
        self._begin = begin
        self._end = end
        self._computing = False
        self._inbox: list[Callback] = []
        self.busy_s = 0.0

    def post(self, call: Callback) -> None:
        self._inbox.append(call)
        if not self._computing:
            self._turn()

    def _turn(self) -> None:
        self._computing = True  # what a call posts waits for the next turn of this loop
        while True:
            inbox, self._inbox = self._inbox, []
            for call in inbox:
                call()
            duration_s = self._begin()
            if duration_s is not None:
                self.busy_s += duration_s
                self._node.after(duration_s, self._finish)
                return
            if not self._inbox:
                self._computing = False
                return

    def _finish(self) -> None:
        self._end()
        self._turn()
