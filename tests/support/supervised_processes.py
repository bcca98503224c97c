"""Runs a supervised deployment of plain processes on this machine: the real controller and Admin service, without Ray.

It replaces lost processes, drains, flips and upgrades as a deployment on Ray does, and ends with its `async with`
block. Tests and benchmarks use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import grpc.aio

from cluster.controller.admin_service import start_admin_server
from cluster.controller.composition import make_controller
from cluster.controller.controller import Controller
from cluster.controller.supervised_process import OnUnplaced, Started
from cluster.health.canary_check import CanaryCheck
from cluster.health.canary_policy import CanaryJudge
from cluster.health.liveness import OnDoubt, follow_router, follow_worker
from cluster.pools.pool import ROUTER, Incarnation
from cluster.pools.weight_change import ApplyWeights, DiscardWeights, PrepareWeights, ReceiveWeights, WeightChange
from penstock.client.async_client import AsyncClient
from penstock.client.retry import RetryPolicy
from penstock.config import RouterConfig, ServeConfig, WorkerConfig
from penstock.errors import Unavailable, from_rpc_error
from penstock.rpc.server import Dial, GrpcServer, make_channel
from penstock.types import Epoch, Role
from penstock.v1 import admin_pb2, worker_pb2, worker_pb2_grpc
from tests.support.plain_processes import log_tail
from tests.support.prefork.module_process import ModuleProcess, start_module

_FIRST_REQUEST_RETRY = RetryPolicy(max_attempts=1000, initial_s=0.05, max_s=0.5)
_FLIP_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 20.0
_LEAVE_MARGIN_S = 5.0  # in addition to its streams' time, for a router that was asked to end


@dataclass(slots=True)
class PlainDeployment:
    controller: Controller
    admin_address: str
    config: ServeConfig
    admin_server: GrpcServer

    async def stop_admin(self) -> None:
        """Ends the Admin service, as the death of the controller's process does."""
        await self.admin_server.stop(0.0)

    async def start_admin(self) -> None:
        """Starts the Admin service again, at its port."""
        port = int(self.admin_address.rpartition(":")[2])
        self.admin_server, _ = await start_admin_server(self.controller, self.config.admin_host, port)

    @property
    def grpc_address(self) -> str:
        """Returns host:port of the first router."""
        return self.controller.status().endpoints[0].removeprefix("grpc://")

    async def until(
        self, condition: Callable[[admin_pb2.StatusResponse], bool], timeout_s: float = 240.0
    ) -> admin_pb2.StatusResponse:
        """Returns the first status that fulfils the condition. Raises TimeoutError, or the deployment's failure."""
        version = -1
        async with asyncio.timeout(timeout_s):
            while True:
                snapshot = await self.controller.wait(version, 1)
                if snapshot.failure is not None:
                    raise snapshot.failure
                if condition(snapshot.status):
                    return snapshot.status
                version = snapshot.version


@contextlib.asynccontextmanager
async def plain_deployment(config: ServeConfig) -> AsyncIterator[PlainDeployment]:
    """Yields a ready deployment. Ports of 0 become free ones; processes listen on loopback, without a secret."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        admin_address = ""

        def spawn(incarnation: Incarnation, served: ServeConfig) -> PlainProcess:
            name = f"{incarnation.worker_id}.{incarnation.number}"
            if incarnation.pool_name == ROUTER:
                return PlainProcess(served.router_config(admin_address, incarnation.place), Path(folder), name)
            role = Role(incarnation.spare_of or incarnation.pool_name)
            worker = served.worker_config(incarnation.worker_id, role)
            return PlainProcess(worker, Path(folder), name, is_spare=bool(incarnation.spare_of))

        canary_check = CanaryCheck(CanaryJudge(), make_channel)
        controller = make_controller(config, spawn, _send_first_request, canary_check=canary_check)
        server, admin_address = await start_admin_server(controller, config.admin_host, config.admin_port)
        deployment = PlainDeployment(controller, admin_address, config, server)
        try:
            controller.start()
            try:
                await deployment.until(lambda status: status.ready, config.start_timeout_s)
            except TimeoutError as error:
                raise Unavailable(f"not ready within start_timeout_s = {config.start_timeout_s:g} s") from error
            yield deployment
        finally:
            await controller.stop()
            await deployment.admin_server.stop()


async def _send_first_request(address: str) -> None:
    async with AsyncClient(address, retry=_FIRST_REQUEST_RETRY) as client:
        await client.complete("Hello", max_tokens=1, temperature=0.0)


class PlainProcess:
    """Implements `SupervisedProcess` with a process of this machine."""

    def __init__(
        self,
        config: WorkerConfig | RouterConfig,
        folder: Path,
        name: str,
        dial: Dial = make_channel,
        *,
        is_spare: bool = False,
    ) -> None:
        """`folder` holds the process's configuration and log."""
        self._config = config
        self._is_spare = is_spare
        self._is_router = isinstance(config, RouterConfig)
        self._path, self._log = folder / f"{name}.json", folder / f"{name}.log"
        self._dial = dial
        self._process: ModuleProcess | None = None
        self._stdout: asyncio.ReadTransport | None = None
        self._host = ""  # host:port of the service that changes its role
        self._started: Started | None = None
        self._prepared = 0  # version of the weights that it has loaded

    async def place(self, on_unplaced: OnUnplaced) -> None:
        """Returns at once, because this machine is its place."""

    async def start(self) -> Started:
        self._path.write_text(self._config.model_dump_json())
        module = "router" if self._is_router else "cluster.local.worker"
        arguments = ["--config", str(self._path), *(["--spare"] if self._is_spare else [])]
        environment: dict[str, str] = {}
        if isinstance(self._config, WorkerConfig) and self._config.engine.num_threads is not None:
            threads = str(self._config.engine.num_threads)
            environment |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        with self._log.open("wb") as log:
            self._process = start_module(module, arguments, log, environment=environment)
        line = await self._first_line(self._process)  # the supervisor bounds the start
        if not line:
            raise Unavailable(f"it ended with status {await _end_of(self._process)}: {log_tail(self._log)}")
        ready = json.loads(line)
        self._host = ready.get("host", "")
        if self._is_router:
            self._started = Started(
                Epoch(0),
                ready["control"],
                ready["pid"],
                ready["http"],
                public_address=ready["grpc"],
                peer_address=ready["peer"],
            )
        else:
            assert isinstance(self._config, WorkerConfig)
            version = self._config.engine.weights_version
            self._started = Started(Epoch(ready["epoch"]), ready["address"], ready["pid"], weights_version=version)
        return self._started

    async def _first_line(self, process: ModuleProcess) -> bytes:
        reader = asyncio.StreamReader()
        self._stdout, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), process.stdout
        )
        return await reader.readline()

    async def watch(self, on_load: Callable[[worker_pb2.Load], None], on_doubt: OnDoubt) -> str:
        assert self._process is not None
        assert self._started is not None
        address, epoch = self._started.address, self._started.epoch
        if not address:  # a spare does not listen
            return await self._outlive()
        if self._is_router:
            drain_s = self._config.drain_s + _LEAVE_MARGIN_S
            following = follow_router(address, on_doubt, self._started.pid, drain_s)
        else:
            following = follow_worker(address, epoch, on_load, on_doubt, self._dial)
        ends = [asyncio.create_task(self._outlive()), asyncio.create_task(following)]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in ends:
                task.cancel()

    async def _outlive(self) -> str:
        assert self._process is not None
        return f"its process ended with status {await _end_of(self._process)}"

    async def flip(self, incarnation: Incarnation) -> Started:
        assert self._started is not None
        request = worker_pb2.HostFlipRequest(worker_id=incarnation.worker_id, role=incarnation.pool_name)
        try:
            async with self._dial(self._host) as channel:
                answer = await worker_pb2_grpc.WorkerHostStub(channel).Flip(request, timeout=_FLIP_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        self._started = replace(self._started, epoch=Epoch(answer.epoch), address=answer.address)
        return self._started

    async def change_weights(self, change: WeightChange) -> Started:
        assert self._started is not None
        try:
            async with self._dial(self._host) as channel:
                host = worker_pb2_grpc.WorkerHostStub(channel)
                match change:
                    case ReceiveWeights(broadcast, member):
                        receiving = worker_pb2.ReceiveWeightsRequest(
                            broadcast=worker_pb2.WeightsBroadcast(**asdict(broadcast)), **asdict(member)
                        )
                        await host.ReceiveWeights(receiving, timeout=_FLIP_TIMEOUT_S)
                    case PrepareWeights(weights):
                        message = worker_pb2.LoadedWeights(**weights.model_dump())
                        await host.PrepareWeights(message, timeout=_FLIP_TIMEOUT_S)
                        self._prepared = weights.version
                    case ApplyWeights(mode, timeout_s):
                        applying = worker_pb2.ApplyWeightsRequest(mode=mode.value, timeout_s=timeout_s)
                        answer = await host.ApplyWeights(applying, timeout=_FLIP_TIMEOUT_S)
                        self._started = replace(
                            self._started,
                            epoch=Epoch(answer.epoch),
                            address=answer.address,
                            weights_version=self._prepared,
                        )
                    case DiscardWeights():
                        await host.DiscardWeights(worker_pb2.DiscardWeightsRequest(), timeout=_FLIP_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return self._started

    async def stop(self, grace_s: float = 0.0) -> None:
        # A worker was drained before; a router's own `drain_s` bounds its streams.
        await self._end(signal.SIGTERM if self._is_router else signal.SIGINT, grace_s)

    async def distrust(self) -> None:
        pass  # these workers have no keeper

    async def kill(self) -> None:
        await self._end(signal.SIGKILL)

    async def _end(self, number: signal.Signals, grace_s: float = 0.0) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        self._process.send_signal(number)
        await asyncio.wait_for(_end_of(self._process), grace_s + _END_TIMEOUT_S)
        if self._stdout is not None:
            self._stdout.close()


async def _end_of(process: ModuleProcess) -> int:
    return await asyncio.wrap_future(process.ended)
