"""Models the machine below the workers: cores that steps share, and spells in which a worker is slower or faster.

A deployment without such costs has neither: each worker computes on hardware of its own, in the time that it costs.
"""

from __future__ import annotations

import math
from functools import partial

from simulator.costs.machine import SharedCores, StepKind, StepSpread
from simulator.world.virtual_time import Callback, Simulation, Timer


class SharedWork:
    """Work of some threads: a step, or a message at routers and clients."""

    __slots__ = ("left_s", "num_threads", "on_end", "since_s", "slowness", "timer")

    def __init__(self, left_s: float, num_threads: int, on_end: Callback, now_s: float) -> None:
        self.left_s = left_s  # on a core of its own, counted from `since_s`
        self.num_threads = num_threads
        self.on_end = on_end
        self.since_s = now_s
        self.slowness = 1.0
        self.timer: Timer | None = None


class CoresModel:
    """Owns the work in flight on one machine, and moves its end whenever the number of busy threads changes.

    The step of a killed worker stays until its time is over.
    """

    def __init__(self, sim: Simulation, costs: SharedCores) -> None:
        self._sim = sim
        self._costs = costs
        self._works: dict[SharedWork, None] = {}
        self._num_frames = 0  # messages that routers and clients handle, in one thread

    def start(self, work_s: float, on_end: Callback) -> SharedWork:
        """Begins a worker's step that takes `work_s` on cores of its own; `on_end` runs when it is done."""
        return self._start(work_s, self._costs.worker_threads, on_end)

    def take_request(self, work_s: float, on_end: Callback) -> None:
        """Begins work on a request before it is placed. Several requests share the cores."""
        self._start(work_s, 1, on_end)

    def handle_frame(self) -> None:
        """Lets routers and clients handle a worker's message after those before. It does not delay the message."""
        self._num_frames += 1
        if self._num_frames == 1:
            self._start(self._costs.frame_s, 1, self._end_frame)

    def _end_frame(self) -> None:
        self._num_frames -= 1
        if self._num_frames:
            self._start(self._costs.frame_s, 1, self._end_frame)

    def _start(self, work_s: float, num_threads: int, on_end: Callback) -> SharedWork:
        work = SharedWork(work_s, num_threads, on_end, self._sim.now_s)
        self._works[work] = None
        self._set_ends()
        return work

    def _end(self, work: SharedWork) -> None:
        del self._works[work]
        self._set_ends()
        work.on_end()

    def _set_ends(self) -> None:
        now_s, num_threads = self._sim.now_s, sum(work.num_threads for work in self._works)
        slowness = self._costs.slowness(num_threads)
        for work in self._works:
            if work.timer is not None:
                if slowness == work.slowness:
                    continue
                work.timer.cancel()
                work.left_s -= (now_s - work.since_s) / work.slowness
            work.since_s, work.slowness = now_s, slowness
            work.timer = self._sim.after(max(0.0, work.left_s) * slowness, partial(self._end, work))


class MachineModel:
    """The machine of a deployment. `cores` is None if each worker has cores of its own."""

    def __init__(self, sim: Simulation, cores: SharedCores | None = None, spread: StepSpread | None = None) -> None:
        self.cores = None if cores is None else CoresModel(sim, cores)
        self._sim = sim
        self._spread = spread
        self._spells: dict[str, tuple[int, float]] = {}  # by worker: number and share of its present spell

    @property
    def is_steady(self) -> bool:
        """Returns whether steps take exactly what they cost."""
        return self._spread is None

    def slowness(self, worker: str, kind: StepKind, at_s: float) -> float:
        """Returns the time of a worker's step that begins then, relative to its cost. Depends on the seed and the time
        only.
        """
        if self._spread is None:
            return 1.0
        number = math.floor(at_s / self._spread.spell_s)
        known = self._spells.get(worker)
        if known is None or known[0] != number:
            known = self._spells[worker] = (number, self._sim.rng(f"spell {worker} {number}").random())
        return self._spread.slowness(kind, known[1])

    def slowed(self, worker: str, kind: StepKind, begin_s: float, steps_s: list[float]) -> list[float]:
        """Returns the times of steps in a row, given what they cost."""
        taken_s = []
        for cost_s in steps_s:
            taken_s.append(cost_s * self.slowness(worker, kind, begin_s))
            begin_s += taken_s[-1]
        return taken_s
