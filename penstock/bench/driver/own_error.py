"""Measures the generator itself: how late requests were sent, and for how long its event loop was kept from reading."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

_PERIOD_S = 0.01


class GeneratorLag:
    """Samples by how much a timer of the event loop is late: pieces that arrive meanwhile seem to arrive later."""

    def __init__(self) -> None:
        self.lags_s: list[float] = []
        self._task: asyncio.Task[None] | None = None

    async def _sample(self) -> None:
        while True:
            begun_s = time.perf_counter()
            await asyncio.sleep(_PERIOD_S)
            self.lags_s.append(max(0.0, time.perf_counter() - begun_s - _PERIOD_S))

    async def __aenter__(self) -> GeneratorLag:
        self._task = asyncio.create_task(self._sample())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collects garbage before and after, but not during a run: a collection would stop the loop for milliseconds."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
        gc.collect()
