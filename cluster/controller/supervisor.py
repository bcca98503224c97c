"""Supervises each incarnation from its start to its loss: started, proven by the canary, watched, lost, removed.

Owns one task per incarnation. Each event goes to the owner of what it changes: states to the pools, loads to the
reports, a router's endpoints to the status, errors to readiness.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.controller.load_reports import LoadReportStore
from cluster.controller.membership import MembershipPublisher
from cluster.controller.status import StatusReporter
from cluster.controller.supervised_process import FoundProcess, Started, SupervisedProcess
from cluster.health.canary_check import CanaryRunner, WrongAnswer
from cluster.health.gone_workers import GoneWorkers
from cluster.health.readiness import Readiness
from cluster.health.silence_policy import DOUBT_AFTER_S, TICK_S
from cluster.lifecycle.flip import RoleFlip
from cluster.pools.pool import ROUTER, Incarnation, Pools, WorkerState
from cluster.pools.spares import REPLACE_AFTER_S, Spares
from cluster.pools.weight_change import ApplyWeights, PrepareWeights, WeightChange
from penstock.config import LoadedWeightsConfig
from penstock.errors import PenstockError, Unavailable
from penstock.types import PauseMode
from penstock.v1 import worker_pb2

log = logging.getLogger(__name__)

DISTRUST_TIMEOUT_S = (
    10.0  # for the keeper of a worker's machine to answer, before a worker that answers wrongly is killed
)
STOP_TIMEOUT_S = 10.0  # of one process's orderly stop, before it is killed


@dataclass(frozen=True, slots=True, eq=False)
class _Pause:
    """A worker's pause for new weights."""

    change: ApplyWeights
    over: asyncio.Future[PenstockError | None]  # gets what failed


class Supervisor:
    def __init__(
        self,
        pools: Pools,
        reports: LoadReportStore,
        status: StatusReporter,
        readiness: Readiness,
        spares: Spares,
        membership: MembershipPublisher,
        canary: CanaryRunner | None,
        gone: GoneWorkers,
        obtain: Callable[[Incarnation], SupervisedProcess],
        start_timeout_s: float,
        weights: Callable[[Incarnation], LoadedWeightsConfig | None],
    ) -> None:
        """`obtain` makes the process of a new incarnation, or takes a spare for it. `weights` are those that a worker
        must have."""
        self._pools = pools
        self._reports = reports
        self._status = status
        self._readiness = readiness
        self._spares = spares
        self._membership = membership
        self._canary = canary
        self._gone = gone
        self._obtain = obtain
        self._start_timeout_s = start_timeout_s
        self._weights = weights
        self._tasks: dict[Incarnation, asyncio.Task[None]] = {}
        self._silent: dict[Incarnation, asyncio.Event] = {}  # set while a worker is silent
        self._grace_s = 0.0
        self._released: dict[Incarnation, asyncio.Future[SupervisedProcess]] = {}  # processes that a flip takes
        self._withdrawing: dict[Incarnation, asyncio.Task[None]] = {}
        self._processes: dict[Incarnation, SupervisedProcess] = {}
        self._asked: dict[Incarnation, asyncio.Future[str | _Pause]] = {}  # what ends the watch of a worker

    def begin(self, incarnation: Incarnation, found: FoundProcess | None = None, flip: RoleFlip | None = None) -> None:
        """Begins to supervise the `found` process, the one that results from `flip`, or one that is obtained later.
        Does nothing for a worker that is supervised: it had its place before its turn."""
        if incarnation not in self._tasks:
            self._tasks[incarnation] = asyncio.create_task(self._supervise(incarnation, found, flip))

    def cancel(self, incarnation: Incarnation) -> None:
        """Begins to stop a process cleanly. Does nothing for a worker that still waits for its turn."""
        if incarnation in self._tasks:
            self._tasks[incarnation].cancel()

    def withdraw(self, incarnation: Incarnation) -> None:
        """Begins to withdraw a newcomer's request for a place; it then waits for its turn again."""
        if incarnation in self._tasks and incarnation not in self._withdrawing:
            self._withdrawing[incarnation] = asyncio.create_task(self._withdraw(incarnation))

    async def _withdraw(self, incarnation: Incarnation) -> None:
        await self.end(incarnation)
        self._tasks.pop(incarnation, None)
        self._pools.of(incarnation).withdraw(incarnation)
        del self._withdrawing[incarnation]
        self._membership.publish()

    async def end(self, incarnation: Incarnation) -> None:
        """Stops a process cleanly and returns once nothing of it is left."""
        supervision = self._tasks.get(incarnation)
        if supervision is not None:
            supervision.cancel()
            await asyncio.wait([supervision])

    async def end_pools(self, names: list[str], grace_s: float = 0.0) -> None:
        """Ends all processes of these pools; each may take `grace_s` to finish its streams."""
        self._grace_s = grace_s
        tasks = [task for incarnation, task in self._tasks.items() if incarnation.pool_name in names]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def change_weights(self, incarnation: Incarnation, change: WeightChange) -> None:
        """Prepares or discards weights at a worker that serves on. Raises PenstockError."""
        process = self._processes.get(incarnation)
        if process is None:
            raise Unavailable("it has ended")
        await process.change_weights(change)

    async def apply_weights(self, incarnation: Incarnation, change: ApplyWeights) -> None:
        """Puts prepared weights in force at a worker, which is paused meanwhile, and lost if that fails. Raises
        PenstockError."""
        asked = self._asked.get(incarnation)
        if asked is None or asked.done():
            raise Unavailable("it has ended")
        pause = _Pause(change, asyncio.get_running_loop().create_future())
        asked.set_result(pause)
        ends: list[asyncio.Future[Any]] = [pause.over, self._tasks[incarnation]]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not pause.over.done():
            raise Unavailable("it ended while its weights were replaced")
        if (error := pause.over.result()) is not None:
            raise error

    def lose(self, incarnation: Incarnation, reason: str) -> None:
        """Gives a worker up, which is then replaced."""
        if (asked := self._asked.get(incarnation)) is not None and not asked.done():
            asked.set_result(reason)

    async def release(self, incarnation: Incarnation) -> SupervisedProcess | None:
        """Ends the supervision of a process and returns the process alive; None if it is gone already."""
        if incarnation not in self._tasks or incarnation in self._released:
            return None
        released = self._released[incarnation] = asyncio.get_running_loop().create_future()
        await self.end(incarnation)
        del self._released[incarnation]
        return released.result() if released.done() else None

    async def _supervise(self, incarnation: Incarnation, found: FoundProcess | None, flip: RoleFlip | None) -> None:
        """Follows a process from its start to its loss. If cancelled, stops it cleanly."""
        process = found.process if found else flip or self._obtain(incarnation)
        reason, planned = "", False
        self._processes[incarnation] = process
        try:
            if found is None or found.started is None:
                await self._bring_up(process, incarnation, flip)
            while isinstance(end := await self._watch(process, incarnation), _Pause):
                await self._replace_weights(process, incarnation, end)
            reason = end
        except asyncio.CancelledError:
            planned = True
            if incarnation in self._released:
                self._released[incarnation].set_result(process.process if isinstance(process, RoleFlip) else process)
            elif incarnation not in self._withdrawing:
                await _stop_in_order(process, self._grace_s)
            raise
        except WrongAnswer as error:
            reason = error.message
            self._pools.of(incarnation).on_wrong_answer(incarnation, reason)
            await _distrust(process, incarnation)
        except TimeoutError:
            reason = f"not ready within start_timeout_s = {self._start_timeout_s:g} s"
        except PenstockError as error:
            reason = error.message
            self._readiness.on_error(error)
        except Exception as error:
            log.exception("%s: supervision failed", incarnation.worker_id)
            reason = f"{type(error).__name__}: {error}"
        finally:
            del self._processes[incarnation]
            if incarnation in self._withdrawing:
                await process.kill()
            else:
                await self._remove(process, incarnation, flip, reason, planned=planned)

    async def _bring_up(self, process: SupervisedProcess, incarnation: Incarnation, flip: RoleFlip | None) -> None:
        if incarnation.pool_name == ROUTER and incarnation.place > 0 and not self._readiness.was_ready:
            # The first answer needs one router; the others would only take the cores of what starts.
            self._on_unplaced(incarnation, "starts once the first router serves")
            while not self._readiness.was_ready:
                await self._membership.next_change()
        await process.place(lambda reason: self._on_unplaced(incarnation, reason))
        self._pools.of(incarnation).on_placed(incarnation)
        self._membership.publish()
        while self._pools.is_waiting(incarnation):
            await self._membership.next_change()
        async with asyncio.timeout(self._start_timeout_s + (flip.patience_s if flip else 0.0)):
            started = await process.start()
        self._pools.of(incarnation).on_loaded(incarnation)
        started = await self._prove(process, incarnation, started)
        self.note_ready(incarnation, started)
        self._membership.publish()
        if flip is not None:
            flip.finish()
        log.info("%s is ready at %s, epoch %d", incarnation.worker_id, started.address, started.epoch)

    async def _prove(self, process: SupervisedProcess, incarnation: Incarnation, started: Started) -> Started:
        """Returns once the canary has passed with the weights that a worker must have: they may have been updated while
        it was starting. Raises WrongAnswer, or PenstockError."""
        if incarnation.pool_name == ROUTER:
            return started
        while True:
            wanted = self._weights(incarnation)
            if wanted is not None and started.weights_version < wanted.version:
                async with asyncio.timeout(self._start_timeout_s):
                    await process.change_weights(PrepareWeights(wanted))
                    started = await process.change_weights(ApplyWeights(PauseMode.KEEP, 0.0))
            if self._canary is not None:
                await self._canary.check_first(incarnation, started)
            if self._weights(incarnation) == wanted:
                return started

    async def _replace_weights(self, process: SupervisedProcess, incarnation: Incarnation, pause: _Pause) -> None:
        """Pauses a worker for new weights. Raises as `_prove`, or TimeoutError; the worker is then lost."""
        pool = self._pools.of(incarnation)
        pool.on_paused(incarnation, "its weights are replaced")
        self._reports.forget(incarnation)
        self._membership.publish()
        error: PenstockError | None = Unavailable("its supervision failed")
        try:
            async with asyncio.timeout(pause.change.timeout_s + self._start_timeout_s):
                started = await process.change_weights(pause.change)
                started = await self._prove(process, incarnation, started)
            error = None
        except TimeoutError:
            error = Unavailable(f"no answer within start_timeout_s = {self._start_timeout_s:g} s and the pause")
            raise error from None
        except PenstockError as failure:
            error = failure
            raise
        finally:
            if error is None:
                self.note_ready(incarnation, started)
                self._membership.publish()
            pause.over.set_result(error)
        log.info("%s has weights %d, epoch %d", incarnation.worker_id, started.weights_version, started.epoch)

    def note_ready(self, incarnation: Incarnation, started: Started) -> None:
        """Notes that the worker may get requests, or that the router takes them. The caller publishes."""
        pool = self._pools.of(incarnation)
        pool.on_ready(incarnation, started.epoch, started.address, started.pid, started.node, started.weights_version)
        if incarnation.pool_name == ROUTER:
            self._status.note_router(incarnation.worker_id, started)

    async def _watch(self, process: SupervisedProcess, incarnation: Incarnation) -> str | _Pause:
        """Returns why the process ended, or the pause that was asked for. Raises WrongAnswer when it begins to answer
        wrongly."""
        life = process.watch(
            lambda load: self._on_load(incarnation, load), lambda doubt: self._on_doubt(incarnation, doubt)
        )
        if incarnation.pool_name == ROUTER:
            return await life
        self._silent[incarnation] = asyncio.Event()
        asked = self._asked[incarnation] = asyncio.get_running_loop().create_future()
        ends: list[asyncio.Future[Any]] = [
            asyncio.create_task(life),
            asyncio.create_task(self._give_up_silent(incarnation)),
            asked,
        ]
        if self._canary is not None and self._canary.repeats:
            ends.append(asyncio.create_task(self._canary.check_repeatedly(incarnation)))
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            end: str | _Pause = next(task for task in ends if task.done()).result()
            return end
        finally:
            del self._silent[incarnation], self._asked[incarnation]
            for task in ends:
                task.cancel()

    async def _give_up_silent(self, incarnation: Incarnation) -> str:
        """Returns the reason once a worker was silent for REPLACE_AFTER_S and a spare is warm: it is then replaced
        before it counts as lost."""
        silent = self._silent[incarnation]
        while True:
            await silent.wait()
            try:
                async with asyncio.timeout(REPLACE_AFTER_S - DOUBT_AFTER_S):
                    while silent.is_set():
                        await self._membership.next_change()
            except TimeoutError:
                await asyncio.sleep(TICK_S)  # after a pause of this process, reads first what has arrived during it
                while silent.is_set():
                    if self._spares.has_warm(incarnation.pool_name):
                        return f"no sign of life for {REPLACE_AFTER_S:g} s, and a spare is warm"
                    await self._membership.next_change()

    def _on_unplaced(self, incarnation: Incarnation, reason: str) -> None:
        self._pools.of(incarnation).on_unplaced(incarnation, reason)
        self._membership.publish()

    def _on_load(self, incarnation: Incarnation, load: worker_pb2.Load) -> None:
        self._reports.note(incarnation, load)
        if load.leaving and self._pools.of(incarnation).on_ending(incarnation):
            self._membership.publish()

    def _on_doubt(self, incarnation: Incarnation, reason: str) -> None:
        if self._pools.of(incarnation).on_doubt(incarnation, reason):
            log.info("%s: %s", incarnation.worker_id, reason or "it answers again")
            if (silent := self._silent.get(incarnation)) is not None:
                silent.set() if reason else silent.clear()
            self._membership.publish()

    async def _remove(
        self,
        process: SupervisedProcess,
        incarnation: Incarnation,
        flip: RoleFlip | None,
        reason: str,
        *,
        planned: bool,
    ) -> None:
        """Removes a process that was lost or ended as planned in three steps: routers learn of it, the process is
        removed, it is replaced."""
        pool = self._pools.of(incarnation)
        if incarnation not in self._released:
            self._gone.on_lost(incarnation)
        self._reports.forget(incarnation)
        if planned:
            slot = self._pools.slot_of(incarnation)
            end = slot.planned_end if slot is not None else None
            log.info("%s ends as planned: %s", incarnation.worker_id, end or "its place went away")
            pool.on_ended(incarnation)
        else:
            log.info("%s is lost: %s", incarnation.worker_id, reason)
            pool.on_lost(incarnation, reason)
            self._readiness.on_lost(incarnation)
        if self._has_successor(incarnation):
            pool.on_removed(incarnation, time.monotonic())
        self._membership.publish()
        if incarnation not in self._released:
            await process.kill()
        if flip is not None and not flip.is_over:
            flip.fail(reason or "it was ended")
        self._tasks.pop(incarnation, None)
        pool.on_removed(incarnation, time.monotonic())
        self._membership.publish()

    def _has_successor(self, incarnation: Incarnation) -> bool:
        """Returns whether a warm spare can follow a lost worker, whose process need not be removed first: the spare has
        a reservation of its own."""
        slot = self._pools.slot_of(incarnation)
        is_lost = slot is not None and slot.state is WorkerState.LOST and not slot.is_leaving
        return is_lost and self._spares.has_warm(incarnation.pool_name)


async def _distrust(process: SupervisedProcess, incarnation: Incarnation) -> None:
    """Blocks for a few seconds at most. A failure is logged: the process is killed all the same."""
    try:
        async with asyncio.timeout(DISTRUST_TIMEOUT_S):
            await process.distrust()
    except (TimeoutError, PenstockError) as error:
        log.error("%s: others may inherit its pages: %s", incarnation.worker_id, str(error) or "out of time")


async def _stop_in_order(process: SupervisedProcess, grace_s: float) -> None:
    try:
        async with asyncio.timeout(grace_s + STOP_TIMEOUT_S):
            await process.stop(grace_s)
    except (TimeoutError, PenstockError) as error:
        log.warning("an orderly stop failed (%s); killing it", str(error) or "out of time")
