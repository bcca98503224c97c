"""The thread that owns a worker's state: calls posted from outside run first, then one step, then the next.

Everything a worker holds (scheduler, page pool, requests) is touched on this thread alone, so it needs no locks.
Blocks while there is nothing to do; a posted call wakes it at once.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

_Call = Callable[[], None]


class StepLoop:
    """Runs `step` as long as it returns True (it did work), and otherwise waits for the next posted call."""

    def __init__(self, name: str, step: Callable[[], bool], on_fatal: Callable[[BaseException], None]) -> None:
        """`on_fatal` hears, on this thread, of an error that escaped `step` or a posted call; the loop then ends."""
        self._step = step
        self._on_fatal = on_fatal
        self._inbox: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, call: _Call) -> None:
        """Runs `call` on the loop's thread before its next step. From any thread; never blocks."""
        self._inbox.put(call)

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Ends the loop after the step in progress. Blocks; False where the thread did not end in time."""
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            idle = False
            while self._drain(wait=idle):
                idle = not self._step()
        except BaseException as error:
            log.exception("the step loop failed")
            self._on_fatal(error)

    def _drain(self, wait: bool) -> bool:
        """Runs every call that is waiting, after waiting for one where told so; False once the loop must end."""
        try:
            call = self._inbox.get(block=wait)
            while call is not None:
                call()
                call = self._inbox.get_nowait()
            return False
        except queue.Empty:
            return True
