"""Threads for work before admission, such as parsing and tokenizing: callers take turns, and the queue is bounded.

A caller is a tenant. The caller that was served least, by the size of its work, goes next; when the queue is full, the
newest work of the caller with the most queued work is refused. Work is dropped if its caller stops waiting before its
turn.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from penstock.errors import Overloaded
from router.admission.fairness import FairCounters

ResultT = TypeVar("ResultT")
Args = ParamSpec("Args")

_RETRY_AFTER_S = 1.0
_SMALLEST = 1024  # characters that each piece of work counts for at least

Turn = asyncio.Future[None]


class FairThreads:
    """Serves one event loop. Owns its threads; `close` drops what is queued."""

    def __init__(self, name: str, num_threads: int, max_queued: int) -> None:
        """`name` names the work in errors; `max_queued` bounds the queued sizes, in characters or bytes of text."""
        self._name = name
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_idle = num_threads
        self._max_queued = max_queued
        self._queues: dict[str, OrderedDict[Turn, int]] = {}  # by caller: its queued turns, with their sizes
        self._sizes: dict[str, int] = {}  # by caller: the sum of its queued sizes
        self._served = FairCounters[str]()
        self.num_queued = 0

    async def run(
        self, caller: str, size: int, work: Callable[Args, ResultT], *args: Args.args, **kwargs: Args.kwargs
    ) -> ResultT:
        """Runs `work` on a thread when it is the caller's turn. Raises Overloaded, or what `work` raises."""
        await self._wait_turn(caller, max(size, _SMALLEST))
        loop = asyncio.get_running_loop()
        try:
            running = loop.run_in_executor(self._threads, lambda: work(*args, **kwargs))
        except BaseException:
            self._give_turn()
            raise
        running.add_done_callback(self._on_done)
        return await asyncio.shield(running)  # a thread cannot be stopped, so the turn ends with the work

    def submit(self, work: Callable[[], object]) -> None:
        """Runs `work` as soon as a thread is free, without a turn and without waiting for it."""
        self._threads.submit(work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _wait_turn(self, caller: str, size: int) -> None:
        self._served.activate(caller)
        if self._num_idle:
            self._num_idle -= 1
            self._served.serve(caller, size)
            self._served.deactivate(caller)
            return
        self._make_room(caller, size)
        turn: Turn = asyncio.get_running_loop().create_future()
        self._queues.setdefault(caller, OrderedDict())[turn] = size
        self._sizes[caller] = self._sizes.get(caller, 0) + size
        self.num_queued += 1
        try:
            await turn  # bounded by the caller's deadline
        except BaseException:
            if turn in self._queues.get(caller, ()):
                self._remove(caller, turn)
            elif not turn.cancelled() and turn.exception() is None:
                self._give_turn()  # the turn came at the moment when the caller stopped waiting
            raise

    def _make_room(self, caller: str, size: int) -> None:
        """Refuses queued work until `size` more fits. Raises Overloaded if the caller itself has the most queued."""
        while sum(self._sizes.values()) + size > self._max_queued:
            largest = max(self._sizes, key=self._sizes.__getitem__, default=caller)
            if self._sizes.get(caller, 0) + size >= self._sizes.get(largest, 0):
                if caller not in self._queues:
                    self._served.deactivate(caller)
                raise self._full()
            newest = next(reversed(self._queues[largest]))
            self._remove(largest, newest)
            if not newest.done():
                newest.set_exception(self._full())

    def _full(self) -> Overloaded:
        problem = f"{self._name}: the queue is full (limits.text_queue_characters = {self._max_queued}); try again"
        return Overloaded(problem, _RETRY_AFTER_S * random.uniform(1.0, 2.0))

    def _remove(self, caller: str, turn: Turn) -> None:
        self._sizes[caller] -= self._queues[caller].pop(turn)
        self.num_queued -= 1
        if not self._queues[caller]:
            del self._queues[caller], self._sizes[caller]
            self._served.deactivate(caller)

    def _on_done(self, running: asyncio.Future[ResultT]) -> None:
        if not running.cancelled():
            running.exception()  # retrieves it, since the caller may have stopped waiting
        self._give_turn()

    def _give_turn(self) -> None:
        """Gives a thread that has become free to the next caller."""
        self._num_idle += 1
        while self._queues and self._num_idle:
            caller = min(self._queues, key=self._served.__getitem__)
            turn, size = next(iter(self._queues[caller].items()))
            if not turn.done():  # done: the caller has just stopped waiting
                self._num_idle -= 1
                self._served.serve(caller, size)
                turn.set_result(None)
            self._remove(caller, turn)
