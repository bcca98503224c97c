"""Informs workers that the machine of a lost worker is dead, so that they can reuse pages which it might have written.

That a worker was lost proves nothing: its process may still run, out of reach. So its node is watched until it is known
to be dead; then every worker that serves is informed until it answers. `worker.fence_monitor` acts on it there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from typing import Protocol

import grpc
import grpc.aio

from cluster.pools.pool import NO_EPOCH, ROUTER, Incarnation, Pools
from penstock.process.task_set import TaskSet
from penstock.rpc.server import Dial
from penstock.types import Epoch
from penstock.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0  # because nothing reports the death of a node
_WATCH_S = 900.0  # for a node that outlives its worker: there the worker's own port answers or refuses
_CALL_TIMEOUT_S = 5.0
_INFORM_S = 300.0  # a worker that is silent for longer is lost itself


class DeadNodes(Protocol):
    """The machines that the deployment runs on."""

    async def find_dead(self, nodes: Collection[str]) -> Collection[str]:
        """Returns those of the nodes that are dead and never come back under this name."""
        ...


class GoneWorkers:
    """Owns one task for each worker that was lost, and one for each worker that is being informed."""

    def __init__(self, nodes: DeadNodes | None, pools: Pools, dial: Dial, look_every_s: float = _LOOK_EVERY_S) -> None:
        """`nodes` is None on a single machine, where a process that is gone refuses connections."""
        self._nodes = nodes
        self._pools = pools
        self._dial = dial
        self._look_every_s = look_every_s
        self._tasks = TaskSet()

    def on_lost(self, incarnation: Incarnation) -> None:
        """Begins to watch the node of a lost worker. Call it before the pool forgets the incarnation."""
        slot = self._pools.slot_of(incarnation)
        if self._nodes is None or slot is None or incarnation.pool_name == ROUTER:
            return
        if slot.epoch != NO_EPOCH and slot.node:
            self._tasks.start(self._follow(self._nodes, slot.epoch, slot.node))

    async def _follow(self, nodes: DeadNodes, epoch: Epoch, node: str) -> None:
        deadline_s = time.monotonic() + _WATCH_S
        while True:
            if node in await nodes.find_dead([node]):
                break
            if time.monotonic() > deadline_s:
                return
            await asyncio.sleep(self._look_every_s)
        log.info("node %s of lost epoch %d is dead; the workers that serve are informed", node[:12], epoch)
        for slot in self._pools.worker_slots:
            if slot.epoch not in (NO_EPOCH, epoch) and slot.address:
                self._tasks.start(self._inform(slot.incarnation, slot.address, epoch))

    async def _inform(self, incarnation: Incarnation, address: str, gone: Epoch) -> None:
        """Informs one worker, and tries again while it is the same one and has not answered."""
        request = worker_pb2.NoteGoneRequest(epochs=[gone])
        try:
            async with asyncio.timeout(_INFORM_S), self._dial(address) as channel:
                while self._pools.slot_of(incarnation) is not None:
                    try:
                        await worker_pb2_grpc.WorkerStub(channel).NoteGone(request, timeout=_CALL_TIMEOUT_S)
                        return
                    except grpc.aio.AioRpcError as error:
                        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                            return  # it runs an earlier version
                        log.info(
                            "%s does not answer that epoch %d is gone: %s",
                            incarnation.worker_id,
                            gone,
                            error.code().name,
                        )
                    await asyncio.sleep(self._look_every_s)
        except TimeoutError:
            log.warning("%s has not answered that epoch %d is gone", incarnation.worker_id, gone)

    def close(self) -> None:
        self._tasks.cancel()
