"""Runs the thread that owns a worker's state: calls posted from outside run first, then one step, and so on.

Everything a worker holds (scheduler, page pool, requests) is touched only on this thread, so it needs no locks. The
thread blocks while there is nothing to do. A posted call wakes it at once, and it also wakes at the time that the last
sweep returned, so deadlines are handled whether or not there is work.

A step may give its computing to another thread (`run_beside`). Until that has ended, only calls run that leave alone
what it reads, such as those of pages that are pulled (`post_beside`).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

log = logging.getLogger(__name__)

_Call = Callable[[], None]
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class _Posted:
    call: _Call
    is_beside: bool  # whether it may run while a step computes


class StepLoop:
    """Runs `step` as long as it returns True (it did work), and otherwise waits for the next posted call."""

    def __init__(
        self,
        name: str,
        step: Callable[[], bool],
        on_fatal: Callable[[BaseException], None],
        sweep: Callable[[float], float | None] = lambda now_s: None,
    ) -> None:
        """`sweep` is called with the monotonic time after every step, and at the latest at the time it last returned.

        `on_fatal` receives, on this thread, an error that escaped any of these or a posted call; the loop then ends.
        """
        self._step = step
        self._sweep = sweep
        self._on_fatal = on_fatal
        self._inbox: queue.SimpleQueue[_Posted | None] = queue.SimpleQueue()
        self._deferred: deque[_Posted | None] = deque()  # taken from the inbox while a step computed
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, call: _Call) -> None:
        """Runs `call` on the loop's thread before its next step. Any thread may call this; it never blocks."""
        self._inbox.put(_Posted(call, is_beside=False))

    def post_beside(self, call: _Call) -> None:
        """Does the same, but also runs `call` while a step computes on another thread, before calls posted earlier."""
        self._inbox.put(_Posted(call, is_beside=True))

    def run_beside(self, start: Callable[[_Call], None], compute: Callable[[], ResultT]) -> ResultT:
        """Computes on another thread, to which `start` gives a job, and returns the result. Runs the calls of
        `post_beside` meanwhile. Call it in a step. Raises what `compute` raises.
        """
        outcome: Future[ResultT] = Future()

        def job() -> None:
            try:
                outcome.set_result(compute())
            except BaseException as error:
                outcome.set_exception(error)
            self.post_beside(lambda: None)  # wakes the loop

        start(job)
        while not outcome.done():
            posted = self._inbox.get()  # no deadline: the job ends it
            if posted is not None and posted.is_beside:
                posted.call()
            else:
                self._deferred.append(posted)
        return outcome.result()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Ends the loop after the step in progress. Blocks; False if the thread did not end in time."""
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            idle, due_s = False, None
            while self._drain(idle, due_s):
                idle = not self._step()
                now_s = time.monotonic()
                if due_s is not None and now_s >= due_s:
                    idle = False  # the next step acts on what the sweep did
                due_s = self._sweep(now_s)
        except BaseException as error:
            log.exception("the step loop failed")
            self._on_fatal(error)

    def _drain(self, wait: bool, due_s: float | None) -> bool:
        """Runs every posted call; with `wait`, blocks for the first until `due_s`. False once the loop must end."""
        timeout_s = None if due_s is None else max(0.0, due_s - time.monotonic())
        try:
            posted = self._deferred.popleft() if self._deferred else self._inbox.get(block=wait, timeout=timeout_s)
            while posted is not None:
                posted.call()
                posted = self._deferred.popleft() if self._deferred else self._inbox.get_nowait()
            return False
        except queue.Empty:
            return True
