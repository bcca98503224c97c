"""The Ray actor of one worker or router: hosts its server, reports the progress of its start, and stops it cleanly.

It starts and replaces nothing by itself: the controller creates it and finds it again by name (`cluster.ray.process`).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.controller.supervised_process import Started
from cluster.local.ready_mark import leave_ready_mark, remove_ready_mark
from cluster.local.role_host import RoleHost
from cluster.pools.pool import ROUTER, SPARE, Incarnation
from cluster.pools.resources import rank_environment
from cluster.pools.weight_change import ApplyWeights, WeightChange
from cluster.ray.process import StartReport
from cluster.ray.sigterm import on_sigterm
from penstock.config import RouterConfig, WorkerConfig, parse
from penstock.errors import InternalError, InvalidInput, PenstockError, to_status
from penstock.process.setup import favour_event_loop, freeze_heap, return_freed_memory, set_up_logging
from penstock.rpc.addresses import LOOPBACK, callable_host
from penstock.types import Epoch, Role, WorkerId
from worker.main import drain_server
from worker.start_progress import StartReporter

if TYPE_CHECKING:
    from engine.parallel.leader import Launch

log = logging.getLogger(__name__)

_CONTROLLER_PATIENCE_S = 5.0  # how long a worker asked to stop waits, once empty, for the controller


class HostedServer(Protocol):
    """The server that an actor hosts."""

    async def start(self, stages: StartReporter) -> Started: ...

    async def flip(self, worker_id: WorkerId, role: Role) -> Started:
        """Changes the server's role."""
        ...

    async def change_weights(self, change: WeightChange) -> Started:
        """Prepares weights, puts them in force, or discards them."""
        ...

    async def wait_failed(self) -> str:
        """Returns the reason once the server cannot continue by itself."""
        ...

    async def leave(self, drain_s: float) -> None:
        """Refuses new requests, and returns once none is left or after `drain_s`. `stop` follows."""
        ...

    async def stop(self) -> None: ...


class HostedWorker:
    """Hosts a prefill or decode worker: the same server that `python -m decode_worker` runs."""

    def __init__(self, config: WorkerConfig, *, is_spare: bool, launch: Launch | None) -> None:
        self._host = RoleHost(config, is_spare=is_spare, launch=launch)

    async def start(self, stages: StartReporter) -> Started:
        await self._host.start(stages)
        return self._started()

    def _started(self) -> Started:
        version = self._host.weights_version
        return Started(self._host.epoch, self._host.address, os.getpid(), weights_version=version)

    async def flip(self, worker_id: WorkerId, role: Role) -> Started:
        await self._host.flip(worker_id, role)
        return self._started()

    async def change_weights(self, change: WeightChange) -> Started:
        await self._host.change_weights(change)
        return self._started()

    async def wait_failed(self) -> str:
        try:
            await self._host.failed
        except Exception as error:
            return f"its step loop died: {type(error).__name__}: {error}"
        return "its step loop ended"

    async def leave(self, drain_s: float) -> None:
        await drain_server(self._host, drain_s)

    async def stop(self) -> None:
        await self._host.stop()


class HostedRouter:
    def __init__(self, config: RouterConfig) -> None:
        from router.server import RouterServer

        return_freed_memory()
        favour_event_loop()
        self._config = config
        self._server = RouterServer(config)

    async def start(self, stages: StartReporter) -> Started:
        await self._server.start()
        self._server.warm_up()
        freeze_heap()
        host = callable_host(self._config.host)
        ports = self._server.ports
        return Started(
            Epoch(0),
            f"{LOOPBACK if ports.control != ports.grpc else host}:{ports.control}",
            os.getpid(),
            http_address=f"{host}:{ports.http}",
            metrics_address=f"{host}:{ports.metrics}" if ports.metrics else "",
            public_address=f"{host}:{ports.grpc}",
            peer_address=self._server.fleet.peers.address,
            encrypted=self._config.tls is not None,
        )

    async def wait_failed(self) -> str:
        await asyncio.get_running_loop().create_future()  # a router never fails by itself
        raise AssertionError("unreachable")

    async def flip(self, worker_id: WorkerId, role: Role) -> Started:
        raise InvalidInput("worker_id", "is a router's, which has no other role")

    async def change_weights(self, change: WeightChange) -> Started:
        raise InvalidInput("worker_id", "is a router's, which has no weights")

    async def leave(self, drain_s: float) -> None:
        await self._server.leave(drain_s)

    async def stop(self) -> None:
        await self._server.stop()


class ServerActor:
    """A worker or router in a process of its own."""

    def __init__(self, kind: str, worker_id: str, config: Mapping[str, object], use_node_address: bool) -> None:
        set_up_logging(worker_id)
        self._kind = kind
        self._name = worker_id
        self._config = at_node_address(config) if use_node_address else config
        group = ray.util.get_current_placement_group()
        self._launch = _launch_actors(group, rank_environment()) if group is not None else None
        self._server: HostedServer | None = None
        self._made = asyncio.Event()
        self._starting: asyncio.Task[StartReport] | None = None
        self._stop_requested = asyncio.Event()
        self._leaving: asyncio.Task[None] | None = None

    async def start(self, controller: ActorHandle, incarnation: Incarnation) -> StartReport:
        """Returns once a request would succeed, or with the error. The next controller gets the same answer again."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(controller, incarnation))
        return await asyncio.shield(self._starting)

    async def _start(self, controller: ActorHandle, incarnation: Incarnation) -> StartReport:
        loop = asyncio.get_running_loop()

        def report_progress(line: str) -> None:
            loop.call_soon_threadsafe(controller.on_progress.remote, incarnation, line)

        controller.on_progress.remote(incarnation, "importing libraries")

        async def make_and_start() -> Started:
            self._server = _make_server(self._kind, self._config, self._launch)
            self._made.set()
            on_sigterm(lambda: loop.call_soon_threadsafe(self._on_sigterm) and None)
            started = await self._server.start(StartReporter(report_progress))
            leave_ready_mark(self._name)
            return started

        return await _report(make_and_start(), incarnation)

    async def flip(self, incarnation: Incarnation) -> StartReport:
        """Turns this process into the given incarnation, with its pool's role; a later `start` reports it."""
        assert self._server is not None
        started = self._server.flip(incarnation.worker_id, Role(incarnation.pool_name))
        self._starting = asyncio.create_task(_report(started, incarnation))
        return await asyncio.shield(self._starting)

    async def change_weights(self, incarnation: Incarnation, change: WeightChange) -> StartReport:
        """Changes the weights; after they are put in force, a later `start` reports what this process is then."""
        assert self._server is not None
        changing = asyncio.create_task(_report(self._server.change_weights(change), incarnation))
        if isinstance(change, ApplyWeights):
            self._starting = changing
        return await asyncio.shield(changing)

    async def live(self) -> str:
        """Returns the reason once the server cannot continue; Ray ends the call when the process dies."""
        await self._made.wait()
        assert self._server is not None
        return await self._server.wait_failed()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Stops the server; the controller, which calls this, then ends the process."""
        self._stop_requested.set()
        remove_ready_mark(self._name)
        if self._server is not None:
            if grace_s:
                await self._server.leave(grace_s)
            await self._server.stop()

    def _on_sigterm(self) -> None:
        self._leaving = self._leaving or asyncio.create_task(self._leave())

    async def _leave(self) -> None:
        """Leaves like a plain process on SIGTERM. The controller notices, drains a worker and stops it; a router, or a
        worker without a controller, exits by itself.
        """
        assert self._server is not None
        drain_s = self._config["drain_s"]
        assert isinstance(drain_s, int | float)
        log.info("asked to end")
        await self._server.leave(drain_s)
        if self._kind != ROUTER:
            try:
                async with asyncio.timeout(_CONTROLLER_PATIENCE_S):
                    await self._stop_requested.wait()
            except TimeoutError:
                log.info("no controller is left to stop it; it ends by itself")
        if not self._stop_requested.is_set():
            await self._server.stop()
            os._exit(0)


async def _report(starting: Awaitable[Started], incarnation: Incarnation) -> StartReport:
    """Awaits a start or a flip and reports the outcome."""
    node_id = ray.get_runtime_context().get_node_id()
    try:
        return StartReport(await starting, node_id, incarnation=incarnation)
    except PenstockError as error:
        return StartReport(None, node_id, to_status(error).SerializeToString())
    except Exception as error:
        log.exception("%s failed to start", incarnation.worker_id)
        fault = InternalError(f"{type(error).__name__}: {error}")
        return StartReport(None, node_id, to_status(fault).SerializeToString())


def _make_server(kind: str, config: Mapping[str, object], launch: Launch | None) -> HostedServer:
    if kind == ROUTER:
        return HostedRouter(parse(RouterConfig, config, source=kind))
    return HostedWorker(parse(WorkerConfig, config, source=kind), is_spare=kind == SPARE, launch=launch)


def at_node_address(config: Mapping[str, object]) -> dict[str, object]:
    """Returns a worker's config for a cluster of several machines. The worker listens only on its node's address, where
    other workers and, with lookaside, clients can reach it.
    """
    address = ray.util.get_node_ip_address()
    transfer = config["transfer"]
    assert isinstance(transfer, Mapping)
    lookaside = config["lookaside"]
    if isinstance(lookaside, Mapping):
        lookaside = {**lookaside, "host": address}
    return {**config, "host": address, "transfer": {**transfer, "host": address}, "lookaside": lookaside}


class RankActor:
    """A rank of a tensor-parallel worker other than the first, which is the worker's own actor.

    It belongs to that actor: when the actor or the channel between them ends, so does this one. No batch and no page
    passes through an actor call.
    """

    def serve(self, control: str) -> None:
        """Serves until rank 0 is gone; then the process exits at once."""
        # Imported here, because torch must load after this process's thread limits are set.
        from engine.parallel.spawn import serve_rank
        from kv_transfer.ranks.rank_main import extend

        serve_rank(Path(control), extend)
        os._exit(0)


def _launch_actors(group: PlacementGroup, environment: Mapping[str, str]) -> Launch:
    """Returns a function that starts ranks in the worker's own placement group, with `environment`."""
    actors: list[ActorHandle] = []  # keeps the handles, as Ray ends an actor without any

    def launch(control: Path, num_processes: int) -> None:
        for bundle in range(1, num_processes + 1):
            amounts = dict(group.bundle_specs[bundle])
            made = ray.remote(RankActor).options(
                num_cpus=amounts.pop("CPU", 0),
                num_gpus=amounts.pop("GPU", 0),
                resources=amounts,
                max_restarts=0,
                runtime_env={"env_vars": dict(environment)},
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            )
            actor: Any = made.remote()
            actor.serve.remote(str(control))
            actors.append(actor)

    return launch
