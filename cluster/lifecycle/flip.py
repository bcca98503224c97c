"""Flips one worker into the other pool: the worker is drained, then the same process serves in its new role.

To the controller a flip is the process of the new worker: starting it drains the old worker and takes its process over.
If that fails, the new worker is lost before it was ready and is started again like any other. No Ray.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from cluster.controller.supervised_process import OnUnplaced, Started, SupervisedProcess
from cluster.lifecycle.drain import Drain, DrainProgress
from cluster.lifecycle.progress import ProgressStream
from cluster.pools.pool import Incarnation
from cluster.pools.weight_change import WeightChange
from penstock.errors import Unavailable
from penstock.types import Member


class FlipStage(StrEnum):
    """The present stage of a flip."""

    DRAINING = "draining"
    FLIPPING = "flipping"
    READY = "ready"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class FlipProgress:
    """The state of a flip at one moment."""

    stage: FlipStage = FlipStage.DRAINING
    drain: DrainProgress = field(default_factory=DrainProgress)
    flip_s: float = 0.0  # from empty to ready
    detail: str = ""

    @property
    def is_last(self) -> bool:
        return self.stage in (FlipStage.READY, FlipStage.FAILED)


class RoleFlip:
    """A `SupervisedProcess` that is taken from another worker."""

    def __init__(
        self,
        target: Incarnation,
        drain: Drain,
        patience_s: float,
        take: Callable[[], Awaitable[SupervisedProcess | None]],
    ) -> None:
        """`take` returns the drained worker's process and ends its supervision; None if the process is gone."""
        self.target = target
        self.source: Member = drain.member
        self.patience_s = patience_s
        self._drain = drain
        self._take = take
        self._process: SupervisedProcess | None = None
        self._empty_s = 0.0
        self._stream = ProgressStream(FlipProgress(), lambda progress: progress.is_last)

    @property
    def progress(self) -> FlipProgress:
        return self._stream.latest

    @property
    def process(self) -> SupervisedProcess:
        """The process that has changed its role."""
        assert self._process is not None
        return self._process

    @property
    def is_over(self) -> bool:
        return self.progress.is_last

    async def place(self, on_unplaced: OnUnplaced) -> None:
        """Does nothing: the process has its place already."""

    async def start(self) -> Started:
        following = asyncio.create_task(self._follow_drain())
        try:
            await self._drain.run()
        finally:
            following.cancel()
        self._empty_s = time.monotonic()
        self._update(stage=FlipStage.FLIPPING, drain=self._drain.progress)
        process = await self._take_process()
        if process is None:
            raise Unavailable(f"{self.source.worker_id} ended during its drain")
        return await process.flip(self.target)

    async def _take_process(self) -> SupervisedProcess | None:
        self._process = self._process or await self._take()
        self._drain.end()
        return self._process

    async def _follow_drain(self) -> None:
        async for progress in self._drain.follow():
            self._update(drain=progress)

    async def watch(self, *listeners: Any) -> str:
        return await self.process.watch(*listeners)

    async def flip(self, incarnation: Incarnation) -> Started:
        return await self.process.flip(incarnation)

    async def change_weights(self, change: WeightChange) -> Started:
        return await self.process.change_weights(change)

    async def stop(self, grace_s: float = 0.0) -> None:
        if (process := await self._take_process()) is not None:
            await process.stop(grace_s)

    async def distrust(self) -> None:
        await self.process.distrust()

    async def kill(self) -> None:
        if (process := await self._take_process()) is not None:
            await process.kill()

    def finish(self) -> None:
        """Marks the flip as done: the new worker is a member."""
        self._update(stage=FlipStage.READY, flip_s=time.monotonic() - self._empty_s)

    def fail(self, reason: str) -> None:
        """Marks the flip as failed: the new worker was lost before it was ready."""
        self._update(stage=FlipStage.FAILED, detail=reason)

    def follow(self) -> AsyncIterator[FlipProgress]:
        """Yields the progress now and after each change, until the end."""
        return self._stream.follow()

    def _update(self, **changes: Any) -> None:
        self._stream.update(replace(self.progress, **changes))
