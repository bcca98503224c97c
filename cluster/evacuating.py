"""Workers on nodes that are about to go: a successor elsewhere first where that is possible, then they are emptied.

Owns the evacuations under way, and the watch over nodes. When to do what is `cluster.node_leave`'s to say. That a node
goes, `Nodes` tells (`cluster.ray_nodes`), once; what it holds later than that is found at the next change.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from cluster.drain import TIMEOUT_S, Progress, Stage
from cluster.draining import Draining
from cluster.events import EventLog
from cluster.node_leave import Notice, Resident, Verdict, decide
from cluster.pool import Incarnation, Slot, WorkerState
from cluster.pools import Pools
from cluster.publication import Publication
from cluster.reports import Reports
from cluster.supervision import Supervision
from penstock.errors import InvalidInput
from penstock.types import Role, WorkerId

log = logging.getLogger(__name__)

LEAVING = "leaving"  # what becomes of a node, among the events


class Nodes(Protocol):
    """The machines that the deployment runs on."""

    async def watch(self, note: Callable[[Sequence[Notice]], None]) -> None:
        """Tells of those that are about to go, for ever."""
        ...

    async def leave(self, name: str, within_s: float | None) -> Notice:
        """Nothing is placed there any more. Raises InvalidInput and Unavailable."""
        ...


class Evacuation:
    """Of one incarnation."""

    def __init__(self, worker_id: WorkerId, successor: WorkerId) -> None:
        self.worker_id = worker_id
        self.successor = successor
        self.progress = Progress(Stage.WAITING, detail=f"{successor} takes its place elsewhere")
        self._changed = asyncio.Event()

    def tell(self, progress: Progress) -> None:
        if progress != self.progress:
            self.progress = progress
            self._changed.set()
            self._changed = asyncio.Event()

    async def follow(self) -> AsyncIterator[Progress]:
        """The progress now and after each change, until the end."""
        while True:
            changed, progress = self._changed, self.progress
            yield progress
            if progress.stage is Stage.ENDED:
                return
            if progress is self.progress:
                await changed.wait()


class Evacuating:
    def __init__(
        self,
        nodes: Nodes | None,
        pools: Pools,
        reports: Reports,
        supervision: Supervision,
        draining: Draining,
        publication: Publication,
        events: EventLog,
        patience_s: float,
    ) -> None:
        """`nodes` is None where there is one machine alone. `patience_s` is what a new worker may take to start."""
        self._nodes = nodes
        self._pools = pools
        self._reports = reports
        self._supervision = supervision
        self._draining = draining
        self._publication = publication
        self._events = events
        self._patience_s = patience_s
        self._notices: dict[str, Notice] = {}
        self._evacuations: dict[Incarnation, Evacuation] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to hear of nodes."""
        if self._nodes is not None:
            self._watching = asyncio.create_task(self._nodes.watch(self.note), name="nodes")

    @property
    def waiting(self) -> list[WorkerId]:
        """Those whose successors were started while they still serve: both count, and one of them goes."""
        return [one.worker_id for one in self._evacuations.values() if one.progress.stage is Stage.WAITING]

    @property
    def notices(self) -> list[Notice]:
        return list(self._notices.values())

    def note(self, notices: Iterable[Notice]) -> None:
        """These nodes go, and no others; a node that was told before keeps the deadline that it had, or an earlier."""
        before, self._notices = self._notices, {}
        for notice in notices:
            known = before.get(notice.node)
            if known is None:
                left = f" within {notice.deadline_s - notice.given_s:.0f} s" if notice.deadline_s is not None else ""
                self._events.note(f"node {notice.node[:12]}", LEAVING, f"it goes{left}: {notice.reason or 'no reason'}")
            self._notices[notice.node] = _sooner(known, notice) if known else notice
        self.look()

    def look(self) -> None:
        """Begins to evacuate whoever is on such a node and serves."""
        for slot in [one for role in Role for one in self._pools[role.value].slots]:
            notice = self._notices.get(slot.node)
            if notice is not None and slot.state is WorkerState.READY and slot.incarnation not in self._evacuations:
                self._begin(slot)

    async def drain_node(self, name: str, within_s: float | None) -> Sequence[Evacuation]:
        """What is there and serves, on its way out. Raises InvalidInput and Unavailable."""
        if self._nodes is None:
            raise InvalidInput("node", f"is {name!r}; this deployment has one machine, and no nodes")
        notice = await self._nodes.leave(name, within_s)
        self.note([*self.notices, notice])
        return self._evacuations_on(notice.node)

    def _evacuations_on(self, node: str) -> Sequence[Evacuation]:
        here = {slot.incarnation for role in Role for slot in self._pools[role.value].slots if slot.node == node}
        return [one for incarnation, one in self._evacuations.items() if incarnation in here]

    def _begin(self, slot: Slot) -> None:
        slot.is_going = True
        successor = self._pools.of(slot.incarnation).take_over(f"beside {slot.worker_id}, whose node goes")
        evacuation = self._evacuations[slot.incarnation] = Evacuation(slot.worker_id, successor.worker_id)
        self._supervision.begin(successor)
        task = asyncio.create_task(self._run(evacuation, slot.incarnation, slot.node))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._publication.publish()

    async def _run(self, evacuation: Evacuation, incarnation: Incarnation, node: str) -> None:
        try:
            slot, until_s = await self._wait(evacuation, incarnation, node)
            if slot is None:
                return
            timeout_s = TIMEOUT_S if until_s is None else max(0.5, until_s - time.monotonic())
            drain = self._draining.drain_and_end(slot, timeout_s, replaced=False)
            async for progress in drain.follow():
                evacuation.tell(progress)
        finally:
            evacuation.tell(replace(evacuation.progress, stage=Stage.ENDED))
            self._evacuations.pop(incarnation, None)

    async def _wait(
        self, evacuation: Evacuation, incarnation: Incarnation, node: str
    ) -> tuple[Slot | None, float | None]:
        """The slot once it is to be emptied, and by when; None where it was lost before."""
        while True:
            changed = self._publication.changed
            slot = self._pools.slot_of(incarnation)
            if slot is None or slot.is_leaving or slot.state in (WorkerState.LOST, WorkerState.QUARANTINED):
                self._give_up(evacuation.worker_id)
                return None, None
            now_s = time.monotonic()
            step = decide(self._resident(slot, evacuation.successor), self._notice(node), self._patience_s, now_s)
            if step.verdict is Verdict.EMPTY and slot.state is WorkerState.READY:
                return slot, step.until_s
            try:
                timeout_s = None if step.until_s is None or step.verdict is Verdict.EMPTY else step.until_s - now_s
                async with asyncio.timeout(timeout_s):
                    await changed.wait()
            except TimeoutError:
                continue

    def _notice(self, node: str) -> Notice:
        return self._notices.get(node) or Notice(node, time.monotonic())

    def _resident(self, slot: Slot, successor: WorkerId) -> Resident:
        pool = self._pools.of(slot.incarnation)
        others = [one for one in pool.ready() if one is not slot and one.node not in self._notices]
        load = self._reports.get(slot.incarnation)
        needed = slot.incarnation.pool_name == Role.DECODE
        return Resident(
            num_open=load.num_open if load is not None else 0,
            successor_ready=any(one.worker_id == successor for one in others),
            others_serve=bool(others) or not needed,
        )

    def _give_up(self, worker_id: WorkerId) -> None:
        """It is gone without us; its successor is there for it, so nobody else replaces it."""
        pool = self._pools[Incarnation(worker_id, 0).pool_name]
        stop = pool.give_up(worker_id)
        if stop is not None:
            self._supervision.cancel(stop.incarnation)
        self._publication.publish()

    def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        for task in self._tasks:
            task.cancel()


def _sooner(known: Notice, notice: Notice) -> Notice:
    if notice.deadline_s is None:
        return known
    if known.deadline_s is None or notice.deadline_s < known.deadline_s - 1.0:
        return replace(known, deadline_s=notice.deadline_s)
    return known
