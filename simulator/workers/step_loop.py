"""Models a worker's step loop in virtual time: like `engine.step.loop`, it runs posted calls in order between steps.

With `serve`, it also takes calls while a step computes, as decode workers do (`decode_worker.schedule.step_driver`).

`begin` may run several steps at once if nothing is to be decided between them. A call that is posted meanwhile cuts
such a run after the step in flight, so the call runs at the same time as it would have without the run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from simulator.world.machine_model import SharedWork
from simulator.world.network import Node
from simulator.world.virtual_time import Callback, Timer


class VirtualStepLoop:
    def __init__(
        self,
        node: Node,
        begin: Callable[[], Sequence[float]],
        end: Callable[[int], None],
        before_change: Callable[[], None] = lambda: None,
        serve: Callable[[Callback], None] | None = None,
        start_shared: Callable[[float, Callback], SharedWork] | None = None,
    ) -> None:
        """`begin` schedules steps and returns the end of each, or nothing without work; `end` commits that many.

        `before_change` is called before steps that have ended or posted calls change the worker. `serve` runs a call
        during a step; without it, calls wait for the end of the step.

        With `start_shared`, steps share cores: it begins the time of a step, and `begin` returns the end of a single
        step as it would be on cores of its own.
        """
        self._node = node
        self._before_change = before_change
        self._begin = begin
        self._end = end
        self._serve = serve
        self._start_shared = start_shared
        self._computing = False
        self._serving = False
        self._inbox: list[Callback] = []
        self._ends_s: Sequence[float] = ()  # ends of the steps of this run
        self._num_ended = 0  # steps of the run that were committed before its end
        self._since_s = 0.0
        self._timer: Timer | SharedWork | None = None
        self.busy_s = 0.0

    def post(self, call: Callback) -> None:
        self._inbox.append(call)
        if not self._computing:
            self._turn()
        elif self._timer is not None:
            self.cut()
            if self._serve is not None and not self._serving:
                self._take_calls(self._serve)

    def _take_calls(self, serve: Callable[[Callback], None]) -> None:
        """Runs the posted calls during the step in flight, and those that they post."""
        self._serving = True
        self._before_change()
        while self._inbox:
            serve(self._inbox.pop(0))
        self._serving = False

    def cut(self) -> None:
        """Ends the run with the step in flight."""
        if not isinstance(self._timer, Timer) or self._timer.time_s <= self._node.sim.now_s:
            return
        place = bisect_right(self._ends_s, self._node.sim.now_s)
        if place + 1 < len(self._ends_s):
            self._ends_s = self._ends_s[: place + 1]
            self._timer.cancel()
            self._timer = self._node.at(self._ends_s[-1], self._finish)

    def catch_up(self, until_s: float) -> int:
        """Returns how many steps of the run have ended by `until_s` since the last call, for the caller to commit them.

        The last step of a run is left to `end`.
        """
        if self._timer is None or len(self._ends_s) == 1:
            return 0
        place = bisect_right(self._ends_s, until_s, self._num_ended, len(self._ends_s) - 1)
        num_ended, self._num_ended = place - self._num_ended, place
        return num_ended

    @property
    def is_in_run(self) -> bool:
        """Returns whether several steps were begun at once and the last has not ended."""
        return self._timer is not None and len(self._ends_s) > 1

    def next_end_s(self, after_s: float) -> float | None:
        """Returns the end of the run's first step after `after_s`; None for its last step, and outside of runs."""
        if self._timer is None or len(self._ends_s) == 1:
            return None
        place = bisect_right(self._ends_s, after_s)
        return self._ends_s[place] if place + 1 < len(self._ends_s) else None

    def _turn(self) -> None:
        self._computing = True  # calls posted by calls wait for the next turn of this loop
        self._before_change()
        while True:
            inbox, self._inbox = self._inbox, []
            for call in inbox:
                call()
            self._since_s, self._num_ended = self._node.sim.now_s, 0
            self._ends_s = self._begin()
            if self._ends_s:
                self._timer = self._start()
                return
            if not self._inbox:
                self._computing = False
                return

    def _start(self) -> Timer | SharedWork:
        if self._start_shared is None:
            return self._node.at(self._ends_s[-1], self._finish)
        assert len(self._ends_s) == 1
        return self._start_shared(self._ends_s[0] - self._since_s, self._end_shared)

    def _end_shared(self) -> None:
        self._ends_s = [self._node.sim.now_s]
        self._node.post(self._finish)

    @property
    def elapsed_s(self) -> float:
        """Time that the step took which has just ended."""
        return self._ends_s[-1] - self._since_s

    def _finish(self) -> None:
        self._before_change()
        self._timer = None
        self.busy_s += self._ends_s[-1] - self._since_s
        self._end(len(self._ends_s) - self._num_ended)
        self._turn()
