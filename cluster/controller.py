"""The controller: owns how many workers there should be, replaces those that are lost, says who is a member.

Without Ray: `spawn` gives it processes to supervise (`cluster.ray_process` in a deployment, fakes in tests), and
`cluster.actors` hosts it. It sees no prompt, no token and no page. All of it runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cluster.canary import Judge
from cluster.drain import TIMEOUT_S, Drain
from cluster.events import SCALED, EventLog
from cluster.examination import examine
from cluster.findings import Finding
from cluster.flip import Flip
from cluster.heartbeats import OnDoubt
from cluster.pool import Incarnation, Pool, Slot, Start, Stop, WorkerState
from cluster.proving import Poisoned
from cluster.record import FIRST_RECORD, Record
from cluster.revisions import check_upgrade, read_revision
from cluster.scaling import Scaling
from cluster.upgrade import ENDED, Plan, Upgrade, cohort_of
from cluster.victims import choose_victims
from penstock import wire
from penstock.config import ServeConfig
from penstock.errors import CheckpointError, ConfigError, InvalidInput, PenstockError, Unavailable
from penstock.grpc_server import Dial, make_channel
from penstock.types import Epoch, Member, Role, WorkerId
from penstock.v1 import admin_pb2, worker_pb2

log = logging.getLogger(__name__)

ROUTER = "router"
STOP_TIMEOUT_S = 10.0  # of one process's orderly stop, before it is killed
MAX_START_FAILURES = 3
CANARY_PAUSE_S = 1.0  # after one that failed
_HOPELESS = (CheckpointError, ConfigError, InvalidInput)  # another try would end alike


@dataclass(frozen=True, slots=True)
class Started:
    """What a process says of itself once it can serve."""

    epoch: Epoch
    address: str  # host:port of its gRPC server
    pid: int
    http_address: str = ""  # of a router
    public_address: str = ""  # of a router's gRPC port; `address` is the one that it is supervised by
    encrypted: bool = False  # both of them


class SupervisedProcess(Protocol):
    """One incarnation of a worker or a router, wherever it runs."""

    async def place(self) -> None:
        """Returns once it has what it needs to run, however long that takes."""
        ...

    async def start(self) -> Started:
        """Returns once a request would succeed. Raises PenstockError."""
        ...

    async def watch(self, on_load: Callable[[worker_pb2.Load], None], on_doubt: OnDoubt) -> str:
        """Returns the reason once the process is dead or no longer answers; while that is not sure, it is in doubt."""
        ...

    async def flip(self, incarnation: Incarnation) -> Started:
        """Serves in the other role from now on, as this incarnation. Raises PenstockError; it is of no use then."""
        ...

    async def stop(self) -> None:
        """Lets it end in order."""
        ...

    async def kill(self) -> None:
        """Leaves nothing of it, whatever its state; may be called twice."""
        ...


@dataclass(frozen=True, slots=True)
class Found:
    """A process that an earlier controller made."""

    incarnation: Incarnation
    process: SupervisedProcess
    started: Started | None  # what it says of itself; None: it is not ready, or does not answer


class Proves(Protocol):
    """Asks a worker for an answer that is known."""

    judge: Judge

    async def prove(self, member: Member, decode: Sequence[Member], prefill: Sequence[Member]) -> None:
        """Raises Poisoned where the answer is wrong, or Unavailable where there is none."""
        ...


Spawn = Callable[[Incarnation], SupervisedProcess]
Save = Callable[[Record], None]  # must not block
Canary = Callable[[str], Awaitable[None]]  # one real request to the router at this address; raises PenstockError


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a launcher follows."""

    version: int
    status: admin_pb2.StatusResponse
    failure: PenstockError | None = None  # the deployment can never become ready
    stopped: bool = False


class Controller:
    def __init__(
        self,
        config: ServeConfig,
        spawn: Spawn,
        canary: Canary,
        dial: Dial = make_channel,
        record: Record = FIRST_RECORD,
        save: Save = lambda record: None,
        proving: Proves | None = None,
    ) -> None:
        """`dial` opens channels to workers; `proving` asks each of them for an answer that is known. `record` is what
        the controller before this one left, one generation up; `save` gets each later one."""
        self._config = _with_model(config, record.model) if record.model else config
        self._next_config = self._config  # of the new workers of an upgrade
        self._upgrade: Upgrade | None = None
        self._shares: Mapping[str, float] = {}  # of new requests, by cohort, while two serve
        self._record, self._save = record, save
        self._proving = proving
        self._spawn = spawn
        self._canary = canary
        self._dial = dial
        self._pools = {
            name: Pool(name, record.replicas.get(name, replicas), record.numbers_of(name))
            for name, replicas in (
                (Role.PREFILL.value, config.prefill_pool.replicas),
                (Role.DECODE.value, config.decode_pool.replicas),
                (ROUTER, config.routers),
            )
        }
        self._tasks: dict[Incarnation, asyncio.Task[None]] = {}
        self._loads: dict[Incarnation, worker_pb2.Load] = {}
        self._endpoints: dict[WorkerId, tuple[str, str]] = {}  # of each router
        self._proven: set[Incarnation] = set()  # routers whose canary succeeded
        self._reported: dict[Epoch, asyncio.Event] = {}  # of members whose next report is awaited
        self.events = EventLog(time.time)
        self._drains: dict[Incarnation, Drain] = {}
        self._drain_tasks: set[asyncio.Task[None]] = set()
        self._flips: dict[Incarnation, Flip] = {}  # by what comes of it, until that is ready or lost
        self._handed: dict[Incarnation, asyncio.Future[SupervisedProcess]] = {}  # processes that somebody else takes on
        self._canary_task: asyncio.Task[None] | None = None
        self._main: asyncio.Task[None] | None = None
        self._started_s = time.monotonic()
        self._version = record.first_version
        self._members: tuple[Member, ...] = ()
        self._routers: Counter[str] = Counter()  # watches of each router's peer address
        self._membership_version = record.first_version + 1
        self._was_ready = record.was_ready
        self._changed = asyncio.Event()
        self._failure: PenstockError | None = None
        self._stopping = self._stopped = False
        self._load_times_s: dict[Incarnation, float] = {}
        self._scaler: asyncio.Task[None] | None = None
        self.scaling = Scaling(config, self)

    def adopt(self, found: Sequence[Found]) -> None:
        """Before `start`: takes over what runs already. What was ready is a member at once, so that no router sees a
        membership without it."""
        for one in found:
            pool = self._pools[one.incarnation.pool_name]
            pool.adopt(one.incarnation, self._record.num_restarts.get(one.incarnation.worker_id, 0))
            if one.started is not None:
                self._note_ready(pool, one.incarnation, one.started)
                if pool.name == ROUTER and self._was_ready:
                    self._proven.add(one.incarnation)
            self._tasks[one.incarnation] = asyncio.create_task(self._supervise(one.incarnation, one))
        self._members = tuple(self._current_members())
        for worker_id, replaced in self._record.leaving.items():
            self._resume_drain(WorkerId(worker_id), replaced=replaced)

    def _resume_drain(self, worker_id: WorkerId, *, replaced: bool) -> None:
        pool = self._pools[Incarnation(worker_id, 0).pool_name]
        if any(slot.worker_id == worker_id for slot in pool.ready()):
            pool.set_replicas(pool.replicas + (not replaced))  # as it was before the drain began
            try:
                self.drain(worker_id, replaced=replaced)
            except InvalidInput as error:
                log.warning("a drain that was under way does not go on: %s", error.message)

    def start(self) -> None:
        """Begins to bring the pools to their size; returns at once."""
        self._main = asyncio.create_task(self._reconcile_for_ever())
        if self.scaling.is_on:
            self._scaler = asyncio.create_task(self.scaling.run(), name="autoscaler")

    async def _reconcile_for_ever(self) -> None:
        while True:
            changed = self._changed
            now_s = time.monotonic()
            actions = [action for pool in self._pools.values() for action in pool.reconcile(now_s)]
            for action in actions:
                if isinstance(action, Start):
                    self._tasks[action.incarnation] = asyncio.create_task(self._supervise(action.incarnation))
                elif isinstance(action, Stop):
                    self._tasks[action.incarnation].cancel()
            if actions:
                self._publish()
            self._check_canary()
            retries = [due_s for pool in self._pools.values() if (due_s := pool.next_retry_s()) is not None]
            timeout_s = max(0.0, min(retries) - time.monotonic()) if retries else None
            try:
                async with asyncio.timeout(timeout_s):
                    await changed.wait()
            except TimeoutError:
                continue

    async def _supervise(self, incarnation: Incarnation, found: Found | None = None) -> None:
        """One incarnation from start to loss. Cancelled: stops it in order."""
        pool = self._pools[incarnation.pool_name]
        flip = self._flips.get(incarnation)
        process = found.process if found else flip or self._spawn(incarnation)
        reason = "stopped"
        try:
            if found is None or found.started is None:
                await process.place()
                async with asyncio.timeout(self._config.start_timeout_s + (flip.patience_s if flip else 0.0)):
                    started = await process.start()
                await self._prove_first(incarnation, started)
                self._note_ready(pool, incarnation, started)
                self._publish()
                if flip is not None:
                    del self._flips[incarnation]
                    flip.finish()
                log.info("%s is ready at %s, epoch %d", incarnation.worker_id, started.address, started.epoch)
            reason = await self._live(process, incarnation)
        except asyncio.CancelledError:
            if incarnation in self._handed:
                self._handed[incarnation].set_result(process.process if isinstance(process, Flip) else process)
                reason = "serves in another role"
            else:
                await _stop_in_order(process)
            raise
        except Poisoned as error:
            reason = error.message
            pool.on_poisoned(incarnation, reason)
        except TimeoutError:
            reason = f"not ready within start_timeout_s = {self._config.start_timeout_s:g} s"
        except PenstockError as error:
            reason = error.message
            if not self._was_ready and isinstance(error, _HOPELESS):
                self._failure = error
        except Exception as error:
            log.exception("%s: supervision failed", incarnation.worker_id)
            reason = f"{type(error).__name__}: {error}"
        finally:
            self._take_report(incarnation, None)
            log.info("%s is lost: %s", incarnation.worker_id, reason)
            pool.on_lost(incarnation, reason)
            self._give_up_if_hopeless(pool, incarnation)
            self._publish()  # routers hear of it first, then the corpse is removed, then it is replaced
            if incarnation not in self._handed:
                await process.kill()
            if (flip := self._flips.pop(incarnation, None)) is not None:
                flip.fail(reason)
            self._tasks.pop(incarnation, None)
            pool.on_removed(incarnation, time.monotonic())
            self._publish()

    async def _prove_first(self, incarnation: Incarnation, started: Started) -> None:
        """Before anybody else asks it anything."""
        if self._proving is None or incarnation.pool_name == ROUTER:
            return
        self.on_progress(incarnation, "answers its first request")
        role = Role(incarnation.pool_name)
        while role is Role.PREFILL and not any(self._pools[Role.DECODE.value].ready()):
            await self._changed.wait()  # it can only be asked through a decode worker
        await self._prove(Member(incarnation.worker_id, started.epoch, role, started.address), self._proving)

    async def _prove(self, member: Member, proving: Proves) -> None:
        others = [one for one in self._current_members() if one.epoch != member.epoch]
        decode, prefill = ([one for one in others if one.role is role] for role in (Role.DECODE, Role.PREFILL))
        try:
            await proving.prove(member, decode, prefill)
        finally:
            self._keep_record()

    async def _live(self, process: SupervisedProcess, incarnation: Incarnation) -> str:
        """Why it ended. Raises Poisoned when it begins to answer wrongly."""
        life = process.watch(
            lambda load: self._take_report(incarnation, load), lambda doubt: self._on_doubt(incarnation, doubt)
        )
        if self._proving is None or incarnation.pool_name == ROUTER or not self._config.canary_interval_s:
            return await life
        watching = asyncio.create_task(life)
        proving = asyncio.create_task(self._prove_again(incarnation, self._proving))
        try:
            await asyncio.wait([watching, proving], return_when=asyncio.FIRST_COMPLETED)
            return watching.result() if watching.done() else await proving
        finally:
            watching.cancel()
            proving.cancel()

    async def _prove_again(self, incarnation: Incarnation, proving: Proves) -> str:
        """For ever. A question without an answer says nothing: leases tell whether it lives."""
        while True:
            await asyncio.sleep(self._config.canary_interval_s)
            member = next((one for one in self._members if one.worker_id == incarnation.worker_id), None)
            if member is None:
                continue  # it is doubted, or drained
            try:
                await self._prove(member, proving)
            except Poisoned:
                raise
            except PenstockError as error:
                log.info("%s: %s", incarnation.worker_id, error.message)

    def _note_ready(self, pool: Pool, incarnation: Incarnation, started: Started) -> None:
        pool.on_ready(incarnation, started.epoch, started.address, started.pid)
        if pool.name == ROUTER:
            schemes = ("grpcs", "https") if started.encrypted else ("grpc", "http")
            self._endpoints[incarnation.worker_id] = (
                f"{schemes[0]}://{started.public_address or started.address}",
                f"{schemes[1]}://{started.http_address}",
            )

    def _on_doubt(self, incarnation: Incarnation, reason: str) -> None:
        if self._pools[incarnation.pool_name].on_doubt(incarnation, reason):
            log.info("%s: %s", incarnation.worker_id, reason or "it answers again")
            self._publish()

    def _give_up_if_hopeless(self, pool: Pool, incarnation: Incarnation) -> None:
        """A process that never comes up ends a deployment that was never ready; later on it is tried for ever."""
        for slot in pool.slots:
            if slot.incarnation == incarnation and slot.failures_in_a_row >= MAX_START_FAILURES and not self._was_ready:
                failures = f"{slot.worker_id} failed {slot.failures_in_a_row} times to start"
                self._failure = self._failure or Unavailable(f"{failures}; the last time: {slot.detail}")

    def _check_canary(self) -> None:
        """Sends a real request through every new router before the deployment calls itself ready."""
        unproven = [slot for slot in self._pools[ROUTER].ready() if slot.incarnation not in self._proven]
        idle = self._canary_task is None or self._canary_task.done()
        can_answer = any(self._pools[Role.DECODE.value].ready())
        if not self._was_ready:
            can_answer = can_answer and all(pool.is_complete for pool in self._pools.values())
        if unproven and can_answer and idle and not self._stopping:
            router = unproven[0]
            self._canary_task = asyncio.create_task(self._run_canary(router.incarnation, router.address))

    async def _run_canary(self, router: Incarnation, address: str) -> None:
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await self._canary(address)
        except (PenstockError, TimeoutError) as error:
            reason = f"its first request failed: {error or 'no answer in time'}"
            log.warning("%s: %s", router.worker_id, reason)
            if not self._was_ready:
                self._failure = Unavailable(f"the deployment started, but {reason}")
            await asyncio.sleep(CANARY_PAUSE_S)
        else:
            self._proven.add(router)
            self._was_ready = True
        self._publish()

    def on_unplaced(self, incarnation: Incarnation, reason: str) -> None:
        self._pools[incarnation.pool_name].on_unplaced(incarnation, reason)
        self._publish()

    def on_progress(self, incarnation: Incarnation, detail: str) -> None:
        self._pools[incarnation.pool_name].on_progress(incarnation, detail)
        self._publish()

    def _publish(self) -> None:
        """Counts the change and wakes everyone who follows."""
        self.events.observe((slot for pool in self._pools.values() for slot in pool.slots), self.is_ready)
        members = tuple(self._current_members())
        if members != self._members:
            self._members = members
            self._membership_version += 1
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()
        self._keep_record()

    def _keep_record(self) -> None:
        if self._stopping:
            return
        slots = [slot for pool in self._pools.values() for slot in pool.slots]
        replicas = {pool.name: pool.replicas for pool in self._pools.values()}
        leaving: dict[str, bool] = {slot.worker_id: slot.is_replaced for slot in slots if slot.is_leaving}
        model = self._config.model
        if (upgrade := self._current_upgrade()) is not None:
            # A successor goes on with what was decided, and takes back what was not.
            roles = list(Role)
            replicas |= {role.value: upgrade.replicas[role] for role in roles}
            workers = [slot.worker_id for slot in slots if slot.incarnation.pool_name in roles]
            leaving |= {one: False for one in workers if (one in upgrade.new) is not upgrade.decided}
            model = self._next_config.model if upgrade.decided else model
        record = replace(
            self._record,
            was_ready=self._was_ready,
            model=model,
            replicas=replicas,
            last_numbers={one: number for pool in self._pools.values() for one, number in pool.last_numbers.items()},
            num_restarts={slot.worker_id: slot.num_restarts for slot in slots},
            canary=self._proving.judge.to_json() if self._proving else "",
            leaving=leaving,
        )
        if record != self._record:
            self._record = record
            self._save(record)

    def _current_members(self) -> list[Member]:
        return [
            Member(slot.worker_id, slot.epoch, role, slot.address, cohort_of(self._current_upgrade(), slot.worker_id))
            for role in Role
            for slot in self._pools[role.value].ready()
        ]

    @property
    def is_ready(self) -> bool:
        """A request would succeed now: the router answers and has a decode worker to send it to."""
        router_proven = any(slot.incarnation in self._proven for slot in self._pools[ROUTER].ready())
        return router_proven and any(self._pools[Role.DECODE.value].ready())

    def status(self) -> admin_pb2.StatusResponse:
        return admin_pb2.StatusResponse(
            model=self._config.model_name,
            ready=self.is_ready,
            workers=[self._worker_status(pool, slot) for pool in self._pools.values() for slot in pool.slots],
            endpoints=[one for worker_id in sorted(self._endpoints) for one in self._endpoints[worker_id]],
            uptime_s=time.monotonic() - self._started_s,
        )

    def _worker_status(self, pool: Pool, slot: Slot) -> admin_pb2.WorkerStatus:
        status = admin_pb2.WorkerStatus(
            member=admin_pb2.Member(worker_id=slot.worker_id, epoch=slot.epoch, role=pool.name, address=slot.address),
            state=slot.state.value,
            pid=slot.pid,
            num_restarts=slot.num_restarts,
            detail=slot.detail,
        )
        load = self._loads.get(slot.incarnation)
        if load is not None and slot.state in (WorkerState.READY, WorkerState.DRAINING):
            status.load.CopyFrom(load)
        return status

    # Drains.

    def drain(self, worker_id: str, timeout_s: float = TIMEOUT_S, *, replaced: bool = False) -> Drain:
        """Begins to empty a worker and to end it, or joins in where that is under way. Raises InvalidInput."""
        slot = self._find_worker(worker_id)
        if slot.incarnation in self._drains:
            return self._drains[slot.incarnation]
        self._check_drain(slot)
        return self._drain_and_end(slot, timeout_s, replaced=replaced)

    def _check_drain(self, slot: Slot) -> None:
        """Raises InvalidInput."""
        worker_id, role = slot.worker_id, Role(slot.incarnation.pool_name)
        if slot.state is not WorkerState.READY:
            raise InvalidInput("worker_id", f"{worker_id} is {slot.state.value}; only a ready worker can be drained")
        if role is Role.DECODE and sum(1 for _ in self._pools[role.value].ready()) == 1:
            raise InvalidInput(
                "worker_id", f"{worker_id} is the only decode worker that is ready; without one nothing is served"
            )

    def _drain_and_end(self, slot: Slot, timeout_s: float, *, replaced: bool, at_once: bool = False) -> Drain:
        drain = self._begin_drain(slot, timeout_s, replaced=replaced, at_once=at_once)
        self._keep(self._end_when_empty(drain, slot.incarnation))
        return drain

    def _begin_drain(self, slot: Slot, timeout_s: float, *, replaced: bool, at_once: bool = False) -> Drain:
        role = Role(slot.incarnation.pool_name)
        member = Member(slot.worker_id, slot.epoch, role, slot.address)
        drain = Drain(member, timeout_s, self._config.decode.max_batch_sequences, self, self._dial)
        self._drains[slot.incarnation] = drain
        self._pools[role.value].drain(slot.incarnation, replaced=replaced, at_once=at_once)
        self._publish()  # routers choose it no more
        return drain

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._drain_tasks.add(task)
        task.add_done_callback(self._drain_tasks.discard)

    async def _end_when_empty(self, drain: Drain, incarnation: Incarnation) -> None:
        log.info("%s is drained", incarnation.worker_id)
        try:
            await drain.run()
            supervision = self._tasks.get(incarnation)
            if supervision is not None:
                supervision.cancel()
                await asyncio.wait([supervision])
        finally:
            drain.end()
            del self._drains[incarnation]

    def replicas(self, pool_name: str) -> int:
        """How many workers a pool should have. Raises InvalidInput."""
        if pool_name not in list(Role):
            raise InvalidInput("pool", f"is {pool_name!r}; give one of {', '.join(Role)}")
        return self._pools[pool_name].replicas

    def scale(
        self, pool_name: str, replicas: int, timeout_s: float = TIMEOUT_S, by: str = "an operator"
    ) -> list[WorkerId]:
        """Sets how many workers a pool should have; returns those that are drained for it. Raises InvalidInput."""
        before = self.replicas(pool_name)
        self._check_no_upgrade("replicas")
        if pool_name == Role.DECODE and replicas < 1:
            raise InvalidInput("replicas", "is 0 for the decode pool; without a decode worker nothing is served")
        pool = self._pools[pool_name]
        loads = {incarnation.worker_id: load for incarnation, load in self._loads.items()}
        draining = []
        for slot in choose_victims(pool.slots, loads, before - replicas):
            if slot.state is WorkerState.READY:
                self.drain(slot.worker_id, timeout_s)
                draining.append(slot.worker_id)
        pool.set_replicas(replicas)  # of those that are left, the pool lets go of none that is ready
        self.events.note(pool_name, SCALED, f"from {before} to {replicas} workers by {by}")
        self._publish()
        return draining

    def flip(self, worker_id: str, role: Role, timeout_s: float = TIMEOUT_S) -> Flip:
        """Begins to empty a worker that then serves in the other role, or joins in where that is under way: one replica
        goes from pool to pool. Raises InvalidInput."""
        slot = self._find_worker(worker_id)
        known = next((one for one in self._flips.values() if one.source.epoch == slot.epoch), None)
        if known is not None and slot.epoch:
            return known
        if role.value == slot.incarnation.pool_name:
            raise InvalidInput("role", f"is {role.value}, which {worker_id} has already; give the other one")
        self._check_no_upgrade("role")
        if self._config.engine_config(Role.PREFILL) != self._config.engine_config(Role.DECODE):
            raise InvalidInput(
                "role",
                "cannot change: the pools' engines differ; make their `engine` tables alike",
            )
        self._check_drain(slot)
        source = slot.incarnation
        drain = self._begin_drain(slot, timeout_s, replaced=False)
        target = self._pools[role.value].take_over(f"comes from {worker_id} once that is empty")

        async def take() -> SupervisedProcess | None:
            try:
                return await self._take_process(source)
            finally:
                self._drains.pop(source, None)

        flip = self._flips[target] = Flip(target, drain, timeout_s, take)
        self._tasks[target] = asyncio.create_task(self._supervise(target))
        self._publish()
        return flip

    # Upgrades, and `upgrade.Fleet`.

    def config_of(self, incarnation: Incarnation) -> ServeConfig:
        """What a process is made of."""
        upgrade = self._current_upgrade()
        is_new = upgrade is not None and incarnation.worker_id in upgrade.new
        return self._next_config if is_new else self._config

    def _current_upgrade(self) -> Upgrade | None:
        return self._upgrade if self._upgrade and self._upgrade.progress.stage not in ENDED else None

    def _check_no_upgrade(self, field: str) -> None:
        if self._current_upgrade() is not None:
            raise InvalidInput(field, "cannot change during an upgrade; wait for its end, or abort it")

    def abort_upgrade(self) -> Upgrade:
        """Raises InvalidInput where there is none."""
        upgrade = self._current_upgrade()
        if upgrade is None:
            raise InvalidInput("abort", "finds no upgrade under way")
        upgrade.abort("an operator aborted it")
        self._publish()
        return upgrade

    async def upgrade(self, plan: Plan) -> Upgrade:
        """Begins to replace every worker, or joins in where the same is under way. Raises CheckpointError for a folder
        that cannot be served, and InvalidInput."""
        plan = replace(plan, model=plan.model or self._config.model)
        old, new = await asyncio.gather(
            asyncio.to_thread(read_revision, self._config.model), asyncio.to_thread(read_revision, plan.model)
        )
        check_upgrade(old, new, plan.model)
        if (running := self._current_upgrade()) is not None:
            if running.plan.model != plan.model:
                raise InvalidInput("model", f"is {plan.model!r}; an upgrade to {running.plan.model!r} is under way")
            return running
        if self._drains:
            raise InvalidInput("model", "cannot change while workers are drained; wait for their end")
        self._next_config = _with_model(self._config, plan.model)
        self._upgrade = Upgrade(plan, self)
        self._keep(self._run_upgrade(self._upgrade))
        return self._upgrade

    async def _run_upgrade(self, upgrade: Upgrade) -> None:
        await upgrade.run()
        if upgrade.decided:
            self._config = self._next_config
        self._publish()

    def slots(self, role: Role) -> list[Slot]:
        return self._pools[role.value].slots

    def load_of_worker(self, worker_id: WorkerId) -> worker_pb2.Load | None:
        return self._loads.get(self._find_worker(worker_id).incarnation)

    def grow(self, role: Role) -> WorkerId:
        incarnation = self._pools[role.value].take_over("beside the old ones")
        self._tasks[incarnation] = asyncio.create_task(self._supervise(incarnation))  # asks `config_of` later on
        return incarnation.worker_id

    def restore(self, role: Role, replicas: int) -> None:
        pool, upgrade = self._pools[role.value], self._upgrade
        staying = [slot.worker_id for slot in pool.slots if not slot.is_leaving]
        num_new = sum(upgrade is not None and one in upgrade.new for one in staying)
        pool.set_replicas(replicas + num_new)
        self._publish()

    def let_go(self, worker_id: WorkerId, timeout_s: float) -> Drain | None:
        slot = self._find_worker(worker_id)
        if slot.state is WorkerState.READY:
            return self._drain_and_end(slot, timeout_s, replaced=False)
        stop = self._pools[slot.incarnation.pool_name].give_up(worker_id)
        if stop is not None:
            self._tasks[stop.incarnation].cancel()
        self._publish()
        return None

    def set_shares(self, shares: Mapping[str, float]) -> None:
        if shares != self._shares:
            self._shares = dict(shares)
            self._membership_version += 1
            self._publish()

    async def next_change(self) -> None:
        await self._changed.wait()

    async def _take_process(self, incarnation: Incarnation) -> SupervisedProcess | None:
        """Out of its supervision, alive; None where it is gone already."""
        supervision = self._tasks.get(incarnation)
        if supervision is None or incarnation in self._handed:
            return None
        handed = self._handed[incarnation] = asyncio.get_running_loop().create_future()
        supervision.cancel()
        await asyncio.wait([supervision])
        del self._handed[incarnation]
        return handed.result() if handed.done() else None

    # `scaling.Deployment`

    def loads(self) -> Mapping[Incarnation, tuple[worker_pb2.Load, float]]:
        return {one: (load, self._load_times_s[one]) for one, load in self._loads.items()}

    def routers(self) -> list[str]:
        return sorted(+self._routers)

    def resize(self, pool_name: str, replicas: int, by: str) -> None:
        self.scale(pool_name, replicas, by=by)

    def change_role(self, worker_id: WorkerId, role: Role) -> None:
        self.flip(worker_id, role)

    def examine(self, *, transfers: bool) -> AsyncIterator[Finding]:
        """What is wrong with the workers that are members now, and with the ways between them."""
        return examine(self._members, self._dial, transfers=transfers)

    def _find_worker(self, worker_id: str) -> Slot:
        workers = {slot.worker_id: slot for role in Role for slot in self._pools[role.value].slots}
        if worker_id not in workers:
            raise InvalidInput("worker_id", f"is {worker_id!r}; the workers are {', '.join(sorted(workers))}")
        return workers[WorkerId(worker_id)]

    # `drain.View`

    def is_here(self, member: Member) -> bool:
        slot = self._slot_of(member)
        return slot is not None and slot.state in (WorkerState.READY, WorkerState.DRAINING)

    def load_of(self, member: Member) -> worker_pb2.Load | None:
        slot = self._slot_of(member)
        return self._loads.get(slot.incarnation) if slot else None

    def _slot_of(self, member: Member) -> Slot | None:
        return next((one for one in self._pools[member.role.value].slots if one.epoch == member.epoch), None)

    def decode_members(self) -> list[Member]:
        return [member for member in self._members if member.role is Role.DECODE]

    async def next_report(self, member: Member) -> None:
        if self.is_here(member):
            await self._reported.setdefault(member.epoch, asyncio.Event()).wait()

    def _take_report(self, incarnation: Incarnation, load: worker_pb2.Load | None) -> None:
        if load is not None:
            self._loads[incarnation] = load
            self._load_times_s[incarnation] = time.monotonic()
        else:
            self._loads.pop(incarnation, None)
            self._load_times_s.pop(incarnation, None)
        slots = self._pools[incarnation.pool_name].slots
        slot = next((slot for slot in slots if slot.incarnation == incarnation), None)
        if slot is not None and load is not None and load.leaving and slot.state is WorkerState.READY:
            log.info("%s was told to end: it is emptied and replaced", incarnation.worker_id)
            self._drain_and_end(slot, self._config.drain_s, replaced=True, at_once=True)
        epoch = slot.epoch if slot is not None else None
        if epoch is not None and (waiting := self._reported.pop(epoch, None)) is not None:
            waiting.set()

    async def watch_membership(self, router: str = "") -> AsyncIterator[admin_pb2.Membership]:
        """The whole membership now and after each change, until the controller stops.

        A watching router's peer address is part of it for as long as it watches.
        """
        sent = 0
        self._note_router(router, 1)
        try:
            while not self._stopped:
                changed = self._changed
                if sent != self._membership_version:
                    sent = self._membership_version
                    members = [wire.member_to_wire(one) for one in self._members]
                    routers = sorted(+self._routers)
                    yield admin_pb2.Membership(version=sent, members=members, routers=routers, shares=self._shares)
                await changed.wait()
        finally:
            self._note_router(router, -1)

    def _note_router(self, router: str, change: int) -> None:
        if router:
            self._routers[router] += change
            self._membership_version += 1
            self._publish()

    async def wait(self, version: int, timeout_s: float) -> Snapshot:
        """The state once it is newer than `version`, or after `timeout_s` whatever it is."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._version <= version and not self._stopped:
                    await self._changed.wait()
        except TimeoutError:
            pass  # a long poll that saw no change answers with what there is
        return Snapshot(self._version, self.status(), self._failure, self._stopped)

    async def stop(self) -> None:
        """Ends the router, then the workers; everything is gone when it returns. May be called twice."""
        if self._stopping:
            while not self._stopped:
                await self._changed.wait()
            return
        self._stopping = True
        self._save(replace(self._record, stopping=True))  # a successor would go on with it
        for task in (self._main, self._scaler, self._canary_task, *self._drain_tasks):
            if task:
                task.cancel()
        for names in ([ROUTER], [role.value for role in Role]):
            for pool in (self._pools[name] for name in names):
                pool.set_replicas(0)
                pool.reconcile(time.monotonic())
            tasks = [task for key, task in self._tasks.items() if key.pool_name in names]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._stopped = True
        self._publish()
        self.events.close()


def _with_model(config: ServeConfig, model: str) -> ServeConfig:
    """Under the name that callers know."""
    return config.model_copy(update={"model": model, "served_model": config.model_name})


async def _stop_in_order(process: SupervisedProcess) -> None:
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.stop()
    except (TimeoutError, PenstockError) as error:
        log.warning("an orderly stop failed (%s); killing it", error or "out of time")
