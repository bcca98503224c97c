"""One worker's way from one pool into the other: it is emptied, then the same process serves in its new role.

To the controller a flip is the process of the worker that comes of it: starting it empties the old one and takes its
process over. Where that fails the new worker is lost before it was ready, and is started afresh like any other. No Ray.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from cluster.drain import Drain, Progress
from cluster.pool import Incarnation
from cluster.supervised import Started, SupervisedProcess
from penstock.errors import Unavailable
from penstock.types import Member


class FlipStage(StrEnum):
    DRAINING = "draining"
    FLIPPING = "flipping"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class FlipProgress:
    stage: FlipStage = FlipStage.DRAINING
    drain: Progress = field(default_factory=Progress)
    flip_s: float = 0.0  # from empty to ready
    detail: str = ""


_ENDED = (FlipStage.READY, FlipStage.FAILED)


class Flip:
    """A `supervised.SupervisedProcess`."""

    def __init__(
        self,
        target: Incarnation,
        drain: Drain,
        patience_s: float,
        take: Callable[[], Awaitable[SupervisedProcess | None]],
    ) -> None:
        """`take` gives the process of the drained worker out of its supervision; None where it is gone."""
        self.target = target
        self.source: Member = drain.member
        self.patience_s = patience_s
        self.progress = FlipProgress()
        self._drain = drain
        self._take = take
        self._process: SupervisedProcess | None = None
        self._empty_s = 0.0
        self._changed = asyncio.Event()

    @property
    def process(self) -> SupervisedProcess:
        """That has changed its role."""
        assert self._process is not None
        return self._process

    @property
    def is_over(self) -> bool:
        return self.progress.stage in _ENDED

    async def place(self) -> None:
        """It has its place already."""

    async def start(self) -> Started:
        following = asyncio.create_task(self._follow_drain())
        try:
            await self._drain.run()
        finally:
            following.cancel()
        self._empty_s = time.monotonic()
        self._tell(stage=FlipStage.FLIPPING, drain=self._drain.progress)
        process = await self._take_process()
        if process is None:
            raise Unavailable(f"{self.source.worker_id} has ended while it was emptied")
        return await process.flip(self.target)

    async def _take_process(self) -> SupervisedProcess | None:
        self._process = self._process or await self._take()
        self._drain.end()
        return self._process

    async def _follow_drain(self) -> None:
        async for progress in self._drain.follow():
            self._tell(drain=progress)

    async def watch(self, *listeners: Any) -> str:
        return await self.process.watch(*listeners)

    async def flip(self, incarnation: Incarnation) -> Started:
        return await self.process.flip(incarnation)

    async def stop(self, grace_s: float = 0.0) -> None:
        if (process := await self._take_process()) is not None:
            await process.stop(grace_s)

    async def kill(self) -> None:
        if (process := await self._take_process()) is not None:
            await process.kill()

    def finish(self) -> None:
        """The new worker is a member."""
        self._tell(stage=FlipStage.READY, flip_s=time.monotonic() - self._empty_s)

    def fail(self, reason: str) -> None:
        """The new worker is lost before it was ready."""
        self._tell(stage=FlipStage.FAILED, detail=reason)

    async def follow(self) -> AsyncIterator[FlipProgress]:
        """The progress now and after each change, until the end."""
        while True:
            changed, progress = self._changed, self.progress
            yield progress
            if progress.stage in _ENDED:
                return
            if progress is self.progress:
                await changed.wait()

    def _tell(self, **changes: Any) -> None:
        self.progress = replace(self.progress, **changes)
        self._changed.set()
        self._changed = asyncio.Event()
