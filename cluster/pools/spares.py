"""Keeps spares: warm processes with all imports done and device and weights ready, but no role yet. A starting worker
takes one over instead of importing for seconds, and another spare warms up.

Each spare holds its own reservation of a worker's whole share, so it occupies a place where a worker may run. It runs
the same program as the pool's workers, but has no address, epoch or requests until it takes a role, which works like a
flip. This module owns the processes until they are taken.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cluster.controller.event_log import EventLog
from cluster.controller.supervised_process import OnUnplaced, Started, SupervisedProcess
from cluster.pools.pool import SPARE, Incarnation, Pools
from cluster.pools.pool_policy import choose_num_spares
from cluster.pools.weight_change import WeightChange
from penstock.errors import PenstockError, Unavailable
from penstock.process.task_set import TaskSet
from penstock.types import Role, WorkerId
from penstock.v1 import admin_pb2

log = logging.getLogger(__name__)

TAKE_TIMEOUT_S = 10.0  # deadline for a warm spare to serve; only a frozen process needs longer
FIRST_RETRY_S = 5.0  # delay after a spare is lost while starting; doubles until one stays warm for as long
MAX_RETRY_S = 300.0
REPLACE_AFTER_S = 4.5  # a worker that is silent this long is replaced if a spare is warm

Respawn = Callable[[Incarnation], SupervisedProcess]


class SpareState(StrEnum):
    STARTING = "starting"
    WARM = "warm"
    TAKEN = "taken"
    ENDED = "ended"  # stopped as planned
    LOST = "lost"


@dataclass(slots=True, eq=False)
class Spare:
    name: Incarnation  # the process's own name, never a worker's
    process: SupervisedProcess
    state: SpareState = SpareState.STARTING
    is_placed: bool = False
    warm_s: float | None = None  # since when it is warm
    pid: int = 0
    detail: str = ""
    taken_by: Incarnation | None = None
    warming: asyncio.Task[Started] | None = None  # runs until the spare can be taken
    watching: asyncio.Task[None] | None = None


class Spares:
    def __init__(
        self,
        counts: Mapping[Role, int],
        pools: Pools,
        spawn: Respawn,
        start_timeout_s: float,
        events: EventLog,
        publish: Callable[[Mapping[str, int]], None],
    ) -> None:
        """`counts` are the configured numbers of spares; `publish` is called with the warm ones by pool after each
        change.
        """
        self._counts = dict(counts)
        self._pools = pools
        self._spawn = spawn
        self._start_timeout_s = start_timeout_s
        self._events = events
        self._publish = publish
        self._spares: list[Spare] = []
        self._taken: dict[Incarnation, Spare] = {}  # spares that are becoming workers, by name
        self._ending = TaskSet()
        self._failures_in_a_row = dict.fromkeys(counts, 0)
        self._retry_s = dict.fromkeys(counts, 0.0)  # earliest time of the next start
        self._next_number = 0
        self._is_closed = False

    def reconcile(self, now_s: float, *, upgrading: bool) -> None:
        """Starts and stops spares; returns at once. There are none during an upgrade: they would run the old code."""
        if self._is_closed:
            return
        for role, configured in self._counts.items():
            own = self._of(role)
            slots = self._pools[role.value].slots
            wanted = 0 if upgrading else choose_num_spares(configured, len(own), slots, self._pools.slots)
            for spare in own[wanted:]:
                self._remove(spare, SpareState.ENDED, "it is not needed")
            if now_s >= self._retry_s[role]:
                for _ in range(wanted - len(own)):
                    self._start(role)

    def renew(self, reason: str) -> None:
        """Ends every spare that is not taken; `reconcile` starts others, with what workers load now."""
        for spare in list(self._spares):
            self._remove(spare, SpareState.ENDED, reason)

    def next_retry_s(self, now_s: float) -> float | None:
        """Returns when `reconcile` may retry failed starts."""
        return min((retry_s for retry_s in self._retry_s.values() if retry_s > now_s), default=None)

    def _of(self, role: Role) -> list[Spare]:
        """Returns a pool's spares, warm ones first."""
        own = [spare for spare in self._spares if spare.name.spare_of == role.value]
        return sorted(own, key=lambda spare: (spare.state is not SpareState.WARM, not spare.is_placed))

    def _start(self, role: Role) -> None:
        # No earlier controller used this incarnation number: one of its spares may still run as a worker under the name
        # that it had as a spare.
        name = Incarnation(WorkerId(f"{role.value}-{SPARE}-{self._next_number}"), time.time_ns() // 1_000_000)
        self._next_number += 1
        spare = Spare(name, self._spawn(name))
        spare.warming = asyncio.create_task(self._warm(spare))
        spare.watching = asyncio.create_task(self._watch(spare))
        self._spares.append(spare)
        self._note(spare, SpareState.STARTING)

    async def _warm(self, spare: Spare) -> Started:
        await spare.process.place(lambda reason: self._note_progress(spare, reason))
        spare.is_placed = True
        async with asyncio.timeout(self._start_timeout_s):
            return await spare.process.start()

    async def _watch(self, spare: Spare) -> None:
        """Follows a spare from its start to its loss; cancelled once the spare is taken or removed."""
        assert spare.warming is not None
        role = Role(spare.name.spare_of)
        try:
            started = await asyncio.shield(spare.warming)
            spare.pid, spare.detail, spare.warm_s = started.pid, "", time.monotonic()
            if spare.taken_by is None:
                self._note(spare, SpareState.WARM)
            reason = await spare.process.watch(lambda load: None, lambda doubt: None)
        except TimeoutError:
            reason = f"not warm within start_timeout_s = {self._start_timeout_s:g} s"
        except PenstockError as error:
            reason = error.message
        except Exception as error:
            log.exception("%s failed", spare.name.worker_id)
            reason = f"{type(error).__name__}: {error}"
        self._retry_later(role, spare.warm_s)
        self._remove(spare, SpareState.LOST, reason)

    def _retry_later(self, role: Role, warm_s: float | None) -> None:
        """Sets when a lost spare may be replaced. `warm_s` is the time at which it became warm, None if it never was.

        The first one that was warm is replaced at once, the next ones too unless they were warm only briefly.
        """
        now_s = time.monotonic()
        if warm_s is not None and now_s - warm_s >= FIRST_RETRY_S:
            self._failures_in_a_row[role] = 0
        failures = self._failures_in_a_row[role] + (warm_s is None)
        wait_s = FIRST_RETRY_S * 2.0 ** (failures - 1) if failures else 0.0
        self._retry_s[role] = now_s + min(MAX_RETRY_S, wait_s)
        self._failures_in_a_row[role] += 1

    def _remove(self, spare: Spare, state: SpareState, reason: str) -> None:
        """Begins to stop a spare; `close` waits until it is gone."""
        assert spare.warming is not None
        assert spare.watching is not None
        self._spares.remove(spare)
        spare.warming.cancel()
        spare.watching.cancel()
        self._ending.start(spare.process.kill())
        self._note(spare, state, reason)

    def _note(self, spare: Spare, state: SpareState, reason: str = "") -> None:
        spare.state = state
        self._events.note(spare.name.worker_id, state.value, reason)
        self._publish(self.count_warm())

    def _note_progress(self, spare: Spare, detail: str) -> None:
        if spare.state is SpareState.STARTING:
            spare.detail = detail
            self._publish(self.count_warm())

    def on_progress(self, name: Incarnation, detail: str) -> Incarnation | None:
        """Records how far the process of this name has started. Returns the worker it is becoming, if it was taken."""
        for spare in self._spares:
            if spare.name == name:
                self._note_progress(spare, detail)
        taken = self._taken.get(name)
        return taken.taken_by if taken is not None else None

    @property
    def are_placed(self) -> bool:
        """Returns whether as many spares as configured have their resources."""
        return all(sum(spare.is_placed for spare in self._of(role)) >= count for role, count in self._counts.items())

    def has_warm(self, pool_name: str) -> bool:
        """Returns whether a worker of this pool would start from a warm spare."""
        return self.count_warm().get(pool_name, 0) > 0

    def count_warm(self) -> dict[str, int]:
        """Returns the number of warm spares of each pool that has any."""
        return dict(Counter(spare.name.spare_of for spare in self._spares if spare.state is SpareState.WARM))

    def take(self, incarnation: Incarnation, respawn: Respawn) -> SupervisedProcess | None:
        """Returns the warmest spare's process, which becomes this worker, or None if no spare is placed yet. `respawn`
        makes a new process in case the spare fails.
        """
        if incarnation.pool_name not in list(Role):
            return None
        spare = next((spare for spare in self._of(Role(incarnation.pool_name)) if spare.is_placed), None)
        if spare is None:
            return None
        assert spare.watching is not None
        self._spares.remove(spare)
        self._taken[spare.name] = spare
        spare.taken_by = incarnation
        spare.watching.cancel()
        self._failures_in_a_row[Role(incarnation.pool_name)] = 0
        self._note(spare, SpareState.TAKEN, f"becomes {incarnation.worker_id}")
        return TakenSpare(spare, incarnation, respawn, lambda: self._taken.pop(spare.name, None))

    def status(self) -> list[admin_pb2.SpareStatus]:
        return [
            admin_pb2.SpareStatus(
                pool=spare.name.spare_of,
                name=spare.name.worker_id,
                state=spare.state.value,
                pid=spare.pid,
                detail=spare.detail,
            )
            for spare in self._spares
        ]

    async def close(self) -> None:
        """Stops every spare that is not taken, and returns once their processes are gone."""
        self._is_closed = True
        for spare in list(self._spares):
            self._remove(spare, SpareState.ENDED, "the deployment ends")
        await self._ending.wait()


class TakenSpare:
    """A `SupervisedProcess`: a warm process that becomes a worker, or a new one if that fails."""

    def __init__(self, spare: Spare, incarnation: Incarnation, respawn: Respawn, on_over: Callable[[], Any]) -> None:
        """`on_over` is called once the spare has become a worker or failed to."""
        self._spare: Spare | None = spare
        self._process = spare.process
        self._incarnation = incarnation
        self._respawn = respawn
        self._on_over = on_over
        self._on_unplaced: OnUnplaced = lambda reason: None

    async def place(self, on_unplaced: OnUnplaced) -> None:
        """Returns at once, since a spare is placed already. A new process started instead of it reports to
        `on_unplaced`.
        """
        self._on_unplaced = on_unplaced

    async def start(self) -> Started:
        spare = self._spare
        if spare is None:
            return await self._process.start()
        try:
            assert spare.warming is not None
            await asyncio.shield(spare.warming)
            async with asyncio.timeout(TAKE_TIMEOUT_S):
                return await self._process.flip(self._incarnation)
        except (PenstockError, TimeoutError) as error:
            reason = error or f"no answer within {TAKE_TIMEOUT_S:g} s"
            log.warning("%s does not become %s: %s", spare.name.worker_id, self._incarnation.worker_id, reason)
        finally:
            self._on_over()
        await self._process.kill()
        self._spare, self._process = None, self._respawn(self._incarnation)
        await self._process.place(self._on_unplaced)
        return await self._process.start()

    async def watch(self, *listeners: Any) -> str:
        return await self._process.watch(*listeners)

    async def flip(self, incarnation: Incarnation) -> Started:
        return await self._process.flip(incarnation)

    async def change_weights(self, change: WeightChange) -> Started:
        return await self._process.change_weights(change)

    async def stop(self, grace_s: float = 0.0) -> None:
        if self._spare is not None and self._spare.warming is not None and not self._spare.warming.done():
            raise Unavailable("it is still loading, so its process is killed")
        await self._process.stop(grace_s)

    async def distrust(self) -> None:
        await self._process.distrust()

    async def kill(self) -> None:
        if self._spare is not None and self._spare.warming is not None:
            self._spare.warming.cancel()
        await self._process.kill()
