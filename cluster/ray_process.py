"""One supervised process as a Ray actor: made, watched and removed. The controller's hands; it decides nothing."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from google.rpc import status_pb2
from ray.actor import ActorHandle
from ray.exceptions import RayError

from cluster.controller import Started
from cluster.heartbeats import follow_router, follow_worker
from cluster.pool import Incarnation
from cluster.shares import Share
from penstock.errors import Unavailable, from_status
from penstock.grpc_server import Dial
from penstock.v1 import worker_pb2

log = logging.getLogger(__name__)

NAMESPACE = "penstock"
_REMOVE_TIMEOUT_S = 5.0  # until Ray has confirmed that a killed actor is gone


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """Everything that decides how one incarnation's actor is made."""

    kind: str  # prefill, decode or router
    incarnation: Incarnation
    config: Mapping[str, object]  # of the worker or router, plain data
    share: Share
    node_id: str | None = None  # a node that it must run on
    use_node_address: bool = False  # listen on the node's address and not on loopback


@dataclass(frozen=True, slots=True)
class StartReport:
    """An actor's answer to `start`. Errors travel as google.rpc.Status, like everywhere else."""

    started: Started | None
    node_id: str
    error: bytes = b""


def actor_options(spec: ActorSpec, python_path: str) -> dict[str, Any]:
    options: dict[str, Any] = {
        # A new name for each incarnation: the old one's may still be held when its successor is made.
        "name": f"{spec.incarnation.worker_id}.{spec.incarnation.number}",
        "namespace": NAMESPACE,
        "num_cpus": spec.share.num_cpus,
        "num_gpus": spec.share.num_gpus,
        "resources": dict(spec.share.resources),
        "max_restarts": 0,  # the controller replaces it, with a new epoch
        "runtime_env": {"env_vars": {**spec.share.environment(), "PYTHONPATH": python_path}},
    }
    if spec.node_id:
        options["scheduling_strategy"] = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            spec.node_id, soft=False
        )
    return options


class RayProcess:
    """Implements `controller.SupervisedProcess`. Runs on the controller's event loop."""

    def __init__(
        self, actor_class: Any, spec: ActorSpec, python_path: str, controller: ActorHandle, dial: Dial
    ) -> None:
        self._spec = spec
        self._dial = dial
        self._controller = controller
        self._actor = actor_class.options(**actor_options(spec, python_path)).remote(
            spec.kind, spec.incarnation.worker_id, dict(spec.config), spec.use_node_address
        )
        self._life = self._actor.live.remote()  # ends when the server or its process does
        self._report: StartReport | None = None

    async def start(self) -> Started:
        try:
            report: StartReport = await self._actor.start.remote(self._controller, self._spec.incarnation)
        except RayError as error:
            raise Unavailable(f"its process died while starting: {_first_line(error)}") from error
        self._report = report
        if report.started is None:
            raise from_status(status_pb2.Status.FromString(report.error))
        return report.started

    async def watch(self, on_load: Callable[[worker_pb2.Load], None]) -> str:
        assert self._report is not None
        assert self._report.started is not None
        started = self._report.started
        if self._spec.kind == "router":
            answering = asyncio.create_task(follow_router(started.address))
        else:
            answering = asyncio.create_task(follow_worker(started.address, started.epoch, on_load, self._dial))
        living = asyncio.create_task(self._outlive())
        try:
            done, _ = await asyncio.wait([living, answering], return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            living.cancel()
            answering.cancel()

    async def _outlive(self) -> str:
        try:
            return str(await self._life)
        except RayError as error:
            return f"its process died: {_first_line(error)}"

    async def stop(self) -> None:
        try:
            await self._actor.stop.remote()
        except RayError as error:
            raise Unavailable(f"its process died while stopping: {_first_line(error)}") from error

    async def kill(self) -> None:
        ray.kill(self._actor, no_restart=True)
        try:
            async with asyncio.timeout(_REMOVE_TIMEOUT_S):
                await self._outlive()
        except TimeoutError:
            self._kill_frozen()

    def _kill_frozen(self) -> None:
        """Ray asks a process to end; one that is stopped by a signal cannot hear it."""
        report = self._report
        name = self._spec.incarnation.worker_id
        if report is None or report.started is None or report.node_id != ray.get_runtime_context().get_node_id():
            log.warning("%s: Ray did not confirm its end within %g s", name, _REMOVE_TIMEOUT_S)
            return
        try:
            os.kill(report.started.pid, signal.SIGKILL)
        except ProcessLookupError:
            log.info("%s: process %d was gone already", name, report.started.pid)


def _first_line(error: RayError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
