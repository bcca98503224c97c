"""Works off what the prefix index has to forget, a piece at a time between the event loop's other work."""

from __future__ import annotations

import asyncio
import time

from router.prefix_index import PrefixIndex


class IndexKeeper:
    """`wake` when a worker has left; what was noted of silent workers it forgets by itself, every so often."""

    def __init__(self, index: PrefixIndex, every_s: float) -> None:
        self._index = index
        self._every_s = every_s
        self._woken = asyncio.Event()

    def wake(self) -> None:
        self._woken.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            more = self._index.tidy(time.monotonic())
            await (asyncio.sleep(0) if more else self._wait())

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._every_s):
                await self._woken.wait()
        except TimeoutError:
            return  # notes have aged
        self._woken.clear()
