"""Supervises each incarnation from its start to its loss: started, proven, watched, lost, removed.

Owns the tasks that do so, one an incarnation. What becomes of it the pools are told; who must know more is called.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from cluster.examiner import Examiner
from cluster.flip import Flip
from cluster.heartbeats import DOUBT_AFTER_S
from cluster.pool import Incarnation, WorkerState
from cluster.pools import Pools
from cluster.proving import Poisoned
from cluster.readiness import Readiness
from cluster.spares import REPLACE_AFTER_S, Spares
from cluster.supervised import ROUTER, Found, Spawn, Started, SupervisedProcess
from penstock.errors import PenstockError
from penstock.v1 import worker_pb2

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0  # of one process's orderly stop, before it is killed


class Listener(Protocol):
    """Who else must know what happens."""

    def on_ready(self, incarnation: Incarnation, started: Started) -> None:
        """It may be given requests."""
        ...

    def on_report(self, incarnation: Incarnation, load: worker_pb2.Load | None) -> None:
        """None: it will say nothing more."""
        ...


class Supervision:
    def __init__(
        self,
        pools: Pools,
        spawn: Spawn,
        start_timeout_s: float,
        readiness: Readiness,
        examiner: Examiner | None,
        listener: Listener,
        publish: Callable[[], None],
        spares: Spares,
        next_change: Callable[[], Awaitable[None]],
    ) -> None:
        """`next_change` returns at the next call of `publish`, whosever it is."""
        self._pools = pools
        self._spawn = spawn
        self._start_timeout_s = start_timeout_s
        self._readiness = readiness
        self._examiner = examiner
        self._listener = listener
        self._publish = publish
        self._spares = spares
        self._next_change = next_change
        self._tasks: dict[Incarnation, asyncio.Task[None]] = {}
        self._doubts: dict[Incarnation, asyncio.Event] = {}  # set while a worker is silent
        self._grace_s = 0.0
        self._handed: dict[Incarnation, asyncio.Future[SupervisedProcess]] = {}  # processes that somebody else takes on

    def begin(self, incarnation: Incarnation, found: Found | None = None, flip: Flip | None = None) -> None:
        """Its process is the one that was `found`, comes of a `flip`, or is spawned once this returned."""
        self._tasks[incarnation] = asyncio.create_task(self._supervise(incarnation, found, flip))

    def cancel(self, incarnation: Incarnation) -> None:
        """Lets it end in order."""
        self._tasks[incarnation].cancel()

    async def end(self, incarnation: Incarnation) -> None:
        """Returns once nothing of it is left."""
        supervision = self._tasks.get(incarnation)
        if supervision is not None:
            supervision.cancel()
            await asyncio.wait([supervision])

    async def end_pools(self, names: list[str], grace_s: float = 0.0) -> None:
        """Each process may take `grace_s` for what is under way."""
        self._grace_s = grace_s
        tasks = [task for key, task in self._tasks.items() if key.pool_name in names]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def hand_over(self, incarnation: Incarnation) -> SupervisedProcess | None:
        """Its process out of its supervision, alive; None where it is gone already."""
        if incarnation not in self._tasks or incarnation in self._handed:
            return None
        handed = self._handed[incarnation] = asyncio.get_running_loop().create_future()
        await self.end(incarnation)
        del self._handed[incarnation]
        return handed.result() if handed.done() else None

    async def _supervise(self, incarnation: Incarnation, found: Found | None, flip: Flip | None) -> None:
        """From start to loss. Cancelled: stops it in order."""
        process = found.process if found else flip or self._spawn(incarnation)
        reason = "stopped"
        try:
            if found is None or found.started is None:
                await self._bring_up(process, incarnation, flip)
            reason = await self._live(process, incarnation)
        except asyncio.CancelledError:
            if incarnation in self._handed:
                self._handed[incarnation].set_result(process.process if isinstance(process, Flip) else process)
                reason = "serves in another role"
            else:
                await _stop_in_order(process, self._grace_s)
            raise
        except Poisoned as error:
            reason = error.message
            self._pools.of(incarnation).on_poisoned(incarnation, reason)
        except TimeoutError:
            reason = f"not ready within start_timeout_s = {self._start_timeout_s:g} s"
        except PenstockError as error:
            reason = error.message
            self._readiness.on_error(error)
        except Exception as error:
            log.exception("%s: supervision failed", incarnation.worker_id)
            reason = f"{type(error).__name__}: {error}"
        finally:
            await self._bury(process, incarnation, flip, reason)

    async def _bring_up(self, process: SupervisedProcess, incarnation: Incarnation, flip: Flip | None) -> None:
        await process.place()
        async with asyncio.timeout(self._start_timeout_s + (flip.patience_s if flip else 0.0)):
            started = await process.start()
        if self._examiner is not None and incarnation.pool_name != ROUTER:
            await self._examiner.prove_first(incarnation, started)
        self.note_ready(incarnation, started)
        self._publish()
        if flip is not None:
            flip.finish()
        log.info("%s is ready at %s, epoch %d", incarnation.worker_id, started.address, started.epoch)

    def note_ready(self, incarnation: Incarnation, started: Started) -> None:
        pool = self._pools.of(incarnation)
        pool.on_ready(incarnation, started.epoch, started.address, started.pid, started.node)
        self._listener.on_ready(incarnation, started)

    async def _live(self, process: SupervisedProcess, incarnation: Incarnation) -> str:
        """Why it ended. Raises Poisoned when it begins to answer wrongly."""
        life = process.watch(
            lambda load: self._listener.on_report(incarnation, load), lambda doubt: self._on_doubt(incarnation, doubt)
        )
        if incarnation.pool_name == ROUTER:
            return await life
        self._doubts[incarnation] = asyncio.Event()
        ends = [asyncio.create_task(life), asyncio.create_task(self._lose_patience(incarnation))]
        if self._examiner is not None and self._examiner.asks_again:
            ends.append(asyncio.create_task(self._examiner.prove_again(incarnation)))
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return next(one for one in ends if one.done()).result()
        finally:
            del self._doubts[incarnation]
            for one in ends:
                one.cancel()

    async def _lose_patience(self, incarnation: Incarnation) -> str:
        """Why it is given up before it counts as lost: it has been silent for long, and its stand-in is warm."""
        doubted = self._doubts[incarnation]
        while True:
            await doubted.wait()
            try:
                async with asyncio.timeout(REPLACE_AFTER_S - DOUBT_AFTER_S):
                    while doubted.is_set():
                        await self._next_change()
            except TimeoutError:
                while doubted.is_set():
                    if self._spares.has_warm(incarnation.pool_name):
                        return f"no sign of life for {REPLACE_AFTER_S:g} s, and a warm process stands ready"
                    await self._next_change()

    def _on_doubt(self, incarnation: Incarnation, reason: str) -> None:
        if self._pools.of(incarnation).on_doubt(incarnation, reason):
            log.info("%s: %s", incarnation.worker_id, reason or "it answers again")
            if (doubted := self._doubts.get(incarnation)) is not None:
                doubted.set() if reason else doubted.clear()
            self._publish()

    async def _bury(self, process: SupervisedProcess, incarnation: Incarnation, flip: Flip | None, reason: str) -> None:
        pool = self._pools.of(incarnation)
        self._listener.on_report(incarnation, None)
        log.info("%s is lost: %s", incarnation.worker_id, reason)
        pool.on_lost(incarnation, reason)
        self._readiness.on_lost(incarnation)
        if self._has_successor(incarnation):
            pool.on_removed(incarnation, time.monotonic())
        self._publish()  # routers hear of it first, then the corpse is removed, then it is replaced
        if incarnation not in self._handed:
            await process.kill()
        if flip is not None and not flip.is_over:
            flip.fail(reason)
        self._tasks.pop(incarnation, None)
        pool.on_removed(incarnation, time.monotonic())
        self._publish()

    def _has_successor(self, incarnation: Incarnation) -> bool:
        """Whether a process with a place of its own can follow a lost one, which then need not be gone first."""
        slot = self._pools.slot_of(incarnation)
        is_lost = slot is not None and slot.state is WorkerState.LOST and not slot.is_leaving
        return is_lost and self._spares.has_warm(incarnation.pool_name)


async def _stop_in_order(process: SupervisedProcess, grace_s: float) -> None:
    try:
        async with asyncio.timeout(grace_s + STOP_TIMEOUT_S):
            await process.stop(grace_s)
    except (TimeoutError, PenstockError) as error:
        log.warning("an orderly stop failed (%s); killing it", error or "out of time")
