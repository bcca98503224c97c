"""One supervised process as a Ray actor: made, found again, watched and removed. The controller's hands; it decides
nothing.

Actors and their reservations are detached: they outlive the controller that made them, and its successor finds them by
name. What blocks on Ray's head runs on threads, so that leases go on being watched while the head is away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
from google.rpc import status_pb2
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster import ray_placement
from cluster.heartbeats import OnDoubt, follow_router, follow_worker
from cluster.pool import Incarnation
from cluster.ray_kill import kill_process
from cluster.shares import Share
from cluster.supervised import Started
from penstock.errors import Unavailable, from_status
from penstock.grpc_server import Dial
from penstock.v1 import worker_pb2

log = logging.getLogger(__name__)

NAMESPACE = "penstock"
# Of memory, asked for by actors that belong on their maker's node. Ray lets a random node place an actor that asks for
# nothing, and one that has just joined and does not know that node yet keeps it.
ONE_BYTE = 1
_REMOVE_TIMEOUT_S = 5.0  # until Ray has confirmed that a killed actor is gone
_WORKER_REMOVE_TIMEOUT_S = 2.0
_LEAVE_MARGIN_S = 5.0  # for a router that was told to end to do so, beyond its streams' time


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """Everything that decides how one incarnation's actor is made."""

    kind: str  # prefill, decode, router or spare
    incarnation: Incarnation
    config: Mapping[str, object]  # of the worker or router, plain data
    share: Share
    node_id: str | None = None  # a node that it must run on, without a reservation
    use_node_address: bool = False  # listen on the node's address and not on loopback
    num_ranks: int = 1  # processes that have a part of the model each; each gets a share

    @property
    def name(self) -> str:
        """A new one for each incarnation: the old one's may still be held when its successor is made."""
        return f"{self.incarnation.worker_id}.{self.incarnation.number}"


@dataclass(frozen=True, slots=True)
class StartReport:
    """An actor's answer to `start`. Errors travel as google.rpc.Status, like everywhere else."""

    started: Started | None
    node_id: str
    error: bytes = b""
    incarnation: Incarnation | None = (
        None  # that it serves as; not always the one it is named after, since roles change
    )


@dataclass(frozen=True, slots=True)
class Host:
    """What surrounds every actor of a deployment."""

    actor_class: Any
    python_path: str
    controller: ActorHandle
    dial: Dial


def actor_options(spec: ActorSpec, python_path: str) -> dict[str, Any]:
    return {
        "name": spec.name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "num_cpus": spec.share.num_cpus,
        "num_gpus": spec.share.num_gpus,
        "resources": dict(spec.share.resources),
        "max_restarts": 0,  # the controller replaces it, with a new epoch
        "runtime_env": {"env_vars": {**spec.share.environment(), "PYTHONPATH": python_path}},
    }


class RayProcess:
    """Implements `supervised.SupervisedProcess`. Runs on the controller's event loop."""

    def __init__(
        self, spec: ActorSpec, host: Host, on_unplaced: Callable[[str], None], found: ActorHandle | None = None
    ) -> None:
        """`found` is the actor of an incarnation that an earlier controller made."""
        self._spec = spec
        self._host = host
        self._on_unplaced = on_unplaced
        self._actor = found
        self._life: Any = found.live.remote() if found is not None else None  # ends when the server or its process does
        self._report: StartReport | None = None
        self._stopped = False  # in good order

    async def place(self) -> None:
        if self._actor is not None:
            return
        spec, options = self._spec, actor_options(self._spec, self._host.python_path)
        if spec.node_id:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(spec.node_id, soft=False)
            options["memory"] = ONE_BYTE
        else:
            group = await ray_placement.place(spec.name, spec.share, self._on_unplaced, spec.num_ranks)
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        self._actor = await asyncio.to_thread(self._make, options)
        self._life = self._actor.live.remote()

    def _make(self, options: Mapping[str, Any]) -> ActorHandle:
        spec = self._spec
        made = self._host.actor_class.options(**options)
        return made.remote(spec.kind, spec.incarnation.worker_id, dict(spec.config), spec.use_node_address)

    async def start(self) -> Started:
        """Of one that was found, too: it tells again what it told, or goes on starting."""
        assert self._actor is not None, "place first"
        try:
            report: StartReport = await self._actor.start.remote(self._host.controller, self._spec.incarnation)
        except RayError as error:
            raise Unavailable(f"its process died while starting: {_first_line(error)}") from error
        self._report = report
        if report.started is None:
            raise from_status(status_pb2.Status.FromString(report.error))
        return replace(report.started, node=report.node_id)

    async def watch(self, on_load: Callable[[worker_pb2.Load], None], on_doubt: OnDoubt) -> str:
        assert self._report is not None
        assert self._report.started is not None
        started = self._report.started
        if not started.address:  # a spare: nobody asks it anything
            return await self._outlive()
        if self._is_router:
            following = follow_router(started.address, on_doubt, started.pid, _drain_s(self._spec))
        else:
            following = follow_worker(started.address, started.epoch, on_load, on_doubt, self._host.dial)
        answering = asyncio.create_task(following)
        living = asyncio.create_task(self._outlive())
        try:
            done, _ = await asyncio.wait([living, answering], return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            living.cancel()
            answering.cancel()

    @property
    def serves_as(self) -> Incarnation:
        """Which incarnation it is, as it says itself; before it has said so, the one it was made for."""
        told = self._report.incarnation if self._report is not None else None
        return told or self._spec.incarnation

    async def _outlive(self) -> str:
        try:
            return str(await self._life)
        except RayError as error:
            return f"its process died: {_first_line(error)}"

    async def flip(self, incarnation: Incarnation) -> Started:
        assert self._actor is not None, "place first"
        try:
            report: StartReport = await self._actor.flip.remote(incarnation)
        except RayError as error:
            raise Unavailable(f"its process died while changing its role: {_first_line(error)}") from error
        if report.started is None:
            raise from_status(status_pb2.Status.FromString(report.error))
        self._report = report
        return replace(report.started, node=report.node_id)

    async def stop(self, grace_s: float = 0.0) -> None:
        if self._actor is None:
            return
        try:
            await self._actor.stop.remote(grace_s)
            self._stopped = True
        except RayError as error:
            raise Unavailable(f"its process died while stopping: {_first_line(error)}") from error

    async def kill(self) -> None:
        if self._actor is not None:
            await self._kill_actor(self._actor)
        if self._spec.node_id is None:
            await ray_placement.release(self._spec.name)

    async def _kill_actor(self, actor: ActorHandle) -> None:
        """Ray asks a process to end; one that is stopped by a signal cannot hear it, hence the signal. (Not after an
        orderly stop: Ray would tell the user of a process that died unexpectedly.)

        A router's successor wants its ports. A worker's may come as soon as the process is sure to end, and where
        nothing is sure (its node does not answer) soon all the same: the epoch tells the two apart.
        """
        gone: set[asyncio.Task[Any]] = {asyncio.create_task(self._outlive())}
        report = self._report
        if report is not None and report.started is not None and not self._stopped:
            if self._is_router:
                await kill_process(report.node_id, report.started.pid)
            else:
                gone.add(asyncio.create_task(kill_process(report.node_id, report.started.pid)))
        await asyncio.to_thread(ray.kill, actor, no_restart=True)
        patience_s = _REMOVE_TIMEOUT_S if self._is_router else _WORKER_REMOVE_TIMEOUT_S
        done, pending = await asyncio.wait(gone, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            log.info("%s: nothing confirmed its end within %g s", self._spec.name, patience_s)
        for one in pending:
            one.cancel()

    @property
    def _is_router(self) -> bool:
        return self._spec.kind == "router"


def _drain_s(spec: ActorSpec) -> float:
    value = spec.config["drain_s"]
    assert isinstance(value, int | float)
    return value + _LEAVE_MARGIN_S


def _first_line(error: RayError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
