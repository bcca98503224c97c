"""The Ray actor of one worker or router: hosts its server, says how its start goes, and ends it in good order.

By itself it starts and replaces nothing: the controller makes it, and finds it again by name (`cluster.ray_process`).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import ray
from ray.actor import ActorHandle

from cluster.addresses import LOOPBACK, callable_host
from cluster.pool import SPARE, Incarnation
from cluster.ray_process import StartReport
from cluster.ray_ranks import launch_actors
from cluster.ray_sigterm import on_sigterm
from cluster.role_host import RoleHost
from cluster.shares import rank_environment
from cluster.supervised import ROUTER, Started
from penstock import log as logs
from penstock.config import RouterConfig, WorkerConfig, parse
from penstock.errors import InternalError, InvalidInput, PenstockError, to_status
from penstock.start_progress import Stages
from penstock.types import Epoch, Role, WorkerId
from penstock.worker_main import leave_in_order

if TYPE_CHECKING:
    from engine.ranks import Launch

log = logging.getLogger(__name__)

_CONTROLLER_PATIENCE_S = 5.0  # of an empty worker that was told to end, for its controller to stop it


class Server(Protocol):
    """What an actor hosts."""

    async def start(self, stages: Stages) -> Started: ...

    async def flip(self, worker_id: WorkerId, role: Role) -> Started:
        """Serves in the other role from now on."""
        ...

    async def fail(self) -> str:
        """Returns the reason once the server cannot go on by itself."""
        ...

    async def leave(self, drain_s: float) -> None:
        """Takes nothing new, and returns once nothing is left, or when time is up. `stop` follows."""
        ...

    async def stop(self) -> None: ...


class WorkerHost:
    """A prefill or decode worker; the same server that `python -m decode_worker` runs."""

    def __init__(self, config: WorkerConfig, *, waits: bool, launch: Launch | None) -> None:
        self._host = RoleHost(config, waits=waits, launch=launch)

    async def start(self, stages: Stages) -> Started:
        await self._host.start(stages)
        return self._started()

    def _started(self) -> Started:
        return Started(self._host.epoch, self._host.address, os.getpid())

    async def flip(self, worker_id: WorkerId, role: Role) -> Started:
        await self._host.flip(worker_id, role)
        return self._started()

    async def fail(self) -> str:
        try:
            await self._host.failed
        except Exception as error:
            return f"its step loop died: {type(error).__name__}: {error}"
        return "its step loop ended"

    async def leave(self, drain_s: float) -> None:
        await leave_in_order(self._host, drain_s)

    async def stop(self) -> None:
        await self._host.stop()


class RouterHost:
    def __init__(self, config: RouterConfig) -> None:
        from router.server import RouterServer

        self._config = config
        self._server = RouterServer(config)

    async def start(self, stages: Stages) -> Started:
        await self._server.start()
        host = callable_host(self._config.host)
        ports = self._server.ports
        return Started(
            Epoch(0),
            f"{LOOPBACK if self._config.tls else host}:{ports.control}",
            os.getpid(),
            http_address=f"{host}:{ports.http}",
            public_address=f"{host}:{ports.grpc}",
            encrypted=self._config.tls is not None,
        )

    async def fail(self) -> str:
        await asyncio.get_running_loop().create_future()  # nothing of a router fails by itself
        raise AssertionError("unreachable")

    async def flip(self, worker_id: WorkerId, role: Role) -> Started:
        raise InvalidInput("worker_id", "is a router's, which has no other role")

    async def leave(self, drain_s: float) -> None:
        await self._server.leave(drain_s)

    async def stop(self) -> None:
        await self._server.stop()


class ServerActor:
    """One worker or router in a process of its own."""

    def __init__(self, kind: str, worker_id: str, config: Mapping[str, object], use_node_address: bool) -> None:
        logs.set_up(worker_id)
        self._kind = kind
        self._config = at_node_address(config) if use_node_address else config
        group = ray.util.get_current_placement_group()
        self._launch = launch_actors(group, rank_environment()) if group is not None else None
        self._server: Server | None = None
        self._made = asyncio.Event()
        self._starting: asyncio.Task[StartReport] | None = None
        self._told_to_stop = asyncio.Event()
        self._leaving: asyncio.Task[None] | None = None

    async def start(self, controller: ActorHandle, incarnation: Incarnation) -> StartReport:
        """Returns once a request would succeed, or with the error. Asked again, by the next controller, the same."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(controller, incarnation))
        return await asyncio.shield(self._starting)

    async def _start(self, controller: ActorHandle, incarnation: Incarnation) -> StartReport:
        node_id = ray.get_runtime_context().get_node_id()
        loop = asyncio.get_running_loop()

        def tell(line: str) -> None:
            loop.call_soon_threadsafe(controller.on_progress.remote, incarnation, line)

        controller.on_progress.remote(incarnation, "importing libraries")
        try:
            self._server = _make_server(self._kind, self._config, self._launch)
            self._made.set()
            on_sigterm(lambda: loop.call_soon_threadsafe(self._on_sigterm) and None)
            return StartReport(await self._server.start(Stages(tell)), node_id, incarnation=incarnation)
        except PenstockError as error:
            return StartReport(None, node_id, to_status(error).SerializeToString())
        except Exception as error:
            log.exception("start failed")
            fault = InternalError(f"{type(error).__name__}: {error}")
            return StartReport(None, node_id, to_status(fault).SerializeToString())

    async def flip(self, incarnation: Incarnation) -> StartReport:
        """The same process serves as this incarnation from now on, in its pool's role, and says so when asked again."""
        self._starting = asyncio.create_task(self._flip(incarnation))
        return await asyncio.shield(self._starting)

    async def _flip(self, incarnation: Incarnation) -> StartReport:
        assert self._server is not None
        node_id = ray.get_runtime_context().get_node_id()
        try:
            started = await self._server.flip(incarnation.worker_id, Role(incarnation.pool_name))
            return StartReport(started, node_id, incarnation=incarnation)
        except PenstockError as error:
            return StartReport(None, node_id, to_status(error).SerializeToString())
        except Exception as error:
            log.exception("the flip failed")
            fault = InternalError(f"{type(error).__name__}: {error}")
            return StartReport(None, node_id, to_status(fault).SerializeToString())

    async def live(self) -> str:
        """Returns the reason once the server cannot go on; broken off by Ray when the process dies."""
        await self._made.wait()
        assert self._server is not None
        return await self._server.fail()

    async def stop(self, grace_s: float = 0.0) -> None:
        """By the controller, which ends the process then."""
        self._told_to_stop.set()
        if self._server is not None:
            if grace_s:
                await self._server.leave(grace_s)
            await self._server.stop()

    def _on_sigterm(self) -> None:
        self._leaving = self._leaving or asyncio.create_task(self._leave())

    async def _leave(self) -> None:
        """As a plain process does. A worker's controller notices, empties it and stops it; where there is none, and
        of a router, the process ends by itself."""
        assert self._server is not None
        drain_s = self._config["drain_s"]
        assert isinstance(drain_s, int | float)
        log.info("told to end")
        await self._server.leave(drain_s)
        if self._kind != ROUTER:
            try:
                async with asyncio.timeout(_CONTROLLER_PATIENCE_S):
                    await self._told_to_stop.wait()
            except TimeoutError:
                log.info("nobody stops it; it ends by itself")
        if not self._told_to_stop.is_set():
            await self._server.stop()
            os._exit(0)


def _make_server(kind: str, config: Mapping[str, object], launch: Launch | None) -> Server:
    if kind == ROUTER:
        return RouterHost(parse(RouterConfig, config, source=kind))
    return WorkerHost(parse(WorkerConfig, config, source=kind), waits=kind == SPARE, launch=launch)


def at_node_address(config: Mapping[str, object]) -> dict[str, object]:
    """A worker's config for a cluster of several machines: it listens where the others, and with
    lookaside its clients, can reach it, and only there."""
    address = ray.util.get_node_ip_address()
    transfer = config["transfer"]
    assert isinstance(transfer, Mapping)
    lookaside = config["lookaside"]
    if isinstance(lookaside, Mapping):
        lookaside = {**lookaside, "host": address}
    return {**config, "host": address, "transfer": {**transfer, "host": address}, "lookaside": lookaside}
