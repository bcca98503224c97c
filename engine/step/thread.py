"""Computes steps off the step loop, which keeps taking calls: one thread, and on a GPU a second one that waits for it.

Steps are computed in the order in which they were given. The outcome of each is posted to the step loop as a call. A
step that awaits tokens of a failed step is not computed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from engine.step.compute import StepTokens
from penstock.errors import Cancelled, PenstockError

_Job = Callable[[], None]
_OnDone = Callable[[StepTokens | PenstockError], None]
_ALIVE_CHECK_S = 1.0  # how often `drain` checks that the thread is alive


class PendingTokens(Protocol):
    """The tokens of a step that the device has been given; `engine.step.compute.SampledTokens`."""

    def wait(self) -> StepTokens: ...


PendingT = TypeVar("PendingT", bound=PendingTokens)


class StepThread(Generic[PendingT]):
    """The owner calls it on the step loop."""

    def __init__(self, name: str, post: Callable[[_Job], None], is_async: bool) -> None:
        """`post` runs a call on the step loop. `is_async`: the device computes on after a step was given to it."""
        self._post = post
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._jobs, post), name=f"{name} steps", daemon=True)
        self._waits: queue.SimpleQueue[_Job | None] | None = None
        if is_async:
            self._waits = queue.SimpleQueue()
            self._waiter = threading.Thread(target=_serve, args=(self._waits, post), name=f"{name} tokens", daemon=True)
            self._waiter.start()
        self._previous: PendingT | None = None
        self._failed = False
        self._thread.start()

    def start(
        self,
        compute: Callable[[PendingT | None], PendingT],
        on_done: _OnDone,
        is_ahead: bool,
        compute_discarded: _Job = lambda: None,
    ) -> None:
        """Computes a step on the thread. Never blocks.

        `on_done` receives the sampled tokens or the error, on the step loop and in the order of steps. With `is_ahead`
        the step awaits the one given before it, which is passed to `compute`; if that one failed, `compute_discarded`
        is called instead.
        """

        def run() -> None:
            if is_ahead and self._failed:
                compute_discarded()
                self._after_waits(lambda: on_done(Cancelled("the step before it failed")))
                return
            self._failed = False
            try:
                pending = self._previous = compute(self._previous if is_ahead else None)
            except PenstockError as error:
                self._failed, problem = True, error
                self._after_waits(lambda: on_done(problem))
                return
            if self._waits is not None:
                self._waits.put(lambda: self._wait(pending, on_done))
            else:
                self._wait(pending, on_done)

        self._jobs.put(run)

    def _wait(self, pending: PendingT, on_done: _OnDone) -> None:
        tokens = pending.wait()
        self._post(lambda: on_done(tokens))

    def _after_waits(self, call: _Job) -> None:
        """Posts `call` behind the outcomes of earlier steps, which the device may still be computing."""
        if self._waits is not None:
            self._waits.put(lambda: self._post(call))
        else:
            self._post(call)

    def drain(self) -> None:
        """Blocks until every given step is computed, or the thread has died of one."""
        drained = threading.Event()
        self._jobs.put(drained.set)
        while not drained.wait(_ALIVE_CHECK_S) and self._thread.is_alive():
            pass

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Ends after the steps in progress. Blocks; False if they did not end in time."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._waits is not None:
            self._waits.put(None)
            self._waiter.join(timeout_s)
        return not self._thread.is_alive()


def _serve(jobs: queue.SimpleQueue[_Job | None], post: Callable[[_Job], None]) -> None:
    try:
        while (job := jobs.get()) is not None:
            job()
    except BaseException as error:
        fatal = error  # an except clause's own name is unbound by the time the call runs

        def fail() -> None:
            raise fatal

        post(fail)
