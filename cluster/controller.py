"""The controller: owns how many workers there should be, replaces those that are lost, says who is a member.

Without Ray: `spawn` gives it processes to supervise (`cluster.ray_process` in a deployment, fakes in tests), and
`cluster.actors` hosts it. It sees no prompt, no token and no page. All of it runs on one event loop. Each piece of its
state has one owner, which it makes and knits together here; what it does itself is to bring the pools to their size.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from cluster.balancing import Balancing
from cluster.drain import TIMEOUT_S, Drain
from cluster.draining import Draining
from cluster.evacuating import Evacuating, Evacuation, Nodes
from cluster.events import EventLog
from cluster.examination import examine
from cluster.examiner import Examiner, Proves
from cluster.findings import Finding
from cluster.flip import Flip
from cluster.pool import Incarnation, Start, Stop
from cluster.pools import Pools
from cluster.publication import Publication
from cluster.readiness import Canary, Readiness
from cluster.record import FIRST_RECORD, Record
from cluster.record_keeper import RecordKeeper, Save
from cluster.reports import Reports
from cluster.reshaping import Reshaping
from cluster.scaling import Scaling
from cluster.spares import Spares
from cluster.status import Status
from cluster.supervised import ROUTER, Found, Spawn, Started, SupervisedProcess
from cluster.supervision import Supervision
from cluster.upgrade import Plan, Upgrade
from cluster.upgrading import Upgrading, with_model
from penstock.config import ServeConfig
from penstock.errors import PenstockError
from penstock.grpc_server import Dial, make_channel
from penstock.types import Role, WorkerId
from penstock.v1 import admin_pb2, worker_pb2


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a launcher follows."""

    version: int
    status: admin_pb2.StatusResponse
    failure: PenstockError | None = None  # the deployment can never become ready
    stopped: bool = False


class Controller:
    """Implements `supervision.Listener`."""

    def __init__(
        self,
        config: ServeConfig,
        spawn: Spawn,
        canary: Canary,
        dial: Dial = make_channel,
        record: Record = FIRST_RECORD,
        save: Save = lambda record: None,
        proving: Proves | None = None,
        nodes: Nodes | None = None,
    ) -> None:
        """`dial` opens channels to workers; `proving` asks each of them for an answer that is known. `record` is what
        the controller before this one left, one generation up; `save` gets each later one."""
        config = with_model(config, record.model) if record.model else config
        self._first_record = record
        self._dial = dial
        self.events = EventLog(time.time)
        self._pools = pools = Pools(config, record)
        self._keeper = RecordKeeper(record, save, pools, proving.judge if proving else None)
        self._publication = Publication(
            pools, record.first_version, self._cohort_of, self._on_change, lambda: self.spares.count_warm()
        )
        publish = self._publication.publish
        self._readiness = Readiness(pools, canary, config.start_timeout_s, publish, was_ready=record.was_ready)
        self.reports = Reports(pools)
        self._spawn = spawn
        counts = {role: config.pool(role).spares for role in Role}
        self.spares = Spares(counts, pools, spawn, config.start_timeout_s, self.events, publish)
        self._status = Status(config.model_name, pools, self.reports, self.spares, self._num_ranks_of)
        examiner = None
        if proving is not None:
            examiner = Examiner(proving, pools, self._publication, self._keep_record, config.canary_interval_s)
        self._supervision = Supervision(
            pools,
            self._take_or_spawn,
            config.start_timeout_s,
            self._readiness,
            examiner,
            listener=self,
            publish=publish,
            spares=self.spares,
            next_change=self._publication.next_change,
        )
        self.draining = Draining(config, pools, self.reports, self._supervision, dial, publish)
        self._upgrading = Upgrading(config, pools, self.reports, self._supervision, self.draining, self._publication)
        self._reshaping = Reshaping(
            pools,
            self.reports,
            self._supervision,
            self.draining,
            self._upgrading,
            self._publication,
            self.events,
            can_flip=config.engine_config(Role.PREFILL) == config.engine_config(Role.DECODE),
        )
        self.scaling = Scaling(config, self._reshaping)
        self._evacuating = Evacuating(
            nodes,
            pools,
            self.reports,
            self._supervision,
            self.draining,
            self._publication,
            self.events,
            config.start_timeout_s,
        )
        self.balancing = Balancing(config, self.reports, self._is_moving, self.events.note, dial)
        self._main: asyncio.Task[None] | None = None
        self._timers: list[asyncio.Task[None]] = []
        self._stopping = False

    def adopt(self, found: Sequence[Found]) -> None:
        """Before `start`: takes over what runs already. What was ready is a member at once, so that no router sees a
        membership without it."""
        self._upgrading.take_up(self._first_record.upgrade)
        for one in found:
            restarts = self._first_record.num_restarts.get(one.incarnation.worker_id, 0)
            self._pools.of(one.incarnation).adopt(one.incarnation, restarts)
            if one.started is not None:
                self._supervision.note_ready(one.incarnation, one.started)
                if one.incarnation.pool_name == ROUTER:
                    self._readiness.trust(one.incarnation)
            self._supervision.begin(one.incarnation, found=one)
        self._publication.adopt_members()
        for worker_id, replaced in self._first_record.leaving.items():
            self.draining.resume(WorkerId(worker_id), replaced=replaced)

    def start(self) -> None:
        """Begins to bring the pools to their size; returns at once."""
        self._main = asyncio.create_task(self._reconcile_for_ever())
        self._upgrading.go_on()
        self._evacuating.start()
        if self.scaling.is_on:
            self._timers.append(asyncio.create_task(self.scaling.run(), name="autoscaler"))
        if self.balancing.config.enabled:
            self._timers.append(asyncio.create_task(self.balancing.run(), name="balancing"))

    async def _reconcile_for_ever(self) -> None:
        while True:
            changed = self._publication.changed
            actions = self._pools.reconcile(time.monotonic())
            for action in actions:
                if isinstance(action, Start):
                    self._supervision.begin(action.incarnation)
                elif isinstance(action, Stop):
                    self._supervision.cancel(action.incarnation)
            if actions:
                self._publication.publish()
            self._evacuating.look()
            self._readiness.check()
            self.spares.reconcile(time.monotonic(), upgrading=self._upgrading.current is not None)
            retries = (self._pools.next_retry_s(), self.spares.next_retry_s(time.monotonic()))
            retry_s = min((one for one in retries if one is not None), default=None)
            timeout_s = max(0.0, retry_s - time.monotonic()) if retry_s is not None else None
            try:
                async with asyncio.timeout(timeout_s):
                    await changed.wait()
            except TimeoutError:
                continue

    def _take_or_spawn(self, incarnation: Incarnation) -> SupervisedProcess:
        """During an upgrade new ones are of the code that is installed then, and of either model; and while nodes go,
        they are wanted on others."""
        may_take = self._upgrading.current is None and not self._evacuating.notices
        taken = self.spares.take(incarnation, self._spawn) if may_take else None
        return taken or self._spawn(incarnation)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Ends the routers, whose streams may take `grace_s` to end, then the workers; everything is gone when it
        returns. May be called twice."""
        if self._stopping:
            await self._publication.wait_stopped()
            return
        self._stopping = True
        self._keeper.close()
        for task in (self._main, *self._timers):
            if task:
                task.cancel()
        self._readiness.close()
        self._evacuating.close()
        self.draining.close()
        self._upgrading.close()
        await self.spares.close()
        for names, patience_s in (([ROUTER], grace_s), ([role.value for role in Role], 0.0)):
            for pool in (self._pools[name] for name in names):
                pool.set_replicas(0)
                pool.reconcile(time.monotonic())
            await self._supervision.end_pools(names, patience_s)
        self._publication.stop()
        self.events.close()

    # What is told to it.

    def on_ready(self, incarnation: Incarnation, started: Started) -> None:
        if incarnation.pool_name == ROUTER:
            self._status.note_router(incarnation.worker_id, started)

    def on_report(self, incarnation: Incarnation, load: worker_pb2.Load | None) -> None:
        self.reports.take(incarnation, load)
        if load is not None and load.leaving:
            self.draining.replace_leaving(incarnation)

    def on_unplaced(self, incarnation: Incarnation, reason: str) -> None:
        if incarnation.spare_of:
            self.spares.on_progress(incarnation, reason, self.on_unplaced)
            return
        self._pools.of(incarnation).on_unplaced(incarnation, reason)
        self._publication.publish()

    def on_progress(self, incarnation: Incarnation, detail: str) -> None:
        if incarnation.spare_of:
            self.spares.on_progress(incarnation, detail, self.on_progress)
            return
        self._pools.of(incarnation).on_progress(incarnation, detail)
        self._publication.publish()

    def _cohort_of(self, worker_id: WorkerId) -> str:
        return self._upgrading.cohort_of(worker_id)

    def _num_ranks_of(self, incarnation: Incarnation) -> int:
        return self._upgrading.num_ranks_of(incarnation)

    def _is_moving(self) -> bool:
        """Sequences go from worker to worker for another reason."""
        return self.draining.is_under_way or self._upgrading.current is not None

    def _on_change(self) -> None:
        self.events.observe(self._pools.slots, self.is_ready)
        self._keep_record()

    def _keep_record(self) -> None:
        upgrading = self._upgrading
        was_ready = self._readiness.was_ready
        self._keeper.keep(upgrading.model, upgrading.record, self._evacuating.waiting, was_ready=was_ready)

    # What it tells.

    @property
    def is_ready(self) -> bool:
        """A request would succeed now."""
        return self._readiness.is_ready

    def status(self) -> admin_pb2.StatusResponse:
        answer = self._status.tell(ready=self.is_ready)
        answer.balance.CopyFrom(self.balancing.tell())
        return answer

    def watch_membership(self, router: str = "") -> AsyncIterator[admin_pb2.Membership]:
        """The whole membership now and after each change, until the controller stops."""
        return self._publication.watch(router)

    async def wait(self, version: int, timeout_s: float) -> Snapshot:
        """The state once it is newer than `version`, or after `timeout_s` whatever it is."""
        await self._publication.wait(version, timeout_s)
        published = self._publication
        return Snapshot(published.version, self.status(), self._readiness.failure, published.stopped)

    def examine(self, *, transfers: bool) -> AsyncIterator[Finding]:
        """What is wrong with the workers that are members now, and with the ways between them."""
        return examine(self._publication.members, self._dial, transfers=transfers)

    def config_of(self, incarnation: Incarnation) -> ServeConfig:
        """What a process is made of."""
        return self._upgrading.config_of(incarnation)

    def replicas(self, pool_name: str) -> int:
        """How many workers a pool should have. Raises InvalidInput."""
        return self._reshaping.replicas(pool_name)

    # What it is asked to do; each raises InvalidInput.

    def drain(self, worker_id: str, timeout_s: float = TIMEOUT_S, *, replaced: bool = False) -> Drain:
        return self.draining.drain(worker_id, timeout_s, replaced=replaced)

    async def drain_node(self, name: str, within_s: float | None = None) -> Sequence[Evacuation]:
        """What is there and serves, on its way out."""
        return await self._evacuating.drain_node(name, within_s)

    def scale(self, pool_name: str, replicas: int, timeout_s: float = TIMEOUT_S) -> list[WorkerId]:
        return self._reshaping.scale(pool_name, replicas, timeout_s)

    def flip(self, worker_id: str, role: Role, timeout_s: float = TIMEOUT_S) -> Flip:
        return self._reshaping.flip(worker_id, role, timeout_s)

    async def upgrade(self, plan: Plan) -> Upgrade:
        """Raises CheckpointError for a folder that cannot be served."""
        return await self._upgrading.begin(plan)

    def abort_upgrade(self) -> Upgrade:
        return self._upgrading.abort()
