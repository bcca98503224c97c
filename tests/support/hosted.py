"""Runs a deployment in this process: the real controller and Admin service over real workers and routers, without Ray.

Servers run on the test's own event loop; leaving the `async with` block ends them. `Load` sends requests while it is
open and keeps the answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from cluster.controller.admin_service import start_admin_server
from cluster.controller.composition import make_controller
from cluster.controller.controller import Controller
from cluster.controller.record import ControllerRecord
from cluster.controller.supervised_process import OnUnplaced, Started
from cluster.health.liveness import OnDoubt, follow_router, follow_worker
from cluster.local.role_host import RoleHost
from cluster.pools.pool import ROUTER, Incarnation
from cluster.pools.weight_change import WeightChange
from penstock.client.async_client import AsyncClient
from penstock.client.retry import RetryPolicy
from penstock.config import ServeConfig
from penstock.errors import PenstockError
from penstock.types import Epoch, Role, WorkerId
from penstock.v1 import admin_pb2, worker_pb2
from router.server import RouterServer
from tests.support.serving import patience

PROMPTS = [[(7 * i + 131 * n) % 900 + 20 for i in range(40 + 16 * n)] for n in range(4)]
SAMPLING = {"temperature": 0.875, "top_p": 0.9375, "ignore_eos": True}


class HostedWorker:
    """Implements `SupervisedProcess`."""

    def __init__(self, deployment: Hosted, incarnation: Incarnation, config: ServeConfig) -> None:
        self._deployment = deployment
        role = Role(incarnation.spare_of or incarnation.pool_name)
        worker = config.worker_config(incarnation.worker_id, role)
        self.host = RoleHost(worker, is_spare=bool(incarnation.spare_of))
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._stopped = False

    async def place(self, on_unplaced: OnUnplaced) -> None:
        pass

    async def start(self) -> Started:
        await self.host.start()
        return self._started()

    def _started(self) -> Started:
        version = self.host.weights_version
        return Started(self.host.epoch, self.host.address, os.getpid(), weights_version=version)

    async def watch(self, on_load: Callable[[worker_pb2.Load], None], on_doubt: OnDoubt) -> str:
        if not self.host.address:
            return await asyncio.shield(self._lost)  # a spare
        following = asyncio.create_task(follow_worker(self.host.address, self.host.epoch, on_load, on_doubt))
        try:
            done, _ = await asyncio.wait([following, self._lost], return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            following.cancel()

    async def flip(self, incarnation: Incarnation) -> Started:
        await self.host.flip(incarnation.worker_id, Role(incarnation.pool_name))
        return self._started()

    async def change_weights(self, change: WeightChange) -> Started:
        await self.host.change_weights(change)
        return self._started()

    def lose(self) -> None:
        self._lost.set_result("it was killed")

    async def stop(self, grace_s: float = 0.0) -> None:
        await self.kill()

    async def distrust(self) -> None:
        pass  # these workers have no keeper

    async def kill(self) -> None:
        if not self._stopped:
            self._stopped = True
            replica = self.host.server.replica if self.host.address else None
            await self.host.stop()
            if replica is not None:
                self._deployment.pinned.append(replica.num_pinned_pages)


class HostedRouter:
    def __init__(self, deployment: Hosted, incarnation: Incarnation) -> None:
        config = deployment.config.router_config(deployment.admin, incarnation.place)
        self.server = RouterServer(config.model_copy(update={"grpc_port": 0, "http_port": 0}))
        self._stopped = False

    async def place(self, on_unplaced: OnUnplaced) -> None:
        pass

    async def start(self) -> Started:
        await self.server.start()
        ports = self.server.ports
        peer = self.server.fleet.peers.address
        return Started(Epoch(0), f"127.0.0.1:{ports.grpc}", os.getpid(), f"127.0.0.1:{ports.http}", peer_address=peer)

    async def watch(self, on_load: Callable[[worker_pb2.Load], None], on_doubt: OnDoubt) -> str:
        return await follow_router(f"127.0.0.1:{self.server.ports.grpc}", on_doubt)

    async def flip(self, incarnation: Incarnation) -> Started:
        raise AssertionError("no router is flipped")

    async def change_weights(self, change: WeightChange) -> Started:
        raise AssertionError("no router has weights")

    async def stop(self, grace_s: float = 0.0) -> None:
        await self.server.leave(grace_s or 2.0)
        await self.kill()

    async def distrust(self) -> None:
        pass  # these workers have no keeper

    async def kill(self) -> None:
        if not self._stopped:
            self._stopped = True
            await self.server.stop()


@dataclass
class Hosted:
    """Holds the controller and its processes; `hosted` makes it."""

    config: ServeConfig
    admin: str = ""
    controller: Controller = field(init=False)
    workers: dict[WorkerId, HostedWorker] = field(default_factory=dict)  # by the name under which each started
    # The processes that a successor of the controller would find.
    records: list[ControllerRecord] = field(default_factory=list)
    pinned: list[int] = field(default_factory=list)  # pages that each ended worker still held

    def __post_init__(self) -> None:
        self.controller = make_controller(self.config, self.spawn, self.canary, save=self.records.append)

    def spawn(self, incarnation: Incarnation, config: ServeConfig) -> HostedWorker | HostedRouter:
        if incarnation.pool_name == ROUTER:
            return HostedRouter(self, incarnation)
        worker = self.workers[incarnation.worker_id] = HostedWorker(self, incarnation, config)
        return worker

    async def canary(self, address: str) -> None:
        async with AsyncClient(address, retry=RetryPolicy(max_attempts=200, initial_s=0.02, max_s=0.1)) as client:
            await client.complete("Hello", max_tokens=1, temperature=0.0)

    @property
    def grpc(self) -> str:
        return self.controller.status().endpoints[0].removeprefix("grpc://")

    async def until(self, condition: Callable[[admin_pb2.StatusResponse], bool]) -> admin_pb2.StatusResponse:
        version = -1
        async with asyncio.timeout(120):
            while True:
                snapshot = await self.controller.wait(version, 1)
                assert snapshot.failure is None, snapshot.failure
                if condition(snapshot.status):
                    return snapshot.status
                version = snapshot.version

    def members(self) -> dict[str, admin_pb2.Member]:
        """Returns the ready workers by name."""
        status = self.controller.status()
        return {each.member.worker_id: each.member for each in status.workers if each.state == "ready"}


@contextlib.asynccontextmanager
async def hosted(config: ServeConfig) -> AsyncIterator[Hosted]:
    """Yields a ready deployment."""
    deployment = Hosted(config)
    with patience():
        server, deployment.admin = await start_admin_server(deployment.controller, "127.0.0.1", 0)
        try:
            deployment.controller.start()
            await deployment.until(lambda status: status.ready)
            yield deployment
        finally:
            await deployment.controller.stop()
            await server.stop()


@dataclass
class Answered:
    prompt: int
    token_ids: list[int]
    num_migrations: int
    num_redispatches: int


class Load:
    """Sends requests, one after another in each of `num_lanes` tasks, until the block ends.

    The prompts take turns, and the seed of each is its place among them.
    """

    def __init__(
        self,
        address: str,
        num_lanes: int = 3,
        max_tokens: int = 120,
        prompts: Sequence[list[int]] = PROMPTS,
    ) -> None:
        """`address` is a router's host:port for gRPC."""
        self._address = address
        self._prompts = prompts
        self._num_lanes = num_lanes
        self._max_tokens = max_tokens
        self._stopping = False
        self.answered: list[Answered] = []
        self.errors: list[PenstockError] = []
        self._progress = asyncio.Event()

    async def __aenter__(self) -> Load:
        self._client = AsyncClient(self._address, timeout_s=120)
        self._lanes = [asyncio.create_task(self._ask(lane)) for lane in range(self._num_lanes)]
        return self

    async def _ask(self, number: int) -> None:
        while not self._stopping:
            prompt = number % len(self._prompts)
            number += 1
            try:
                result = await self._client.complete(
                    self._prompts[prompt],
                    max_tokens=self._max_tokens,
                    seed=prompt,
                    **SAMPLING,  # type: ignore[arg-type]
                )
            except PenstockError as error:
                self.errors.append(error)
            else:
                timing = result.timing
                assert timing is not None
                self.answered.append(
                    Answered(prompt, list(result.token_ids), timing.num_migrations, timing.num_redispatches)
                )
            self._progress.set()

    async def more(self, count: int) -> None:
        """Returns once `count` more requests have ended."""
        wanted = len(self.answered) + len(self.errors) + count
        async with asyncio.timeout(120):
            while len(self.answered) + len(self.errors) < wanted:
                self._progress.clear()
                await self._progress.wait()

    async def __aexit__(self, *exception: object) -> None:
        self._stopping = True
        await asyncio.gather(*self._lanes)
        await self._client.close()
