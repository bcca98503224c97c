"""Updates the weights of a deployment: prepared at every worker, then put in force.

Nothing changes until every worker has read and checked the new weights. If one cannot, the update ends and the old ones
stay in force everywhere. Once all have, the update is decided: workers pause side by side, and one that fails then is
replaced by one that loads the new weights. Weights that a trainer broadcasts are received before all this, into each
worker's memory and into the folder of the update. Pages carry their weights in their hashes and layouts, so that
workers of two versions never exchange one, however their pauses overlap.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from cluster.lifecycle.progress import ProgressStream
from cluster.pools.pool import Incarnation
from cluster.pools.weight_change import ApplyWeights, DiscardWeights, PrepareWeights, ReceiveWeights, WeightChange
from penstock.client.broadcast.manifest import BroadcastMember, WeightsBroadcast
from penstock.config import LoadedWeightsConfig
from penstock.errors import CheckpointError, PenstockError
from penstock.types import PauseMode

log = logging.getLogger(__name__)

WAIT_S = 60.0  # for which `wait` lets requests run, unless the caller says how long


class WeightsStage(StrEnum):
    """The present stage of an update."""

    RECEIVING = "receiving"
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
    num_received: int = 0
    num_prepared: int = 0
    num_updated: int = 0
    elapsed_s: float = 0.0
    detail: str = ""  # why it failed, or which workers are replaced


@dataclass(frozen=True, slots=True)
class WeightsPlan:
    weights: LoadedWeightsConfig
    mode: PauseMode = PauseMode.WAIT
    timeout_s: float = WAIT_S
    broadcast: WeightsBroadcast | None = None  # None: the folder holds the weights already


class WeightFleet(Protocol):
    """The part of the deployment that an update sees and changes. Implemented by `WeightsService`."""

    def outdated(self, version: int, *, answering: bool) -> Sequence[Incarnation]:
        """Returns the workers with weights of an older version; if `answering`, only those that answer."""
        ...

    async def digest_of(self, path: str) -> str:
        """Returns the digest of the weights in a folder. Raises CheckpointError."""
        ...

    async def change(self, incarnation: Incarnation, change: WeightChange) -> None:
        """Changes a worker. A worker that cannot put weights in force is lost and replaced. Raises PenstockError."""
        ...

    def decide(self, weights: LoadedWeightsConfig) -> None:
        """Makes these the weights that every worker loads that starts from now on."""
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
        stage = WeightsStage.PREPARING if plan.broadcast is None else WeightsStage.RECEIVING
        self._stream = ProgressStream(WeightsProgress(stage), lambda progress: progress.stage in ENDED)

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
        if self.plan.broadcast is not None and not await self._receive(self.plan.broadcast):
            return
        workers = list(self._fleet.outdated(version, answering=True))
        self._update(stage=WeightsStage.PREPARING, num_workers=len(workers))
        failures = await self._at_all(dict.fromkeys(workers, PrepareWeights(self.plan.weights)), "num_prepared")
        if failures and not self._decided:
            await self._give_up(workers, _describe(failures))
            return
        self._fleet.decide(self.plan.weights)
        self._update(stage=WeightsStage.APPLYING)
        ready = [worker for worker in workers if worker not in failures]
        applying = ApplyWeights(self.plan.mode, self.plan.timeout_s)
        failures |= await self._at_all(dict.fromkeys(ready, applying), "num_updated")
        for worker in self._fleet.outdated(version, answering=False):
            failures.setdefault(worker, "it did not answer")
            self._fleet.replace(worker, f"it has not the weights of version {version}")
        replaced = f"replaced, which load the new weights: {_describe(failures)}" if failures else ""
        self._update(stage=WeightsStage.DONE, detail=replaced)

    async def _receive(self, broadcast: WeightsBroadcast) -> bool:
        """Has every worker receive the weights, and the first write the folder. Returns whether all could."""
        workers = list(self._fleet.outdated(self.plan.weights.version, answering=True))
        if not workers:
            self._update(stage=WeightsStage.FAILED, detail="no worker is ready to receive; broadcast again later")
            return False
        num_ranks, path = len(workers) + 1, self.plan.weights.path
        changes = {
            worker: ReceiveWeights(broadcast, BroadcastMember(rank, num_ranks, path if rank == 1 else ""))
            for rank, worker in enumerate(workers, 1)
        }
        self._update(num_workers=len(workers))
        problem = _describe(await self._at_all(changes, "num_received"))
        if not problem:
            try:
                digest = await self._fleet.digest_of(path)
            except CheckpointError as error:
                problem = f"the controller: {error.message}"
        if problem:
            await self._give_up(workers, problem)
            return False
        self.plan = replace(self.plan, weights=self.plan.weights.model_copy(update={"digest": digest}))
        return True

    async def _give_up(self, workers: Sequence[Incarnation], reason: str) -> None:
        await asyncio.gather(*(self._discard(worker) for worker in workers))
        self._update(stage=WeightsStage.FAILED, detail=reason)

    async def _at_all(self, changes: Mapping[Incarnation, WeightChange], counter: str) -> dict[Incarnation, str]:
        """Changes all workers side by side, and counts those done. Returns why the others failed."""
        failures: dict[Incarnation, str] = {}

        async def change_one(worker: Incarnation, change: WeightChange) -> None:
            try:
                await self._fleet.change(worker, change)
            except PenstockError as error:
                failures[worker] = error.message
            else:
                self._update(**{counter: getattr(self.progress, counter) + 1})

        await asyncio.gather(*(change_one(worker, change) for worker, change in changes.items()))
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
