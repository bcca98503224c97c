"""Warm processes: python, torch and this package imported, device and weights ready, no role yet. A worker that is to
start takes one, in place of seconds of imports, and another one warms up behind it.

Each holds a reservation of its own, a worker's whole share of its pool, hence its place is where a worker may be. It is
made of what the pool's workers are made of, but has no address, no epoch and no requests until it takes a role, which
is what a flip does too. Owns these processes until they are taken.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cluster.events import EventLog
from cluster.pool import SPARE, Incarnation
from cluster.pools import Pools
from cluster.spare_count import choose_count
from cluster.supervised import Spawn, Started, SupervisedProcess
from penstock.errors import PenstockError, Unavailable
from penstock.types import Role, WorkerId
from penstock.v1 import admin_pb2

log = logging.getLogger(__name__)

TAKE_TIMEOUT_S = 10.0  # to serve, of one that is warm: longer than any that is not frozen needs
FIRST_RETRY_S = 5.0  # after one that was lost; twice that after the next, until one is warm
MAX_RETRY_S = 300.0
REPLACE_AFTER_S = 4.5  # of silence; a worker is not waited for any longer once its stand-in is warm

OnProgress = Callable[[Incarnation, str], None]


class SpareState(StrEnum):
    STARTING = "starting"
    WARM = "warm"
    TAKEN = "taken"
    LOST = "lost"


@dataclass(slots=True, eq=False)
class Spare:
    name: Incarnation  # of the process; never a worker's
    process: SupervisedProcess
    state: SpareState = SpareState.STARTING
    is_placed: bool = False
    pid: int = 0
    detail: str = ""
    taken_by: Incarnation | None = None
    warming: asyncio.Task[Started] | None = None  # until it can be taken on
    keeping: asyncio.Task[None] | None = None


class Spares:
    def __init__(
        self,
        counts: dict[Role, int],
        pools: Pools,
        spawn: Spawn,
        start_timeout_s: float,
        events: EventLog,
        publish: Callable[[], None],
    ) -> None:
        """`counts` are those configured."""
        self._counts = counts
        self._pools = pools
        self._spawn = spawn
        self._start_timeout_s = start_timeout_s
        self._events = events
        self._publish = publish
        self._spares: list[Spare] = []
        self._taken: dict[Incarnation, Spare] = {}  # by their names, while they become workers
        self._ending: set[asyncio.Task[None]] = set()
        self._failures = dict.fromkeys(counts, 0)  # in a row
        self._retry_s = dict.fromkeys(counts, 0.0)  # not before
        self._last_number = 0
        self._is_closed = False

    def reconcile(self, now_s: float, *, upgrading: bool) -> None:
        """Starts and ends processes; returns at once. During an upgrade there are none: their code is the old one."""
        if self._is_closed:
            return
        for role, configured in self._counts.items():
            own = self._of(role)
            slots = self._pools[role.value].slots
            wanted = 0 if upgrading else choose_count(configured, len(own), slots, self._pools.slots)
            for spare in own[wanted:]:
                self._remove(spare, "it is not needed")
            if now_s >= self._retry_s[role]:
                for _ in range(wanted - len(own)):
                    self._start(role)

    def next_retry_s(self, now_s: float) -> float | None:
        """When `reconcile` may start what failed before."""
        return min((one for one in self._retry_s.values() if one > now_s), default=None)

    def _of(self, role: Role) -> list[Spare]:
        """Warm ones first."""
        own = [spare for spare in self._spares if spare.name.spare_of == role.value]
        return sorted(own, key=lambda one: (one.state is not SpareState.WARM, not one.is_placed))

    def _start(self, role: Role) -> None:
        self._last_number += 1
        # Numbers that no earlier controller used: what it started may run on as workers, under these names.
        name = Incarnation(WorkerId(f"{role.value}-{SPARE}-{self._last_number - 1}"), time.time_ns() // 1_000_000)
        spare = Spare(name, self._spawn(name))
        spare.warming = asyncio.create_task(self._warm(spare))
        spare.keeping = asyncio.create_task(self._keep(spare))
        self._spares.append(spare)
        self._note(spare, SpareState.STARTING)

    async def _warm(self, spare: Spare) -> Started:
        await spare.process.place()
        spare.is_placed = True
        async with asyncio.timeout(self._start_timeout_s):
            return await spare.process.start()

    async def _keep(self, spare: Spare) -> None:
        """From its start to its loss; cancelled where somebody else sees to it."""
        assert spare.warming is not None
        try:
            started = await asyncio.shield(spare.warming)
            self._failures[Role(spare.name.spare_of)] = 0
            spare.pid, spare.detail = started.pid, ""
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
        role = Role(spare.name.spare_of)
        if spare.state is SpareState.STARTING:  # one that was warm is replaced at once
            self._retry_s[role] = time.monotonic() + min(MAX_RETRY_S, FIRST_RETRY_S * 2.0 ** self._failures[role])
            self._failures[role] += 1
        self._remove(spare, reason)

    def _remove(self, spare: Spare, reason: str) -> None:
        """Returns at once; `close` waits until nothing is left of it."""
        assert spare.warming is not None
        assert spare.keeping is not None
        self._spares.remove(spare)
        spare.warming.cancel()
        spare.keeping.cancel()
        ending = asyncio.create_task(spare.process.kill())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        self._note(spare, SpareState.LOST, reason)

    def _note(self, spare: Spare, state: SpareState, reason: str = "") -> None:
        spare.state = state
        self._events.note(spare.name.worker_id, state.value, reason)
        self._publish()

    def on_progress(self, name: Incarnation, detail: str, tell: OnProgress) -> None:
        """News of a process of this name; `tell` hears what concerns the worker that it becomes."""
        taken = self._taken.get(name)
        if taken is not None and taken.taken_by is not None:
            tell(taken.taken_by, detail)
        for spare in self._spares:
            if spare.name == name and spare.state is SpareState.STARTING:
                spare.detail = detail
                self._publish()

    # What becomes of them.

    def has_warm(self, pool_name: str) -> bool:
        """A worker of this pool would start in an instant."""
        return any(one.state is SpareState.WARM and one.name.spare_of == pool_name for one in self._spares)

    def count_warm(self) -> dict[str, int]:
        """Of each pool that has any."""
        return dict(Counter(one.name.spare_of for one in self._spares if one.state is SpareState.WARM))

    def take(self, incarnation: Incarnation, spawn: Spawn) -> SupervisedProcess | None:
        """A process that becomes this worker, the warmest that there is; None where there is none that has its place.
        `spawn` makes a new one, should this one fail."""
        if incarnation.pool_name not in list(Role):
            return None
        spare = next((one for one in self._of(Role(incarnation.pool_name)) if one.is_placed), None)
        if spare is None:
            return None
        assert spare.keeping is not None
        self._spares.remove(spare)
        self._taken[spare.name] = spare
        spare.taken_by = incarnation
        spare.keeping.cancel()
        self._note(spare, SpareState.TAKEN, f"becomes {incarnation.worker_id}")
        return Taken(spare, incarnation, spawn, lambda: self._taken.pop(spare.name, None))

    def tell(self) -> list[admin_pb2.SpareStatus]:
        """For the status."""
        return [
            admin_pb2.SpareStatus(
                pool=one.name.spare_of, name=one.name.worker_id, state=one.state.value, pid=one.pid, detail=one.detail
            )
            for one in self._spares
        ]

    async def close(self) -> None:
        """Ends all that nobody has taken; nothing of them is left when it returns."""
        self._is_closed = True
        for spare in list(self._spares):
            self._remove(spare, "the deployment ends")
        await asyncio.gather(*self._ending, return_exceptions=True)


class Taken:
    """A `supervised.SupervisedProcess`: a warm process on its way to be a worker, or a new one where that fails."""

    def __init__(self, spare: Spare, incarnation: Incarnation, spawn: Spawn, on_over: Callable[[], Any]) -> None:
        """`on_over` hears that it has become a worker, or never will."""
        self._spare: Spare | None = spare
        self._process = spare.process
        self._incarnation = incarnation
        self._spawn = spawn
        self._on_over = on_over

    async def place(self) -> None:
        """It has its place already."""

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
        self._spare, self._process = None, self._spawn(self._incarnation)
        await self._process.place()
        return await self._process.start()

    async def watch(self, *listeners: Any) -> str:
        return await self._process.watch(*listeners)

    async def flip(self, incarnation: Incarnation) -> Started:
        return await self._process.flip(incarnation)

    async def stop(self, grace_s: float = 0.0) -> None:
        if self._spare is not None and self._spare.warming is not None and not self._spare.warming.done():
            raise Unavailable("it has nothing to end in order yet")
        await self._process.stop(grace_s)

    async def kill(self) -> None:
        if self._spare is not None and self._spare.warming is not None:
            self._spare.warming.cancel()
        await self._process.kill()
