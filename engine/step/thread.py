"""Computes steps outside the step loop, which keeps taking calls. One thread computes; on a GPU a second one waits for
the device.

Steps are computed in the order in which they were given. Each outcome is posted to the step loop as a call. A step that
awaits tokens of a failed step is not computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from engine.step.compute import StepTokens
from engine.step.job_thread import JobThread
from penstock.errors import Cancelled, PenstockError

_Job = Callable[[], None]
_OnDone = Callable[[StepTokens | PenstockError], None]


class PendingTokens(Protocol):
    """The tokens of a launched step. Implemented by `engine.step.compute.SampledTokens`."""

    def wait(self) -> StepTokens: ...


PendingT = TypeVar("PendingT", bound=PendingTokens)
ForwardT = TypeVar("ForwardT")


class ForwardInProgress(Generic[ForwardT]):
    """A step given to the device before the text that its sampling needs is known. Only `StepThread` uses it."""

    def __init__(self) -> None:
        self.forwarded: ForwardT | None = None  # None until it is computed, and if that has failed


class StepThread(Generic[PendingT]):
    """Computes steps in order. Call it only on the step loop."""

    def __init__(
        self, name: str, post: Callable[[_Job], None], is_async: bool, device_thread: JobThread | None = None
    ) -> None:
        """`post` runs a call on the step loop. With `is_async`, the device keeps computing after a step was given to
        it. `device_thread` computes the steps and outlives this object; without it, this object starts its own thread.
        """
        self._post = post
        self._own = device_thread is None
        self._jobs = device_thread or JobThread(f"{name} steps")
        self._waits = JobThread(f"{name} tokens") if is_async else None
        self._is_dead = False  # set by an unexpected error, which ends the loop; nothing more is computed
        self._previous: PendingT | None = None
        self._failed = False

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
                self._fail(error, on_done)
                return
            self._bring_back(pending, on_done)

        self._jobs.post(lambda: self._guard(run))

    def start_forward(
        self, forward: Callable[[PendingT | None], ForwardT], on_done: _OnDone, compute_discarded: _Job
    ) -> ForwardInProgress[ForwardT]:
        """Computes a step up to its logits on the thread, ahead of the tokens of the step before, which is passed to
        `forward`. `start_sampling` must follow. Never blocks; `on_done` receives only errors, as in `start`."""
        step: ForwardInProgress[ForwardT] = ForwardInProgress()

        def run() -> None:
            if self._failed:
                compute_discarded()
                self._after_waits(lambda: on_done(Cancelled("the step before it failed")))
                return
            try:
                step.forwarded = forward(self._previous)
            except PenstockError as error:
                self._fail(error, on_done)

        self._jobs.post(lambda: self._guard(run))
        return step

    def start_sampling(
        self, step: ForwardInProgress[ForwardT], sample: Callable[[ForwardT], PendingT], on_done: _OnDone
    ) -> None:
        """Samples a step that `start_forward` began; does nothing if that has failed. Otherwise as `start`."""

        def run() -> None:
            if step.forwarded is None:
                return
            try:
                pending = self._previous = sample(step.forwarded)
            except PenstockError as error:
                self._fail(error, on_done)
                return
            self._bring_back(pending, on_done)

        self._jobs.post(lambda: self._guard(run))

    def _fail(self, error: PenstockError, on_done: _OnDone) -> None:
        self._failed = True
        self._after_waits(lambda: on_done(error))

    def _bring_back(self, pending: PendingT, on_done: _OnDone) -> None:
        """Posts the tokens once they are on the host."""
        if self._waits is not None:
            self._waits.post(lambda: self._guard(lambda: self._wait(pending, on_done)))
        else:
            self._wait(pending, on_done)

    def _wait(self, pending: PendingT, on_done: _OnDone) -> None:
        tokens = pending.wait()
        self._post(lambda: on_done(tokens))

    def _after_waits(self, call: _Job) -> None:
        """Posts `call` after the outcomes of earlier steps, which the device may still be computing."""
        if self._waits is not None:
            self._waits.post(lambda: self._post(call))
        else:
            self._post(call)

    def _guard(self, job: _Job) -> None:
        if self._is_dead:
            return
        try:
            job()
        except BaseException as error:
            self._is_dead, fatal = True, error  # an except clause's own name is unbound by the time the call runs

            def fail() -> None:
                raise fatal

            self._post(fail)

    def drain(self) -> None:
        """Blocks until every given step is computed, or the thread has ended."""
        self._jobs.drain()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Ends after the steps in progress. Blocks; False if they did not end in time."""
        if self._own:
            is_over = self._jobs.close(timeout_s)
        else:
            over = threading.Event()
            self._jobs.post(over.set)
            is_over = over.wait(timeout_s)
        return (self._waits is None or self._waits.close(timeout_s)) and is_over
