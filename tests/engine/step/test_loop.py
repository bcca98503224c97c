"""Tests which posted calls run while a step computes on another thread, and what becomes of its errors."""

from __future__ import annotations

import threading
from collections.abc import Callable

from engine.step.job_thread import JobThread
from engine.step.loop import StepLoop

TIMEOUT_S = 30.0


class Loop:
    """A loop with one step, which runs `compute` beside it."""

    def __init__(self, compute: Callable[[], str]) -> None:
        self.seen: list[str] = []
        self.over = threading.Event()
        self.errors: list[BaseException] = []
        self._compute: Callable[[], str] | None = compute
        self._thread = JobThread("computes")
        self.loop = StepLoop("test", self._step, self._on_fatal)

    def _step(self) -> bool:
        compute, self._compute = self._compute, None
        if compute is not None:
            self.seen.append(self.loop.run_beside(self._thread.post, compute))
        return compute is not None

    def _on_fatal(self, error: BaseException) -> None:
        self.errors.append(error)
        self.over.set()

    def close(self) -> None:
        assert self.loop.stop()
        assert self._thread.close()


def test_only_calls_that_leave_a_step_alone_run_while_it_computes() -> None:
    begun, met = threading.Event(), threading.Event()

    def compute() -> str:
        begun.set()
        assert met.wait(TIMEOUT_S)
        return "step"

    world = Loop(compute)
    world.loop.start()
    assert begun.wait(TIMEOUT_S)
    world.loop.post(lambda: world.seen.append("first"))
    world.loop.post(lambda: world.seen.append("second"))

    def beside() -> None:
        world.seen.append("beside")
        met.set()

    world.loop.post_beside(beside)
    world.loop.post(world.over.set)
    assert world.over.wait(TIMEOUT_S)
    assert world.seen == ["beside", "step", "first", "second"]
    world.close()


def test_a_loop_that_is_stopped_while_a_step_computes_ends_after_it() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def compute() -> str:
        begun.set()
        assert may_end.wait(TIMEOUT_S)
        return "step"

    world = Loop(compute)
    world.loop.start()
    assert begun.wait(TIMEOUT_S)
    assert not world.loop.stop(timeout_s=0.0)
    may_end.set()
    world.close()
    assert world.seen == ["step"]


def test_an_error_of_a_step_beside_the_loop_is_the_steps() -> None:
    def compute() -> str:
        raise MemoryError("too large")

    world = Loop(compute)
    world.loop.start()
    assert world.over.wait(TIMEOUT_S)
    assert [str(error) for error in world.errors] == ["too large"]
    world.close()
