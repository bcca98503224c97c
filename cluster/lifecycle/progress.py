"""Progress of a long operation that any number of callers follow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

Progress = TypeVar("Progress")


class ProgressStream(Generic[Progress]):
    """Holds the latest progress of one operation and streams each change to its followers."""

    def __init__(self, first: Progress, is_last: Callable[[Progress], bool]) -> None:
        self._latest = first
        self._is_last = is_last
        self._changed = asyncio.Event()

    @property
    def latest(self) -> Progress:
        return self._latest

    def update(self, progress: Progress) -> None:
        """Replaces the latest progress and wakes the followers if it differs."""
        if progress != self._latest:
            self._latest = progress
            self._changed.set()
            self._changed = asyncio.Event()

    async def follow(self) -> AsyncIterator[Progress]:
        """Yields the progress now and after each change, until the last. A slow follower skips intermediate states."""
        while True:
            changed, progress = self._changed, self._latest
            yield progress
            if self._is_last(progress):
                return
            if progress is self._latest:
                await changed.wait()
