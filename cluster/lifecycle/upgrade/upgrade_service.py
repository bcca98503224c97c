"""Starts, aborts and restores rolling upgrades, and changes the pools for them.

Changes `ServedModels`, which says which configuration each worker has. Implements `rolling_upgrade.UpgradeFleet`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.controller.load_reports import LoadReportStore
from cluster.controller.membership import MembershipPublisher
from cluster.controller.supervisor import Supervisor
from cluster.lifecycle.capacity_check import CapacityCheck
from cluster.lifecycle.drain import Drain
from cluster.lifecycle.drain_service import DrainService
from cluster.lifecycle.upgrade.rolling_upgrade import RollingUpgrade, UpgradePlan
from cluster.lifecycle.upgrade.served_models import ServedModels, upgrade_from_record, with_model
from cluster.pools.pool import Pools, Slot, WorkerState
from engine.models.config import ModelConfig
from penstock.errors import InvalidInput
from penstock.types import Role, WorkerEnd, WorkerId
from penstock.v1 import worker_pb2

log = logging.getLogger(__name__)

_TOKENIZER = "tokenizer.json"


class UpgradeService:
    """The controller's interface to upgrades."""

    def __init__(
        self,
        served: ServedModels,
        pools: Pools,
        reports: LoadReportStore,
        supervisor: Supervisor,
        draining: DrainService,
        membership: MembershipPublisher,
        capacity: CapacityCheck,
    ) -> None:
        self._served = served
        self._task: asyncio.Task[None] | None = None
        self._pools = pools
        self._reports = reports
        self._supervisor = supervisor
        self._draining = draining
        self._membership = membership
        self._capacity = capacity

    @property
    def current(self) -> RollingUpgrade | None:
        return self._served.upgrade

    @property
    def last(self) -> RollingUpgrade | None:
        """The upgrade in flight, or the latest one."""
        return self._served.last_upgrade

    def restore_upgrade(self, data: Mapping[str, Any]) -> None:
        """Restores the cohorts and shares of the upgrade that an earlier controller recorded, before the membership is
        published. `resume` must follow."""
        recorded = upgrade_from_record(data)
        if recorded is not None:
            upgrade = self._make_upgrade(recorded.plan)
            upgrade.restore(recorded.stage, recorded.new, recorded.replicas, recorded.failure, decided=recorded.decided)
            self._served.shares = dict(recorded.shares)

    def resume(self) -> None:
        """Continues the restored upgrade, if there is one."""
        upgrade = self._served.last_upgrade
        if upgrade is not None and self._task is None:
            log.info("the upgrade to %s continues: %s", upgrade.plan.model, upgrade.progress.stage.value)
            self._task = asyncio.create_task(self._run(upgrade))

    def _make_upgrade(self, plan: UpgradePlan) -> RollingUpgrade:
        self._served.next_config = with_model(self._served.config, plan.model)
        self._served.last_upgrade = upgrade = RollingUpgrade(plan, self)
        return upgrade

    def check_none(self, field: str) -> None:
        """Raises InvalidInput if an upgrade is in flight."""
        if self.current is not None:
            raise InvalidInput(field, "cannot change during an upgrade; wait for its end, or abort it")

    async def begin(self, plan: UpgradePlan, *, force: bool = False) -> RollingUpgrade:
        """Starts an upgrade, or returns the one in flight to the same model.

        Raises CheckpointError for a folder that cannot be served, and InvalidInput, also where new workers do not fit
        beside the old ones unless with `force`.
        """
        plan = replace(plan, model=plan.model or self._served.config.model)
        old, new = await asyncio.gather(
            asyncio.to_thread(read_revision, self._served.config.model), asyncio.to_thread(read_revision, plan.model)
        )
        check_upgrade(old, new, plan.model)
        if not force:
            await self._capacity.refresh()
        if (running := self.current) is not None:
            if running.plan.model != plan.model:
                raise InvalidInput(
                    "model",
                    f"is {plan.model!r}; an upgrade to {running.plan.model!r} is in flight: wait for it, or abort it",
                )
            return running
        if self._served.changes_weights:
            raise InvalidInput("model", "cannot change while weights are replaced; wait for the end of the update")
        if self._draining.is_active:
            raise InvalidInput("model", "cannot change while workers are drained; wait for their end")
        if not force:
            self._capacity.check_upgrade()
        upgrade = self._make_upgrade(plan)
        self._task = asyncio.create_task(self._run(upgrade))
        return upgrade

    async def _run(self, upgrade: RollingUpgrade) -> None:
        await upgrade.run()
        if upgrade.decided:
            self._served.config = self._served.next_config
        self._membership.publish()

    def abort(self) -> RollingUpgrade:
        """Rolls the upgrade in flight back. Raises InvalidInput if there is none."""
        upgrade = self.current
        if upgrade is None:
            raise InvalidInput("abort", "finds no upgrade in flight")
        upgrade.abort("an operator aborted it")
        self._membership.publish()
        return upgrade

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    # `UpgradeFleet`

    def slots(self, role: Role) -> list[Slot]:
        return self._pools[role.value].slots

    def load_of_worker(self, worker_id: WorkerId) -> worker_pb2.Load | None:
        return self._reports.get(self._pools.find_worker(worker_id).incarnation)

    def grow(self, role: Role) -> WorkerId:
        incarnation = self._pools[role.value].add_place("beside the old ones")
        self._membership.publish()  # its turn comes later, and `config_of` is called then
        return incarnation.worker_id

    def restore(self, role: Role, replicas: int) -> None:
        pool, upgrade = self._pools[role.value], self._served.last_upgrade
        staying = [slot.worker_id for slot in pool.slots if not slot.is_leaving]
        num_new = sum(upgrade is not None and worker_id in upgrade.new for worker_id in staying)
        pool.set_replicas(replicas + num_new)
        self._membership.publish()

    def remove(self, worker_id: WorkerId, timeout_s: float) -> Drain | None:
        slot, upgrade = self._pools.find_worker(worker_id), self._served.last_upgrade
        is_new = upgrade is not None and worker_id in upgrade.new
        end = WorkerEnd.ROLLED_BACK if is_new else WorkerEnd.UPGRADED
        if slot.state is WorkerState.READY:
            return self._draining.drain_and_end(slot, timeout_s, replaced=False, end=end)
        stop = self._pools.of(slot.incarnation).remove_place(worker_id, end)
        if stop is not None:
            self._supervisor.cancel(stop.incarnation)
        self._membership.publish()
        return None

    def set_shares(self, shares: Mapping[str, float]) -> None:
        if shares != self._served.shares:
            self._served.shares = dict(shares)
            self._membership.publish()

    async def next_change(self) -> None:
        await self._membership.next_change()


@dataclass(frozen=True, slots=True)
class Revision:
    """The properties of a model's folder on which workers and routers must agree."""

    model: str  # changes whenever configuration or weights do
    tokenizer: str  # digest
    vocab_size: int


def read_revision(folder: str) -> Revision:
    """Reads a model's folder. Blocks. Raises CheckpointError."""
    config = ModelConfig.from_folder(folder)
    path = Path(folder, _TOKENIZER)
    digest = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() if path.exists() else ""
    return Revision(config.revision, digest, config.vocab_size)


def check_upgrade(old: Revision, new: Revision, folder: str) -> None:
    """Raises InvalidInput if routers could not serve both revisions."""
    for name in ("tokenizer", "vocab_size"):
        if getattr(old, name) != getattr(new, name):
            raise InvalidInput(
                "model",
                f"is {folder!r}, whose {name} differs from that of the served model; routers have one tokenizer, "
                "so start another deployment for it",
            )
