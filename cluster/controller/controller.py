"""The controller: owns how many workers there should be, replaces lost ones and publishes the members.

It knows no Ray: `cluster.ray.controller_actor` hosts it and supplies the processes that it supervises. It sees no
prompt, no token and no page. All of it runs on one event loop. Each piece of its state has one owner, which
`cluster.controller.composition` makes and passes in; the controller itself brings the pools to their size, and
recovers, starts and stops the rest. Operators' changes go to `draining`, `pool_service`, `upgrading` and `relocation`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from cluster.controller.event_log import EventLog
from cluster.controller.load_reports import LoadReportStore
from cluster.controller.membership import MembershipPublisher
from cluster.controller.record import ControllerRecord, RecordKeeper
from cluster.controller.status import StatusReporter
from cluster.controller.supervised_process import FoundProcess
from cluster.controller.supervisor import Supervisor
from cluster.diagnose.deployment_checks import examine
from cluster.diagnose.findings import Finding
from cluster.health.gone_workers import GoneWorkers
from cluster.health.readiness import Readiness
from cluster.lifecycle.capacity_check import Machines
from cluster.lifecycle.drain_service import DrainService
from cluster.lifecycle.migrate.rebalance_runner import RebalanceRunner
from cluster.lifecycle.pool_service import PoolService
from cluster.lifecycle.relocation_service import RelocationService
from cluster.lifecycle.upgrade.upgrade_service import UpgradeService
from cluster.lifecycle.weights.weights_service import WeightsService
from cluster.pools.pool import ROUTER, Incarnation, Pools, Stop
from cluster.pools.spares import Spares
from cluster.pools.start_policy import choose_starts
from cluster.scaling.runner import AutoscalerRunner
from penstock.errors import PenstockError
from penstock.process.task_set import TaskSet
from penstock.rpc.server import Dial
from penstock.types import Role, WorkerId
from penstock.v1 import admin_pb2


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state that a launcher follows."""

    version: int
    status: admin_pb2.StatusResponse
    failure: PenstockError | None = None  # the deployment can never become ready
    stopped: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class Controller:
    pools: Pools
    events: EventLog
    reports: LoadReportStore
    membership: MembershipPublisher
    readiness: Readiness
    keeper: RecordKeeper
    spares: Spares
    status_reporter: StatusReporter
    supervisor: Supervisor
    draining: DrainService
    upgrading: UpgradeService
    pool_service: PoolService
    weights: WeightsService
    relocation: RelocationService
    gone: GoneWorkers
    scaling: AutoscalerRunner
    balancing: RebalanceRunner
    machines: Machines | None  # None: unknown, and starts are not bounded
    dial: Dial
    _tasks: TaskSet = field(default_factory=TaskSet, init=False)
    _is_stopping: bool = field(default=False, init=False)

    def recover(self, record: ControllerRecord, found: Sequence[FoundProcess]) -> None:
        """Takes over the processes that an earlier controller left with `record`. Call it before `start`.

        Workers that were ready are members at once, so that no router sees a membership without them.
        """
        self.upgrading.restore_upgrade(record.upgrade)
        for process in found:
            incarnation = process.incarnation
            restarts = record.num_restarts.get(incarnation.worker_id, 0)
            self.pools.of(incarnation).restore(incarnation, restarts)
            if process.started is not None:
                self.supervisor.note_ready(incarnation, process.started)
                if incarnation.pool_name == ROUTER:
                    self.readiness.trust(incarnation)
            self.supervisor.begin(incarnation, found=process)
        self.membership.restore()
        for worker_id, replaced in record.leaving.items():
            self.draining.resume(WorkerId(worker_id), replaced=replaced)

    def start(self) -> None:
        """Begins to bring the pools to their size; returns at once."""
        self._tasks.start(self._reconcile_forever(), name="reconcile")
        self.upgrading.resume()
        self.weights.resume()
        self.relocation.start()
        if self.scaling.is_on:
            self._tasks.start(self.scaling.run(), name="autoscaler")
        if self.balancing.config.enabled:
            self._tasks.start(self.balancing.run(), name="balancing")

    async def _reconcile_forever(self) -> None:
        while True:
            changed = self.membership.changed
            self._reconcile()
            retries_s = (self.pools.next_retry_s(), self.spares.next_retry_s(time.monotonic()))
            retry_s = min((due_s for due_s in retries_s if due_s is not None), default=None)
            timeout_s = max(0.0, retry_s - time.monotonic()) if retry_s is not None else None
            try:
                async with asyncio.timeout(timeout_s):
                    await changed.wait()
            except TimeoutError:
                continue

    def _reconcile(self) -> None:
        self.draining.drain_ending_workers()
        actions = self.pools.reconcile(time.monotonic())
        for action in actions:
            if isinstance(action, Stop):
                self.supervisor.cancel(action.incarnation)
        if self._begin_starts() or actions:
            self.membership.publish()
        self.relocation.check_nodes()
        self.readiness.check(self.membership.publish)
        self.spares.reconcile(time.monotonic(), upgrading=self.upgrading.current is not None)

    def _begin_starts(self) -> bool:
        """Begins the starts whose turn it is. Returns whether there are any."""
        chosen = choose_starts(self.pools.slots, self.machines.num_cores if self.machines is not None else None)
        for incarnation in chosen.withdraw:
            self.supervisor.withdraw(incarnation)
        for incarnation in chosen.begin:
            self.pools.of(incarnation).begin(incarnation)
            self.supervisor.begin(incarnation)
        return bool(chosen.begin)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Ends the routers, whose streams may take `grace_s` to end, then the workers; returns once everything is gone.
        May be called twice."""
        if self._is_stopping:
            await self.membership.wait_stopped()
            return
        self._is_stopping = True
        self.keeper.close()
        self._tasks.cancel()
        self.readiness.close()
        self.relocation.close()
        self.gone.close()
        self.draining.close()
        self.upgrading.close()
        self.weights.close()
        await self.spares.close()
        for names, patience_s in (([ROUTER], grace_s), ([role.value for role in Role], 0.0)):
            for pool in (self.pools[name] for name in names):
                pool.stop()
            await self.supervisor.end_pools(names, patience_s)
        self.membership.stop()
        self.events.close()

    def on_progress(self, incarnation: Incarnation, detail: str) -> None:
        """Notes how far a process has started; `incarnation` is the one that it was spawned as."""
        worker = self.spares.on_progress(incarnation, detail) if incarnation.spare_of else incarnation
        if worker is not None:
            self.pools.of(worker).on_progress(worker, detail)
            self.membership.publish()

    @property
    def is_ready(self) -> bool:
        """Returns whether a request would succeed now."""
        return self.readiness.is_ready

    @property
    def is_placed(self) -> bool:
        """Returns whether as many workers and spares as desired have their resources."""
        return self.spares.are_placed and all(self.pools[role.value].is_placed for role in Role)

    def status(self) -> admin_pb2.StatusResponse:
        return self.status_reporter.report(self.balancing.status(), ready=self.is_ready)

    async def wait(self, version: int, timeout_s: float) -> Snapshot:
        """Returns the state once it is newer than `version`, or after `timeout_s` as it is."""
        await self.membership.wait(version, timeout_s)
        membership = self.membership
        return Snapshot(membership.version, self.status(), self.readiness.failure, membership.stopped)

    def examine(self, *, transfers: bool) -> AsyncIterator[Finding]:
        """Yields findings about the present members and, with `transfers`, about the paths between them."""
        return examine(self.membership.members, self.dial, transfers=transfers)
