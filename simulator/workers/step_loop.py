"""A worker's step loop in virtual time: like `engine.step.loop`, it runs posted calls in order between steps."""

from __future__ import annotations

from collections.abc import Callable

from simulator.world.network import Node
from simulator.world.virtual_time import Callback


class VirtualStepLoop:
    def __init__(self, node: Node, begin: Callable[[], float | None], end: Callback) -> None:
        """`begin` schedules a step and returns its duration, or None without work; `end` commits it."""
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
        self._computing = True  # calls posted by calls wait for the next turn of this loop
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
