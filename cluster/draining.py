"""The drains under way: which worker is emptied, and what follows once it is empty. Owns them and their tasks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cluster.drain import TIMEOUT_S, Drain, Handover
from cluster.pool import Incarnation, Slot, WorkerState
from cluster.pools import Pools, member_of
from cluster.reports import Reports
from cluster.supervision import Supervision
from penstock.config import ServeConfig
from penstock.errors import InvalidInput
from penstock.grpc_server import Dial
from penstock.types import Role, WorkerId

log = logging.getLogger(__name__)


class Draining:
    def __init__(
        self,
        config: ServeConfig,
        pools: Pools,
        reports: Reports,
        supervision: Supervision,
        dial: Dial,
        publish: Callable[[], None],
    ) -> None:
        self._config = config
        self._pools = pools
        self._reports = reports
        self._supervision = supervision
        self._dial = dial
        self._publish = publish
        self._drains: dict[Incarnation, Drain] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_under_way(self) -> bool:
        return bool(self._drains)

    def drain(self, worker_id: str, timeout_s: float = TIMEOUT_S, *, replaced: bool = False) -> Drain:
        """Begins to empty a worker and to end it, or joins in where that is under way. Raises InvalidInput."""
        slot = self._pools.find_worker(worker_id)
        if slot.incarnation in self._drains:
            return self._drains[slot.incarnation]
        self.check(slot)
        return self.drain_and_end(slot, timeout_s, replaced=replaced)

    def check(self, slot: Slot) -> None:
        """Whether it may be drained. Raises InvalidInput."""
        worker_id, role = slot.worker_id, Role(slot.incarnation.pool_name)
        if slot.state is not WorkerState.READY:
            raise InvalidInput("worker_id", f"{worker_id} is {slot.state.value}; only a ready worker can be drained")
        if role is Role.DECODE and sum(1 for _ in self._pools[role.value].ready()) == 1:
            raise InvalidInput(
                "worker_id", f"{worker_id} is the only decode worker that is ready; without one nothing is served"
            )

    def resume(self, worker_id: WorkerId, *, replaced: bool) -> None:
        """Goes on with a drain that an earlier controller began."""
        pool = self._pools[Incarnation(worker_id, 0).pool_name]
        if any(slot.worker_id == worker_id for slot in pool.ready()):
            pool.set_replicas(pool.replicas + (not replaced))  # as it was before the drain began
            try:
                self.drain(worker_id, replaced=replaced)
            except InvalidInput as error:
                log.warning("a drain that was under way does not go on: %s", error.message)

    def replace_leaving(self, incarnation: Incarnation) -> None:
        """It says that it was told to end."""
        slot = self._pools.slot_of(incarnation)
        if slot is not None and slot.state is WorkerState.READY:
            log.info("%s was told to end: it is emptied and replaced", incarnation.worker_id)
            self.drain_and_end(slot, self._config.drain_s, replaced=True, at_once=True)

    def drain_and_end(self, slot: Slot, timeout_s: float, *, replaced: bool, at_once: bool = False) -> Drain:
        drain = self.begin(slot, timeout_s, replaced=replaced, at_once=at_once)
        task = asyncio.create_task(self._end_when_empty(drain, slot.incarnation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return drain

    def begin(self, slot: Slot, timeout_s: float, *, replaced: bool, at_once: bool = False) -> Drain:
        """The caller runs it, and calls `forget` once the worker is gone."""
        config = self._config
        handover = Handover(config.handover_bytes, config.handover_s)
        limit = config.decode.max_batch_sequences
        drain = Drain(member_of(slot), timeout_s, limit, self._reports, self._dial, handover)
        self._drains[slot.incarnation] = drain
        self._pools.of(slot.incarnation).drain(slot.incarnation, replaced=replaced, at_once=at_once)
        self._publish()  # routers choose it no more
        return drain

    def forget(self, incarnation: Incarnation) -> None:
        self._drains.pop(incarnation, None)

    async def _end_when_empty(self, drain: Drain, incarnation: Incarnation) -> None:
        log.info("%s is drained", incarnation.worker_id)
        try:
            await drain.run()
            await self._supervision.end(incarnation)
        finally:
            drain.end()
            self.forget(incarnation)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
