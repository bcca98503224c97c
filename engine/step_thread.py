"""Computes steps off the step loop, which takes calls meanwhile: one thread, and on a GPU one more that waits for it.

Steps are computed in the order in which they were given. What one comes to is posted back to the loop, as a call. A
step that awaits tokens of one that failed is not computed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from engine.drawing import StepTokens
from penstock.errors import Cancelled, PenstockError

_Job = Callable[[], None]
_LOOK_S = 1.0  # whether a thread lives


class Pending(Protocol):
    """A step that the device has been given."""

    def wait(self) -> StepTokens: ...


PendingT = TypeVar("PendingT", bound=Pending)


class StepThread(Generic[PendingT]):
    """Owned by whoever drives the steps, who calls it on the step loop."""

    def __init__(self, name: str, post: Callable[[_Job], None], waits: bool) -> None:
        """`post` runs a call on the step loop. `waits`: the device goes on computing when a step was given to it."""
        self._post = post
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._jobs, post), name=f"{name} steps", daemon=True)
        self._collecting: queue.SimpleQueue[_Job | None] | None = None
        if waits:
            self._collecting = queue.SimpleQueue()
            self._collector = threading.Thread(
                target=_serve, args=(self._collecting, post), name=f"{name} tokens", daemon=True
            )
            self._collector.start()
        self._before: PendingT | None = None
        self._failed = False
        self._thread.start()

    def start(
        self,
        compute: Callable[[PendingT | None], PendingT],
        on_done: Callable[[StepTokens | PenstockError], None],
        is_ahead: bool,
        compute_in_vain: _Job = lambda: None,
    ) -> None:
        """`on_done` hears, on the step loop and in the order of steps, what the step has drawn or why it failed.
        `is_ahead`: it awaits the step given before it, which `compute` takes; where that has failed, `compute_in_vain`
        is called. Never blocks."""

        def run() -> None:
            if is_ahead and self._failed:
                compute_in_vain()
                self._tell(on_done, Cancelled("the step before it failed"))
                return
            self._failed = False
            try:
                pending = self._before = compute(self._before if is_ahead else None)
            except PenstockError as error:
                self._failed = True
                self._tell(on_done, error)
                return
            if self._collecting is not None:
                self._collecting.put(lambda: self._collect(pending, on_done))
            else:
                self._collect(pending, on_done)

        self._jobs.put(run)

    def _collect(self, pending: PendingT, on_done: Callable[[StepTokens | PenstockError], None]) -> None:
        tokens = pending.wait()
        self._post(lambda: on_done(tokens))

    def _tell(self, on_done: Callable[[StepTokens | PenstockError], None], error: PenstockError) -> None:
        """After what is told of the steps before it, which the device may be computing still."""
        if self._collecting is not None:
            self._collecting.put(lambda: self._post(lambda: on_done(error)))
        else:
            self._post(lambda: on_done(error))

    def drain(self) -> None:
        """Blocks until every step that was given is computed, or the thread has died of one."""
        drained = threading.Event()
        self._jobs.put(drained.set)
        while not drained.wait(_LOOK_S) and self._thread.is_alive():
            pass

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Ends after the steps in progress. Blocks; False where they did not end in time."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._collecting is not None:
            self._collecting.put(None)
            self._collector.join(timeout_s)
        return not self._thread.is_alive()


def _serve(jobs: queue.SimpleQueue[_Job | None], post: Callable[[_Job], None]) -> None:
    try:
        while (job := jobs.get()) is not None:
            job()
    except BaseException as error:
        fatal = error  # the name of an except clause is gone when the call runs

        def fail() -> None:
            raise fatal

        post(fail)
