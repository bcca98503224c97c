"""Owns the drains in flight and their tasks, and ends each worker when it is empty."""

from __future__ import annotations

import logging
from collections.abc import Callable

from cluster.controller.load_reports import LoadReportStore
from cluster.controller.supervisor import Supervisor
from cluster.lifecycle.drain import TIMEOUT_S, Drain, HandoverBounds
from cluster.pools.pool import Incarnation, Pools, Slot, WorkerState, member_of
from penstock.config import ServeConfig
from penstock.errors import InvalidInput
from penstock.process.task_set import TaskSet
from penstock.rpc.server import Dial
from penstock.types import Role, WorkerEnd, WorkerId

log = logging.getLogger(__name__)


class DrainService:
    """Starts drains for operators, scale-downs, flips, upgrades and workers that were asked to end."""

    def __init__(
        self,
        config: ServeConfig,
        pools: Pools,
        reports: LoadReportStore,
        supervisor: Supervisor,
        dial: Dial,
        publish: Callable[[], None],
    ) -> None:
        """`publish` announces a changed membership."""
        self._config = config
        self._pools = pools
        self._reports = reports
        self._supervisor = supervisor
        self._dial = dial
        self._publish = publish
        self._drains: dict[Incarnation, Drain] = {}
        self._tasks = TaskSet()

    @property
    def is_active(self) -> bool:
        """Returns whether a drain is in flight."""
        return bool(self._drains)

    def drain(
        self,
        worker_id: str,
        timeout_s: float = TIMEOUT_S,
        *,
        replaced: bool = False,
        end: WorkerEnd = WorkerEnd.DRAINED,
    ) -> Drain:
        """Starts to empty a worker and then end it, or returns its drain in flight. Raises InvalidInput."""
        slot = self._pools.find_worker(worker_id)
        if slot.incarnation in self._drains:
            return self._drains[slot.incarnation]
        self.check(slot)
        return self.drain_and_end(slot, timeout_s, replaced=replaced, end=end)

    def check(self, slot: Slot) -> None:
        """Raises InvalidInput if the worker must not be drained."""
        worker_id, role = slot.worker_id, Role(slot.incarnation.pool_name)
        if slot.state is not WorkerState.READY:
            raise InvalidInput(
                "worker_id", f"{worker_id} is {slot.state.value}; wait until it is ready, or drain another one"
            )
        if role is Role.DECODE and sum(1 for _ in self._pools[role.value].ready()) == 1:
            raise InvalidInput(
                "worker_id",
                f"{worker_id} is the only decode worker that is ready; without one nothing is served: add one first",
            )

    def resume(self, worker_id: WorkerId, *, replaced: bool) -> None:
        """Continues a drain that an earlier controller started."""
        pool = self._pools[Incarnation(worker_id, 0).pool_name]
        if any(slot.worker_id == worker_id for slot in pool.ready()):
            pool.set_replicas(pool.replicas + (not replaced))  # the size before the drain started
            try:
                self.drain(worker_id, replaced=replaced)
            except InvalidInput as error:
                log.warning("a drain in flight does not continue: %s", error.message)

    def drain_ending_workers(self) -> None:
        """Drains and replaces the ready workers whose processes were asked to end."""
        for slot in self._pools.worker_slots:
            if slot.is_ending and slot.state is WorkerState.READY:
                log.info("%s was asked to end: draining and replacing it", slot.worker_id)
                self.drain_and_end(slot, self._config.drain_s, replaced=True, at_once=True, end=WorkerEnd.TERMINATED)

    def drain_and_end(
        self, slot: Slot, timeout_s: float, *, replaced: bool, at_once: bool = False, end: WorkerEnd
    ) -> Drain:
        """Starts a drain and ends the worker when it is over. `at_once` starts the replacement before that."""
        drain = self.begin(slot, timeout_s, replaced=replaced, at_once=at_once, end=end)
        self._tasks.start(self._end_when_empty(drain, slot.incarnation))
        return drain

    def begin(self, slot: Slot, timeout_s: float, *, replaced: bool, at_once: bool = False, end: WorkerEnd) -> Drain:
        """Registers a drain that the caller runs; the caller calls `forget` when the worker is gone."""
        config = self._config
        handover = HandoverBounds(config.handover_bytes, config.handover_s)
        limit = config.decode.max_batch_sequences
        drain = Drain(member_of(slot), timeout_s, limit, self._reports, self._dial, handover)
        self._drains[slot.incarnation] = drain
        self._pools.of(slot.incarnation).drain(slot.incarnation, replaced=replaced, at_once=at_once, end=end)
        self._publish()  # routers stop choosing the worker
        return drain

    def forget(self, incarnation: Incarnation) -> None:
        """Removes a drain whose worker is gone."""
        self._drains.pop(incarnation, None)

    async def _end_when_empty(self, drain: Drain, incarnation: Incarnation) -> None:
        log.info("draining %s", incarnation.worker_id)
        try:
            await drain.run()
            await self._supervisor.end(incarnation)
        finally:
            drain.end()
            self.forget(incarnation)

    def close(self) -> None:
        self._tasks.cancel()
