"""Runs one supervised process as a Ray actor: creates or takes over the actor, watches it and removes it. Decides
nothing.

Actors and their reservations are detached: they outlive their controller, whose successor finds them by name. Calls
that block on Ray's head run on threads, so that leases are still watched while the head is down.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
from google.rpc import status_pb2
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster.controller.supervised_process import OnUnplaced, Started
from cluster.health.liveness import OnDoubt, follow_router, follow_worker
from cluster.pools.pool import ROUTER, Incarnation
from cluster.pools.resources import ResourceShare
from cluster.pools.weight_change import ApplyWeights, WeightChange
from cluster.ray import placement
from penstock.errors import Unavailable, from_status
from penstock.rpc.server import Dial
from penstock.v1 import worker_pb2
from worker.pull.kept import keeper_link

log = logging.getLogger(__name__)

NAMESPACE = "penstock"
# Memory requested for actors that belong on their creator's node. For an actor that requests nothing Ray lets a random
# node decide, and a node that has just joined and does not know the creator's node yet keeps the actor for itself.
ONE_BYTE = 1
_REMOVE_TIMEOUT_S = 5.0  # time for Ray to confirm that a killed router is gone
_WORKER_REMOVE_TIMEOUT_S = 2.0
_ON_NODE_TIMEOUT_S = 3.0  # deadline of a call through Ray on another node
_LEAVE_MARGIN_S = 5.0  # time a stopping router gets on top of its streams' grace period


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """Everything that determines how one incarnation's actor is created."""

    kind: str  # prefill, decode, router or spare
    incarnation: Incarnation
    config: Mapping[str, object]  # the worker's or router's configuration as plain data
    share: ResourceShare
    node_id: str | None = None  # the node that it must run on, without a reservation
    use_node_address: bool = False  # whether to listen on the node's address instead of loopback
    num_ranks: int = 1  # processes that each hold a part of the model and get a share

    @property
    def name(self) -> str:
        """A name unique to the incarnation, since its predecessor's name may still be in use when it is created."""
        return f"{self.incarnation.worker_id}.{self.incarnation.number}"


@dataclass(frozen=True, slots=True)
class StartReport:
    """An actor's answer to `start`. Errors travel as google.rpc.Status, as everywhere else."""

    started: Started | None
    node_id: str
    error: bytes = b""
    incarnation: Incarnation | None = None  # the incarnation it serves as; differs from its name after a flip


@dataclass(frozen=True, slots=True)
class ActorContext:
    """The context that all actors of a deployment share."""

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
        "max_restarts": 0,  # the controller replaces it under a new epoch
        "runtime_env": {"env_vars": {**spec.share.environment(), "PYTHONPATH": python_path}},
    }


class RayProcess:
    """Implements `SupervisedProcess`. Runs on the controller's event loop."""

    def __init__(self, spec: ActorSpec, context: ActorContext, found: ActorHandle | None = None) -> None:
        """`found` is the actor of an incarnation that an earlier controller started."""
        self._spec = spec
        self._context = context
        self._actor = found
        self._life: Any = found.live.remote() if found is not None else None  # ends with the server or its process
        self._report: StartReport | None = None
        self._stopped = False  # whether it was stopped cleanly

    async def place(self, on_unplaced: OnUnplaced) -> None:
        if self._actor is not None:
            return
        spec, options = self._spec, actor_options(self._spec, self._context.python_path)
        if spec.node_id:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(spec.node_id, soft=False)
            options["memory"] = ONE_BYTE
        else:
            group = await placement.place(spec.name, spec.share, on_unplaced, spec.num_ranks)
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        self._actor = await asyncio.to_thread(self._make, options)
        self._life = self._actor.live.remote()

    def _make(self, options: Mapping[str, Any]) -> ActorHandle:
        spec = self._spec
        made = self._context.actor_class.options(**options)
        return made.remote(spec.kind, spec.incarnation.worker_id, dict(spec.config), spec.use_node_address)

    async def start(self) -> Started:
        """Starts the server. A found actor repeats its report or continues to start."""
        assert self._actor is not None, "place first"
        try:
            report: StartReport = await self._actor.start.remote(self._context.controller, self._spec.incarnation)
        except RayError as error:
            raise Unavailable(f"its process died while starting: {_first_line(error)}") from error
        self._report = report
        return _started(report)

    async def watch(self, on_load: Callable[[worker_pb2.Load], None], on_doubt: OnDoubt) -> str:
        assert self._report is not None
        assert self._report.started is not None
        started = self._report.started
        if not started.address:  # a spare does not listen
            return await self._outlive()
        if self._is_router:
            following = follow_router(started.address, on_doubt, started.pid, _drain_s(self._spec))
        else:
            following = follow_worker(started.address, started.epoch, on_load, on_doubt, self._context.dial)
        ends = [asyncio.create_task(self._outlive()), asyncio.create_task(following)]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in ends:
                task.cancel()

    @property
    def serves_as(self) -> Incarnation:
        """The incarnation that the actor reports; until it has answered, the one it was created for."""
        reported = self._report.incarnation if self._report is not None else None
        return reported or self._spec.incarnation

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
        started = _started(report)
        self._report = report
        return started

    async def change_weights(self, change: WeightChange) -> Started:
        assert self._actor is not None, "place first"
        try:
            report: StartReport = await self._actor.change_weights.remote(self.serves_as, change)
        except RayError as error:
            raise Unavailable(f"its process died while changing its weights: {_first_line(error)}") from error
        started = _started(report)
        if isinstance(change, ApplyWeights):
            self._report = report
        return started

    async def stop(self, grace_s: float = 0.0) -> None:
        if self._actor is None:
            return
        try:
            await self._actor.stop.remote(grace_s)
            self._stopped = True
        except RayError as error:
            raise Unavailable(f"its process died while stopping: {_first_line(error)}") from error

    async def distrust(self) -> None:
        keeper, report = self._spec.config.get("keeper"), self._report
        if keeper is None or report is None or report.started is None:
            return
        assert isinstance(keeper, Mapping)
        await run_on_node(report.node_id, keeper_link.distrust, str(keeper["name"]), report.started.pid)

    async def kill(self) -> None:
        if self._actor is not None:
            await self._kill_actor(self._actor)
        if self._spec.node_id is None:
            await asyncio.to_thread(placement.release, self._spec.name)

    async def _kill_actor(self, actor: ActorHandle) -> None:
        """Kills the actor, by SIGKILL first: Ray only asks a process to exit, which a suspended (SIGSTOP) process
        cannot do. Sends no signal after an orderly stop, since Ray would report an unexpected death.

        A router must be gone before its successor starts, which needs its ports. A worker's successor may start as soon
        as the process is certain to end, or after a short wait if its node does not answer: epochs distinguish the two.
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
            log.info("%s: its end was not confirmed within %g s", self._spec.name, patience_s)
        for task in pending:
            task.cancel()

    @property
    def _is_router(self) -> bool:
        return self._spec.kind == ROUTER


def _started(report: StartReport) -> Started:
    if report.started is None:
        raise from_status(status_pb2.Status.FromString(report.error))
    return replace(report.started, node=report.node_id)


def _drain_s(spec: ActorSpec) -> float:
    value = spec.config["drain_s"]
    assert isinstance(value, int | float)
    return value + _LEAVE_MARGIN_S


def _first_line(error: RayError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


async def kill_process(node_id: str, pid: int) -> bool:
    """Sends SIGKILL to one of this deployment's processes on any node; even a suspended process cannot delay it.

    Returns whether the process is certain to end; on an unreachable node it never is.
    """
    try:
        await run_on_node(node_id, _kill, pid)
    except Unavailable as error:
        log.info("process %d was not signalled: %s", pid, error.message)
        return False
    return True


async def run_on_node(node_id: str, function: Callable[..., None], *arguments: object) -> None:
    """Calls a short function on any node, in a Ray task where it is not this one. Raises what the function raises, or
    Unavailable if the node does not answer within _ON_NODE_TIMEOUT_S."""
    if node_id == ray.get_runtime_context().get_node_id():
        await asyncio.to_thread(function, *arguments)
        return
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    try:
        async with asyncio.timeout(_ON_NODE_TIMEOUT_S):
            await (await asyncio.to_thread(task.remote, *arguments))  # `remote` blocks while Ray's head is down
    except (RayError, TimeoutError) as error:
        raise Unavailable(f"node {node_id} does not answer: {type(error).__name__}") from error


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
