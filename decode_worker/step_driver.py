"""Keeps the device busy: takes steps from the worker's core, has them computed, and brings back what they draw.

While a step computes, the step loop takes calls: requests come and end, first tokens go out, pages are reserved and
land. On a GPU the next step is scheduled and given to the device meanwhile, where it can be (`schedule_ahead`). On a
CPU it is not: scheduling takes a hundredth of a step there, and whoever arrives during one would miss the next.

Where a model is split between ranks, the others are told of a step when it is given, so that one goes on with the next
without waiting for rank 0. What they were told of they compute: a step that awaits one that has failed is computed in
vain, and nothing else before it is over.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from decode_worker.worker import DecodeWorker
from engine.drawing import Drawn, Known, StepTokens
from engine.engine import Engine
from engine.roster import DecodeRows
from engine.step_plan import StepPlan
from engine.step_thread import StepThread
from penstock.errors import PenstockError

log = logging.getLogger(__name__)


class StepDriver:
    """Owns the steps under way. Every method but `stop` runs on the step loop."""

    def __init__(
        self, worker: DecodeWorker, engine: Engine, name: str, post: Callable[[Callable[[], None]], None]
    ) -> None:
        self._worker = worker
        self._engine = engine
        self._thread: StepThread[Drawn | Known] = StepThread(name, post, waits=engine.kv_pages.is_cuda)
        self._runs_ahead = engine.runs_ahead
        self._under_way: deque[StepPlan[DecodeRows]] = deque()
        self._since_s = 0.0  # the oldest of them is computed since

    def turn(self) -> None:
        """After the calls that have come: what can be computed is given to the device. The end of a step is a call like
        any other."""
        if self._under_way:
            self._worker.take_in()
        else:
            self._since_s = time.monotonic()
            self._start(self._worker.begin())
        if self._runs_ahead and len(self._under_way) == 1:
            plan = self._worker.begin_ahead()
            if plan is not None:
                self._start(plan)

    def _start(self, plan: StepPlan[DecodeRows]) -> None:
        if not plan:
            return
        engine, step, is_ahead = self._engine, self._engine.lay_out(plan), bool(self._under_way)
        self._under_way.append(plan)
        engine.announce(step)
        self._thread.start(
            lambda before: engine.compute(step, before),
            lambda outcome: self._on_done(plan, outcome),
            is_ahead,
            lambda: engine.compute_in_vain(step),
        )

    def _on_done(self, plan: StepPlan[DecodeRows], outcome: StepTokens | PenstockError) -> None:
        if plan not in self._under_way:
            return  # it was to follow one that has failed
        now_s = time.monotonic()
        if isinstance(outcome, PenstockError):
            log.warning("a step failed, and is computed again sequence by sequence: %s", outcome)
            self._thread.drain()  # the step after it
            self._under_way.clear()
            self._worker.scheduler.cancel_ahead()
            self._worker.finish_alone(plan)
            return
        self._under_way.popleft()
        self._worker.finish(plan, outcome, now_s - self._since_s)
        self._since_s = now_s

    def stop(self) -> None:
        """Once the step loop has ended. Blocks."""
        self._thread.stop()
