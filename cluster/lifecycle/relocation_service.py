"""Relocates workers from nodes that are about to go: starts a successor elsewhere where possible, then drains them.

Owns the relocations in flight and the watch over nodes; `LeavingNodes` holds what it has seen. `relocation_policy`
decides when to drain. `NodeWatch` (`cluster.ray.nodes`) announces a leaving node once; workers that arrive there later
are found at the next change.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from cluster.controller.event_log import EventLog
from cluster.controller.load_reports import LoadReportStore
from cluster.controller.membership import MembershipPublisher
from cluster.controller.supervisor import Supervisor
from cluster.lifecycle.drain import TIMEOUT_S, DrainProgress, DrainStage
from cluster.lifecycle.drain_service import DrainService
from cluster.lifecycle.progress import ProgressStream
from cluster.lifecycle.relocation_policy import (
    LeavingWorker,
    NodeNotice,
    RelocationAction,
    controller_move_s,
    decide_relocation,
)
from cluster.pools.pool import Incarnation, Pools, Slot, WorkerState
from penstock.errors import InvalidInput
from penstock.process.task_set import TaskSet
from penstock.types import Role, WorkerEnd, WorkerId

log = logging.getLogger(__name__)

LEAVING, STAYS = "leaving", "stays"  # what happens to a node or to the controller, in the event log
_LAST_WORDS_S = 0.5  # for callers that follow the drain to read its end


class NodeWatch(Protocol):
    """The machines that the deployment runs on."""

    own_node: str  # which holds this controller and the routers

    async def watch(self, on_notices: Callable[[Sequence[NodeNotice]], None]) -> None:
        """Reports all nodes that are about to go after each change; never returns."""
        ...

    async def find_dead(self, nodes: Collection[str]) -> Collection[str]:
        """Returns those of the nodes that are dead and never come back under this name."""
        ...

    async def leave(self, name: str, within_s: float | None) -> NodeNotice:
        """Stops placing workers on a node. Raises InvalidInput and Unavailable."""
        ...

    async def move_controller(self) -> str:
        """Ends this process; its successor starts on another node, and new routers beside it. Returns why not, if there
        is no other node."""
        ...


class LeavingNodes:
    """The nodes that are about to go. `RelocationService` changes it; while there are any, no spare is taken."""

    def __init__(self) -> None:
        self.notices: dict[str, NodeNotice] = {}  # by node id

    def replace(self, notices: Iterable[NodeNotice]) -> list[NodeNotice]:
        """Replaces all notices and returns those of newly leaving nodes. A known node keeps its deadline unless the new
        one is earlier."""
        before, self.notices = self.notices, {}
        for notice in notices:
            known = before.get(notice.node)
            self.notices[notice.node] = _earlier(known, notice) if known else notice
        return [notice for node, notice in self.notices.items() if node not in before]


class Relocation:
    """The relocation of one incarnation."""

    def __init__(self, worker_id: WorkerId, successor: WorkerId) -> None:
        self.worker_id = worker_id
        self.successor = successor
        first = DrainProgress(DrainStage.WAITING, detail=f"{successor} takes its place elsewhere")
        self._stream = ProgressStream(first, lambda progress: progress.stage is DrainStage.ENDED)

    @property
    def progress(self) -> DrainProgress:
        return self._stream.latest

    def update(self, progress: DrainProgress) -> None:
        self._stream.update(progress)

    def follow(self) -> AsyncIterator[DrainProgress]:
        """Yields the progress now and after each change, until the end."""
        return self._stream.follow()


class RelocationService:
    """Relocates every ready worker of a node that is about to go."""

    def __init__(
        self,
        nodes: NodeWatch | None,
        leaving_nodes: LeavingNodes,
        pools: Pools,
        reports: LoadReportStore,
        supervisor: Supervisor,
        draining: DrainService,
        membership: MembershipPublisher,
        events: EventLog,
        patience_s: float,
    ) -> None:
        """`nodes` is None on a single machine. `patience_s` is how long a new worker may take to start."""
        self._nodes = nodes
        self._leaving_nodes = leaving_nodes
        self._pools = pools
        self._reports = reports
        self._supervisor = supervisor
        self._draining = draining
        self._membership = membership
        self._events = events
        self._patience_s = patience_s
        self._relocations: dict[Incarnation, Relocation] = {}
        self._tasks = TaskSet()
        self._moving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts to watch the nodes."""
        if self._nodes is not None:
            self._tasks.start(self._nodes.watch(self.on_notices), name="nodes")

    def on_notices(self, notices: Iterable[NodeNotice]) -> None:
        """Takes all nodes that are about to go, and starts to relocate their workers."""
        for notice in self._leaving_nodes.replace(notices):
            left = f" within {notice.deadline_s - notice.given_s:.0f} s" if notice.deadline_s is not None else ""
            self._events.note(
                f"node {notice.node[:12]}", LEAVING, f"it is leaving{left}: {notice.reason or 'no reason'}"
            )
        self.check_nodes()

    def check_nodes(self) -> None:
        """Starts to relocate every ready worker on a node that is about to go."""
        for slot in self._pools.worker_slots:
            notice = self._leaving_nodes.notices.get(slot.node)
            if notice is not None and slot.state is WorkerState.READY and slot.incarnation not in self._relocations:
                self._begin(slot)
        own = self._nodes.own_node if self._nodes is not None else ""
        if own in self._leaving_nodes.notices and self._moving is None:
            self._moving = self._tasks.start(self._move_controller(own), name="move")

    @property
    def is_moving(self) -> bool:
        """Returns whether the controller and the routers leave their node."""
        return self._moving is not None and not self._moving.done()

    async def _move_controller(self, own: str) -> None:
        """Moves the controller once its node has no workers left, or when the node goes soon."""
        assert self._nodes is not None
        at_latest_s = controller_move_s(self._leaving_nodes.notices[own])
        left_s = None if at_latest_s is None else max(0.0, at_latest_s - time.monotonic())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                while any(slot.node == own for slot in self._pools.worker_slots):
                    await self._membership.next_change()
        self._events.note("controller", LEAVING, "it moves to another node, together with the routers")
        await asyncio.sleep(_LAST_WORDS_S)
        if problem := await self._nodes.move_controller():
            log.warning("the controller stays: %s", problem)
            self._events.note("controller", STAYS, problem)

    async def drain_node(self, name: str, within_s: float | None = None) -> Sequence[Relocation]:
        """Returns the relocations of the workers on a node. Raises InvalidInput and Unavailable."""
        if self._nodes is None:
            raise InvalidInput(
                "node", f"is {name!r}; this deployment has one machine and no nodes; name a worker instead"
            )
        notice = await self._nodes.leave(name, within_s)
        self.on_notices([*self._leaving_nodes.notices.values(), notice])
        here = {slot.incarnation for slot in self._pools.worker_slots if slot.node == notice.node}
        return [relocation for incarnation, relocation in self._relocations.items() if incarnation in here]

    def _begin(self, slot: Slot) -> None:
        slot.is_node_leaving = True
        successor = self._pools.of(slot.incarnation).add_place(
            f"beside {slot.worker_id}, whose node goes", has_served=True
        )
        relocation = self._relocations[slot.incarnation] = Relocation(slot.worker_id, successor.worker_id)
        self._tasks.start(self._run(relocation, slot.incarnation, slot.node))
        self._membership.publish()

    async def _run(self, relocation: Relocation, incarnation: Incarnation, node: str) -> None:
        try:
            slot, until_s = await self._wait_for_drain(relocation, incarnation, node)
            if slot is None:
                return
            timeout_s = TIMEOUT_S if until_s is None else max(0.5, until_s - time.monotonic())
            drain = self._draining.drain_and_end(slot, timeout_s, replaced=False, end=WorkerEnd.RELOCATED)
            async for progress in drain.follow():
                relocation.update(progress)
        finally:
            relocation.update(replace(relocation.progress, stage=DrainStage.ENDED))
            self._relocations.pop(incarnation, None)

    async def _wait_for_drain(
        self, relocation: Relocation, incarnation: Incarnation, node: str
    ) -> tuple[Slot | None, float | None]:
        """Returns the slot when it is to be drained, and the drain's deadline; no slot if it was lost before."""
        while True:
            changed = self._membership.changed
            slot = self._pools.slot_of(incarnation)
            if slot is None or slot.is_leaving or slot.state in (WorkerState.LOST, WorkerState.QUARANTINED):
                self._give_up(relocation.worker_id)
                return None, None
            now_s = time.monotonic()
            notice = self._leaving_nodes.notices.get(node) or NodeNotice(node, now_s)
            worker = self._describe(slot, relocation.successor)
            step = decide_relocation(worker, notice, self._patience_s, now_s)
            drains = step.action is RelocationAction.DRAIN
            if drains and slot.state is WorkerState.READY:
                return slot, step.until_s
            try:
                async with asyncio.timeout(None if step.until_s is None or drains else step.until_s - now_s):
                    await changed.wait()
            except TimeoutError:
                continue

    def _describe(self, slot: Slot, successor: WorkerId) -> LeavingWorker:
        pool = self._pools.of(slot.incarnation)
        others = [
            other for other in pool.ready() if other is not slot and other.node not in self._leaving_nodes.notices
        ]
        load = self._reports.get(slot.incarnation)
        return LeavingWorker(
            num_open=load.num_open if load is not None else 0,
            successor_ready=any(other.worker_id == successor for other in others),
            others_serve=bool(others) or slot.incarnation.pool_name != Role.DECODE,
        )

    def _give_up(self, worker_id: WorkerId) -> None:
        """Drops a worker that was lost meanwhile; its successor exists already, so it is not replaced again."""
        pool = self._pools[Incarnation(worker_id, 0).pool_name]
        stop = pool.remove_place(worker_id, WorkerEnd.RELOCATED)
        if stop is not None:
            self._supervisor.cancel(stop.incarnation)
        self._membership.publish()

    def close(self) -> None:
        self._tasks.cancel()


def _earlier(known: NodeNotice, notice: NodeNotice) -> NodeNotice:
    if notice.deadline_s is None:
        return known
    if known.deadline_s is None or notice.deadline_s < known.deadline_s - 1.0:
        return replace(known, deadline_s=notice.deadline_s)
    return known
