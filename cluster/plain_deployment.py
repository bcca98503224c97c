"""A supervised deployment of plain processes on this machine: the real controller and Admin service, without Ray.

Replaces what is lost, drains, flips and upgrades as a deployment on Ray does, and ends with its `async with` block.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.admin_service import start_admin_server
from cluster.canary import Judge
from cluster.controller import Controller
from cluster.plain_process import PlainProcess
from cluster.pool import Incarnation
from cluster.proving import Proving
from cluster.supervised import ROUTER
from penstock.async_client import AsyncClient
from penstock.config import ServeConfig
from penstock.errors import Unavailable
from penstock.grpc_server import make_channel
from penstock.retry import RetryPolicy
from penstock.types import Role
from penstock.v1 import admin_pb2

_LOOPBACK = "127.0.0.1"
_CANARY_RETRY = RetryPolicy(max_attempts=1000, initial_s=0.05, max_s=0.5)


@dataclass(frozen=True, slots=True)
class PlainDeployment:
    controller: Controller
    admin_address: str

    @property
    def grpc_address(self) -> str:
        """Of the first router."""
        return self.controller.status().endpoints[0].removeprefix("grpc://")

    async def until(
        self, condition: Callable[[admin_pb2.StatusResponse], bool], timeout_s: float = 120.0
    ) -> admin_pb2.StatusResponse:
        """The first status that fulfils it. Raises TimeoutError, or what the deployment failed with."""
        version = -1
        async with asyncio.timeout(timeout_s):
            while True:
                snapshot = await self.controller.wait(version, timeout_s)
                if snapshot.failure is not None:
                    raise snapshot.failure
                if condition(snapshot.status):
                    return snapshot.status
                version = snapshot.version


@contextlib.asynccontextmanager
async def plain_deployment(config: ServeConfig) -> AsyncIterator[PlainDeployment]:
    """Ready when entered; ports of 0 in `config` are any free ones. Without a secret: every port is on loopback."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        admin_address = ""

        def spawn(incarnation: Incarnation) -> PlainProcess:
            made_of, name = controller.config_of(incarnation), f"{incarnation.worker_id}.{incarnation.number}"
            if incarnation.pool_name == ROUTER:
                return PlainProcess(made_of.router_config(admin_address, incarnation.place), Path(folder), name)
            role = Role(incarnation.spare_of or incarnation.pool_name)
            worker = made_of.worker_config(incarnation.worker_id, role)
            return PlainProcess(worker, Path(folder), name, is_spare=bool(incarnation.spare_of))

        controller = Controller(config, spawn, _canary, proving=Proving(Judge(), make_channel))
        server, admin_address = await start_admin_server(controller, _LOOPBACK, config.admin_port)
        deployment = PlainDeployment(controller, admin_address)
        try:
            controller.start()
            try:
                await deployment.until(lambda status: status.ready, config.start_timeout_s)
            except TimeoutError as error:
                raise Unavailable(f"not ready within start_timeout_s = {config.start_timeout_s:g} s") from error
            yield deployment
        finally:
            await controller.stop()
            await server.stop()


async def _canary(address: str) -> None:
    async with AsyncClient(address, retry=_CANARY_RETRY) as client:
        await client.complete("Hello", max_tokens=1, temperature=0.0)
