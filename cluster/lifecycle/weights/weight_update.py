"""Updates the weights of a deployment: prepared at every worker, then put in force.

Until every worker has read and checked the new weights, nothing changes: the first that cannot ends the update, and the
old ones serve on everywhere. Once all have, the update is decided: workers pause side by side, and one that fails then
is replaced by one that loads the new weights. Pages carry their weights in their hashes and layouts, so that workers of
two versions never exchange one, however their pauses overlap.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from cluster.lifecycle.progress import ProgressStream
from cluster.pools.pool import Incarnation
from cluster.pools.weight_change import ApplyWeights, DiscardWeights, PrepareWeights, WeightChange
from penstock.config import LoadedWeightsConfig
from penstock.errors import PenstockError
from penstock.types import PauseMode

log = logging.getLogger(__name__)

WAIT_S = 60.0  # for which `wait` lets requests run, unless the caller says how long


class WeightsStage(StrEnum):
    """The present stage of an update."""

    PREPARING = "preparing"
    APPLYING = "applying"
    DONE = "done"
    FAILED = "failed"


ENDED = (WeightsStage.DONE, WeightsStage.FAILED)


@dataclass(frozen=True, slots=True)
class WeightsProgress:
    """The state of an update at one moment."""

    stage: WeightsStage = WeightsStage.PREPARING
    num_workers: int = 0  # that it began with
    num_prepared: int = 0
    num_updated: int = 0
    elapsed_s: float = 0.0
    detail: str = ""  # why it failed, or which workers are replaced


@dataclass(frozen=True, slots=True)
class WeightsPlan:
    weights: LoadedWeightsConfig
    mode: PauseMode = PauseMode.WAIT
    timeout_s: float = WAIT_S


class WeightFleet(Protocol):
    """The part of the deployment that an update sees and changes. Implemented by `WeightsService`."""

    def outdated(self, version: int, *, answering: bool) -> Sequence[Incarnation]:
        """Returns the workers that serve with weights of an older version; only those that answer, if so asked."""
        ...

    async def change(self, incarnation: Incarnation, change: WeightChange) -> None:
        """Raises PenstockError; a worker at which weights could not be put in force is lost and replaced."""
        ...

    def decide(self, weights: LoadedWeightsConfig) -> None:
        """From now on every worker that starts loads these weights."""
        ...

    def replace(self, incarnation: Incarnation, reason: str) -> None:
        """Ends a worker and starts another one in its place."""
        ...


class WeightUpdate:
    """The update of a plan. `run` completes it or leaves everything as it was."""

    def __init__(self, plan: WeightsPlan, fleet: WeightFleet, *, decided: bool = False) -> None:
        """`decided` continues an update that an earlier controller had decided."""
        self.plan = plan
        self._fleet = fleet
        self._decided = decided
        self._began_s = time.monotonic()
        self._stream = ProgressStream(WeightsProgress(), lambda progress: progress.stage in ENDED)

    @property
    def progress(self) -> WeightsProgress:
        return self._stream.latest

    @property
    def is_over(self) -> bool:
        return self.progress.stage in ENDED

    def follow(self) -> AsyncIterator[WeightsProgress]:
        """Yields the progress now and after each change, until the end."""
        return self._stream.follow()

    async def run(self) -> None:
        try:
            await self._run()
        except asyncio.CancelledError:
            self._update(stage=WeightsStage.FAILED, detail="the deployment stops")
            raise

    async def _run(self) -> None:
        version = self.plan.weights.version
        workers = list(self._fleet.outdated(version, answering=True))
        self._update(num_workers=len(workers))
        failures = await self._at_all(workers, PrepareWeights(self.plan.weights), "num_prepared")
        if failures and not self._decided:
            await asyncio.gather(*(self._discard(worker) for worker in workers))
            self._update(stage=WeightsStage.FAILED, detail=_describe(failures))
            return
        self._fleet.decide(self.plan.weights)
        self._update(stage=WeightsStage.APPLYING)
        ready = [worker for worker in workers if worker not in failures]
        failures |= await self._at_all(ready, ApplyWeights(self.plan.mode, self.plan.timeout_s), "num_updated")
        for worker in self._fleet.outdated(version, answering=False):
            failures.setdefault(worker, "it did not answer")
            self._fleet.replace(worker, f"it has not the weights of version {version}")
        replaced = f"replaced, which load the new weights: {_describe(failures)}" if failures else ""
        self._update(stage=WeightsStage.DONE, detail=replaced)

    async def _at_all(
        self, workers: Sequence[Incarnation], change: WeightChange, counter: str
    ) -> dict[Incarnation, str]:
        """Changes all workers side by side, and counts those done. Returns why the others failed."""
        failures: dict[Incarnation, str] = {}

        async def change_one(worker: Incarnation) -> None:
            try:
                await self._fleet.change(worker, change)
            except PenstockError as error:
                failures[worker] = error.message
            else:
                self._update(**{counter: getattr(self.progress, counter) + 1})

        await asyncio.gather(*map(change_one, workers))
        return failures

    async def _discard(self, worker: Incarnation) -> None:
        try:
            await self._fleet.change(worker, DiscardWeights())
        except PenstockError as error:
            log.info("%s keeps prepared weights in memory: %s", worker.worker_id, error.message)

    def _update(self, **changes: Any) -> None:
        elapsed_s = time.monotonic() - self._began_s
        self._stream.update(replace(self.progress, elapsed_s=elapsed_s, **changes))


def _describe(failures: dict[Incarnation, str]) -> str:
    return "; ".join(f"{worker.worker_id}: {reason}" for worker, reason in failures.items())
