"""Runs the prefix index's clean-up, one bounded piece at a time between the event loop's other work."""

from __future__ import annotations

import asyncio
import time

from router.routing.index.prefix_index import PrefixIndex


class IndexTidyRunner:
    """Tidies when woken after a worker has left, and every `every_s` for pages noted for silent workers."""

    def __init__(self, index: PrefixIndex, every_s: float) -> None:
        self._index = index
        self._every_s = every_s
        self._woken = asyncio.Event()

    def wake(self) -> None:
        self._woken.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            more = self._index.tidy(time.monotonic())
            await (asyncio.sleep(0) if more else self._wait())

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._every_s):
                await self._woken.wait()
        except TimeoutError:
            return  # noted pages may have expired
        self._woken.clear()
