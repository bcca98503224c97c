"""Which model each worker is made of, and the upgrade from one to the next. Implements `upgrade.Fleet`.

Owns the configuration in force, the next one, and the upgrade under way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cluster.drain import Drain
from cluster.draining import Draining
from cluster.pool import Incarnation, Slot, WorkerState
from cluster.pools import Pools
from cluster.publication import Publication
from cluster.reports import Reports
from cluster.revisions import check_upgrade, read_revision
from cluster.supervision import Supervision
from cluster.upgrade import ENDED, Plan, Upgrade, cohort_of
from cluster.upgrade_record import upgrade_from_record, upgrade_to_record
from penstock.config import ServeConfig
from penstock.errors import InvalidInput
from penstock.types import Role, WorkerId
from penstock.v1 import worker_pb2

log = logging.getLogger(__name__)


def with_model(config: ServeConfig, model: str) -> ServeConfig:
    """Under the name that callers know."""
    return config.model_copy(update={"model": model, "served_model": config.model_name})


class Upgrading:
    def __init__(
        self,
        config: ServeConfig,
        pools: Pools,
        reports: Reports,
        supervision: Supervision,
        draining: Draining,
        publication: Publication,
    ) -> None:
        self._config = config
        self._next_config = config  # of the new workers of an upgrade
        self._upgrade: Upgrade | None = None
        self._task: asyncio.Task[None] | None = None
        self._pools = pools
        self._reports = reports
        self._supervision = supervision
        self._draining = draining
        self._publication = publication

    @property
    def current(self) -> Upgrade | None:
        return self._upgrade if self._upgrade and self._upgrade.progress.stage not in ENDED else None

    @property
    def model(self) -> str:
        """The folder in force; during an upgrade the one that it leaves."""
        return self._config.model

    @property
    def record(self) -> Mapping[str, Any]:
        """The upgrade under way, for a successor."""
        return upgrade_to_record(self.current, self._publication.shares)

    def take_up(self, data: Mapping[str, Any]) -> None:
        """Before anybody hears of the workers: those of the upgrade that an earlier controller left under way are told
        apart again, and routers go on with their shares. `go_on` must follow."""
        left = upgrade_from_record(data)
        if left is not None:
            self._next_config = with_model(self._config, left.plan.model)
            self._upgrade = Upgrade(left.plan, self)
            self._upgrade.take_up(left.stage, left.new, left.replicas, left.failure, decided=left.decided)
            self._publication.adopt_shares(left.shares)

    def go_on(self) -> None:
        """With the upgrade that was taken up, if there is one."""
        if self._upgrade is not None and self._task is None:
            log.info("the upgrade to %s goes on: %s", self._upgrade.plan.model, self._upgrade.progress.stage.value)
            self._task = asyncio.create_task(self._run(self._upgrade))

    def config_of(self, incarnation: Incarnation) -> ServeConfig:
        """What a process is made of."""
        upgrade = self.current
        is_new = upgrade is not None and incarnation.worker_id in upgrade.new
        return self._next_config if is_new else self._config

    def num_ranks_of(self, incarnation: Incarnation) -> int:
        """Over how many processes its model is spread; a router has none."""
        if incarnation.pool_name not in list(Role):
            return 1
        return self.config_of(incarnation).engine_config(Role(incarnation.pool_name)).tensor_parallel

    def cohort_of(self, worker_id: WorkerId) -> str:
        """Its place in `set_shares`."""
        return cohort_of(self.current, worker_id)

    def check_none(self, field: str) -> None:
        """Raises InvalidInput during an upgrade."""
        if self.current is not None:
            raise InvalidInput(field, "cannot change during an upgrade; wait for its end, or abort it")

    async def begin(self, plan: Plan) -> Upgrade:
        """Begins to replace every worker, or joins in where the same is under way. Raises CheckpointError for a folder
        that cannot be served, and InvalidInput."""
        plan = replace(plan, model=plan.model or self._config.model)
        old, new = await asyncio.gather(
            asyncio.to_thread(read_revision, self._config.model), asyncio.to_thread(read_revision, plan.model)
        )
        check_upgrade(old, new, plan.model)
        if (running := self.current) is not None:
            if running.plan.model != plan.model:
                raise InvalidInput("model", f"is {plan.model!r}; an upgrade to {running.plan.model!r} is under way")
            return running
        if self._draining.is_under_way:
            raise InvalidInput("model", "cannot change while workers are drained; wait for their end")
        self._next_config = with_model(self._config, plan.model)
        self._upgrade = Upgrade(plan, self)
        self._task = asyncio.create_task(self._run(self._upgrade))
        return self._upgrade

    async def _run(self, upgrade: Upgrade) -> None:
        await upgrade.run()
        if upgrade.decided:
            self._config = self._next_config
        self._publication.publish()

    def abort(self) -> Upgrade:
        """Raises InvalidInput where there is none."""
        upgrade = self.current
        if upgrade is None:
            raise InvalidInput("abort", "finds no upgrade under way")
        upgrade.abort("an operator aborted it")
        self._publication.publish()
        return upgrade

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    # `upgrade.Fleet`

    def slots(self, role: Role) -> list[Slot]:
        return self._pools[role.value].slots

    def load_of_worker(self, worker_id: WorkerId) -> worker_pb2.Load | None:
        return self._reports.get(self._pools.find_worker(worker_id).incarnation)

    def grow(self, role: Role) -> WorkerId:
        incarnation = self._pools[role.value].take_over("beside the old ones")
        self._supervision.begin(incarnation)  # asks `config_of` later on
        return incarnation.worker_id

    def restore(self, role: Role, replicas: int) -> None:
        pool, upgrade = self._pools[role.value], self._upgrade
        staying = [slot.worker_id for slot in pool.slots if not slot.is_leaving]
        num_new = sum(upgrade is not None and one in upgrade.new for one in staying)
        pool.set_replicas(replicas + num_new)
        self._publication.publish()

    def let_go(self, worker_id: WorkerId, timeout_s: float) -> Drain | None:
        slot = self._pools.find_worker(worker_id)
        if slot.state is WorkerState.READY:
            return self._draining.drain_and_end(slot, timeout_s, replaced=False)
        stop = self._pools.of(slot.incarnation).give_up(worker_id)
        if stop is not None:
            self._supervision.cancel(stop.incarnation)
        self._publication.publish()
        return None

    def set_shares(self, shares: Mapping[str, float]) -> None:
        self._publication.set_shares(shares)

    async def next_change(self) -> None:
        await self._publication.next_change()
