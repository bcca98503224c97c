"""Starts updates of the weights and remembers what every worker must have. Implements `weight_update.WeightFleet`.

Changes `ServedModels`, from which workers that start later get the weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from cluster.controller.event_log import DEPLOYMENT, WEIGHTS, EventLog
from cluster.controller.membership import MembershipPublisher
from cluster.controller.supervisor import Supervisor
from cluster.lifecycle.upgrade.served_models import ServedModels
from cluster.lifecycle.weights.weight_update import WAIT_S, WeightsPlan, WeightUpdate
from cluster.pools.pool import Incarnation, Pools, WorkerState
from cluster.pools.spares import Spares
from cluster.pools.weight_change import ApplyWeights, DiscardWeights, ReceiveWeights, WeightChange
from engine.weights.checkpoint import weights_digest
from penstock.client.broadcast.manifest import WeightsBroadcast
from penstock.config import LoadedWeightsConfig
from penstock.errors import InvalidInput, Unavailable
from penstock.types import PauseMode

log = logging.getLogger(__name__)

_ANSWER_S = 30.0  # for which the controller waits after the limit that a worker keeps itself


class WeightsService:
    """The controller's interface to updates of the weights."""

    def __init__(
        self,
        served: ServedModels,
        pools: Pools,
        supervisor: Supervisor,
        spares: Spares,
        membership: MembershipPublisher,
        events: EventLog,
        prepare_timeout_s: float,
    ) -> None:
        self._served = served
        self._pools = pools
        self._supervisor = supervisor
        self._spares = spares
        self._membership = membership
        self._events = events
        self._prepare_timeout_s = prepare_timeout_s
        self._beginning = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.last: WeightUpdate | None = None

    @property
    def weights(self) -> LoadedWeightsConfig | None:
        """The weights that every worker must have; None: the checkpoint's own."""
        return self._served.weights

    @property
    def current(self) -> WeightUpdate | None:
        """The update in flight."""
        return self.last if self.last is not None and not self.last.is_over else None

    async def begin(
        self,
        path: str,
        version: int,
        mode: PauseMode,
        timeout_s: float,
        broadcast: WeightsBroadcast | None = None,
    ) -> WeightUpdate:
        """Starts an update. Version 0 means the next one. A `broadcast` is received first, and written to `path`.

        Raises InvalidInput, and CheckpointError for a folder without readable weights.
        """
        async with self._beginning:
            if self.current is not None:
                running = self.current.plan.weights.version
                raise InvalidInput("path", f"cannot change: the update to version {running} is in flight; wait for it")
            if self._served.upgrade is not None:
                raise InvalidInput("path", "cannot change weights during an upgrade; wait for its end, or abort it")
            held = self.weights.version if self.weights is not None else 0
            version = version or held + 1
            if version <= held:
                raise InvalidInput("version", f"is {version}, and the workers have {held}; give a higher one")
            if broadcast is None:
                digest = await self.digest_of(path)
            elif await asyncio.to_thread(Path(path).exists):
                raise InvalidInput("path", f"is {path!r}, which exists; a broadcast is written to a new folder")
            else:
                digest = ""  # known once the folder is written
            weights = LoadedWeightsConfig(version=version, path=path, digest=digest)
            return self._start(WeightUpdate(WeightsPlan(weights, mode, timeout_s, broadcast), self))

    def resume(self) -> None:
        """Updates the workers that an earlier controller left with older weights than it had decided on, and frees what
        others have prepared for an update that it had not."""
        if self.weights is not None and self.outdated(self.weights.version, answering=False):
            log.info("workers with older weights than version %d are updated", self.weights.version)
            self._start(WeightUpdate(WeightsPlan(self.weights, PauseMode.KEEP, WAIT_S), self, decided=True))
        else:
            self._task = asyncio.create_task(self._discard_all(), name="weights")

    async def _discard_all(self) -> None:
        ready = [slot.incarnation for slot in self._pools.worker_slots if slot.state is WorkerState.READY]
        await asyncio.gather(*(self.change(each, DiscardWeights()) for each in ready), return_exceptions=True)

    def _start(self, update: WeightUpdate) -> WeightUpdate:
        self.last = update
        self._served.changes_weights = True
        self._task = asyncio.create_task(self._run(update), name="weights")
        return update

    async def _run(self, update: WeightUpdate) -> None:
        weights = update.plan.weights
        self._events.note(DEPLOYMENT, WEIGHTS, f"version {weights.version} from {weights.path}")
        try:
            await update.run()
        finally:
            self._served.changes_weights = False
        progress = update.progress
        self._events.note(DEPLOYMENT, WEIGHTS, f"version {weights.version}: {progress.stage.value} {progress.detail}")
        self._membership.publish()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    # `WeightFleet`

    def outdated(self, version: int, *, answering: bool) -> Sequence[Incarnation]:
        states = (WorkerState.READY,) if answering else (WorkerState.READY, WorkerState.SILENT)
        serving = [slot for slot in self._pools.worker_slots if slot.state in states]
        return [slot.incarnation for slot in serving if slot.weights_version < version]

    async def digest_of(self, path: str) -> str:
        return await asyncio.to_thread(weights_digest, Path(path))

    async def change(self, incarnation: Incarnation, change: WeightChange) -> None:
        if isinstance(change, ApplyWeights):
            await self._supervisor.apply_weights(incarnation, change)
            return
        limit, timeout_s = f"start_timeout_s = {self._prepare_timeout_s:g} s", self._prepare_timeout_s
        if isinstance(change, ReceiveWeights):
            limit = f"within_s = {change.broadcast.within_s:g} s"
            timeout_s = change.broadcast.within_s + _ANSWER_S
        try:
            async with asyncio.timeout(timeout_s):
                await self._supervisor.change_weights(incarnation, change)
        except TimeoutError:
            raise Unavailable(f"no answer within {limit}") from None

    def replace(self, incarnation: Incarnation, reason: str) -> None:
        self._supervisor.lose(incarnation, reason)

    def decide(self, weights: LoadedWeightsConfig) -> None:
        self._served.set_weights(weights)
        self._spares.renew(f"weights {weights.version} are in force")
        self._membership.publish()
