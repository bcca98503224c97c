"""Owns asyncio tasks that run in the background, so that no task outlives its owner.

The event loop refers to a running task only weakly; without an owner it can be collected before it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class TaskSet:
    """Keeps every task that it starts until the task ends. Used on the event loop; its owner closes it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Returns how many tasks are running."""
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None], name: str | None = None) -> asyncio.Task[None]:
        """Starts a task and returns it. An exception that ends it is logged by asyncio."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel(self) -> None:
        """Cancels every running task without waiting for it."""
        for task in self._tasks:
            task.cancel()

    async def wait(self) -> None:
        """Returns once every task that runs now has ended, whatever its outcome."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Cancels every running task and returns once all have ended."""
        self.cancel()
        await self.wait()
