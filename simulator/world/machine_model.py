"""Models the machine below the workers: cores that steps share, and spells in which a worker is slower or faster.

A deployment without such costs has neither: each worker computes on hardware of its own, in the time that it costs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial

from simulator.costs.machine import SharedCores, StepKind, StepSpread
from simulator.world.virtual_time import Callback, Simulation, Timer


class SharedWork:
    """Work of some threads: a step, or that of a router or client on a request or a message."""

    __slots__ = ("left_s", "num_threads", "on_end", "since_s", "slowness", "timer")

    def __init__(self, left_s: float, num_threads: float, on_end: Callback, now_s: float) -> None:
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
        self._router, self._client = SerialThread(self), SerialThread(self)

    def start(self, work_s: float, num_threads: float, on_end: Callback) -> SharedWork:
        """Begins work that takes `work_s` on cores of its own; `on_end` runs when it is done."""
        work = SharedWork(work_s, num_threads, on_end, self._sim.now_s)
        self._works[work] = None
        self._set_ends()
        return work

    def start_step(self, work_s: float, kind: StepKind, on_end: Callback) -> SharedWork:
        """Begins a worker's step."""
        return self.start(work_s, self._costs.step_threads(kind), on_end)

    @property
    def request_s(self) -> float:
        """Processor time of a request before it is placed."""
        return self._costs.client.request_s + self._costs.router.request_s

    def take_request(self, on_end: Callback) -> None:
        """Begins the work of a client and then of a router on a request before it is placed."""
        client, router = self._costs.client, self._costs.router
        self._client.take(client.request_s, lambda: self._router.take(router.request_s, on_end))

    def handle_frame(self, num_sequences: int) -> None:
        """Lets routers and then clients handle a worker's message. It does not delay the message."""
        router_s, client_s = (
            thread.frame_s + num_sequences * thread.token_s for thread in (self._costs.router, self._costs.client)
        )
        self._router.take(router_s, lambda: self._client.take(client_s, lambda: None))

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


class SerialThread:
    """A thread that does its work in order. All routers of a deployment share one, and so do all clients."""

    def __init__(self, cores: CoresModel) -> None:
        self._cores = cores
        self._waiting: deque[tuple[float, Callback]] = deque()  # the first is in flight

    def take(self, work_s: float, on_end: Callback) -> None:
        """Does some work after all that it was given before, and then runs `on_end`."""
        self._waiting.append((work_s, on_end))
        if len(self._waiting) == 1:
            self._cores.start(work_s, 1, self._end)

    def _end(self) -> None:
        _, on_end = self._waiting.popleft()
        if self._waiting:
            self._cores.start(self._waiting[0][0], 1, self._end)
        on_end()


class MachineModel:
    """The machine of a deployment. `cores` is None if each worker has cores of its own."""

    def __init__(self, sim: Simulation, cores: SharedCores | None = None, spread: StepSpread | None = None) -> None:
        self.cores = None if cores is None else CoresModel(sim, cores)
        self._sim = sim
        self._spread = spread
        self._spells: dict[str, tuple[int, float]] = {}  # by worker: number and share of its present spell

    def step_starter(self, kind: Callable[[], StepKind]) -> Callable[[float, Callback], SharedWork] | None:
        """Returns what begins a worker's step, of the present `kind`, on shared cores; None without such cores."""
        cores = self.cores
        return None if cores is None else lambda work_s, on_end: cores.start_step(work_s, kind(), on_end)

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
