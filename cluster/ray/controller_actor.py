"""The Ray actor that hosts the controller and its Admin service, and runs workers and routers as Ray actors for it.

Ray carries configuration, readiness, progress and stop orders. No prompt, token or page passes through an actor call:
the servers inside `cluster.ray.server_actor` talk gRPC and kv_transfer to each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle

from cluster.controller.admin_service import start_admin_server
from cluster.controller.composition import make_controller
from cluster.controller.controller import Controller
from cluster.controller.event_log import KEYS_READ, KEYS_REFUSED
from cluster.controller.record import FIRST_RECORD
from cluster.controller.supervised_process import FoundProcess
from cluster.controller.supervisor import STOP_TIMEOUT_S
from cluster.health.canary_check import CanaryCheck
from cluster.health.canary_policy import CanaryJudge
from cluster.pools.capacity_policy import WorkerNeed
from cluster.pools.pool import ROUTER, SPARE, Incarnation
from cluster.pools.resources import NO_CPU_SHARE, ResourceShare
from cluster.ray.autoscaler_hint import AutoscalerHint
from cluster.ray.machines import RayMachines
from cluster.ray.nodes import RayNodes
from cluster.ray.process import ActorContext, ActorSpec, RayProcess
from cluster.ray.record_store import RecordWriter, load_record
from cluster.ray.recovery import find_running, remove_everything
from cluster.ray.server_actor import ServerActor
from cluster.ray.sigterm import on_sigterm
from penstock.client.async_client import AsyncClient
from penstock.client.retry import RetryPolicy
from penstock.config import ServeConfig, WorkerConfig, parse
from penstock.errors import PenstockError, Unavailable, to_status
from penstock.process.setup import set_up_logging
from penstock.rpc.addresses import LOOPBACK
from penstock.rpc.admin_token import leave_token, remove_token
from penstock.rpc.reload import WatchedFiles
from penstock.rpc.secret import ADMIN
from penstock.rpc.server import GrpcServer
from penstock.rpc.trust import Trust
from penstock.types import Role, WorkerId
from router.api.identity import CANARY

log = logging.getLogger(__name__)

_NUM_THREADS = 64  # for calls that block while Ray's head is down
# The first request is retried until the router knows the workers; the caller sets its deadline.
_FIRST_REQUEST_RETRY = RetryPolicy(max_attempts=1000, initial_s=0.05, max_s=0.5)


class ControllerActor:
    """Hosts the controller and its Admin service.

    Ray restarts it when its process dies; the new one takes over the running processes.
    """

    def __init__(
        self,
        config: Mapping[str, object],
        shares: Mapping[str, ResourceShare],
        python_path: str,
        embedded: bool,
        token_file: str,
    ) -> None:
        """`config` holds the paths of keys and secrets, never their content: Ray stores and logs an actor's arguments.
        `token_file` is where operators' commands find the Admin service's token.
        """
        set_up_logging("controller")
        self._config = parse(ServeConfig, config)
        self._trust = Trust(self._config.security, self._on_key_file)
        self._token_file = Path(token_file)
        self._watching: asyncio.Task[None] | None = None
        self._shares = shares
        self._embedded = embedded  # the Ray cluster belongs to this deployment and spans only this machine
        context = ray.get_runtime_context()
        self._context = ActorContext(ray.remote(ServerActor), python_path, context.current_actor, self._trust.channel)
        self._node_id = context.get_node_id()
        self._controller: Controller
        self._records = RecordWriter()
        self._autoscaler_hint = AutoscalerHint() if not embedded else None
        self._admin: GrpcServer | None = None
        self._admin_address = ""
        self._began = asyncio.Event()
        self._beginning: asyncio.Task[bytes] | None = None
        self._retiring: asyncio.Task[None] | None = None
        self._is_successor = context.was_current_actor_reconstructed
        if self._is_successor:
            # A restarted actor starts itself, as the process that launched the deployment may be gone.
            context.current_actor.start.remote()
            context.current_actor.live.remote()

    async def start(self) -> tuple[str, bytes]:
        """Starts everything in the background. Returns the Admin service's host:port, and a google.rpc.Status on
        failure.
        """
        if self._beginning is None:
            self._beginning = asyncio.create_task(self._begin())
        try:
            failure = await asyncio.shield(self._beginning)
        except Exception:
            if not self._is_successor:
                raise
            # No caller sees this error, and the running processes need a controller, so the next one tries again.
            log.exception("recovery failed; the next controller tries again")
            os._exit(1)
        return self._admin_address, failure

    async def _begin(self) -> bytes:
        # Exit at once, since Ray's own exit waits for threads. The record is written, and Ray restarts the actor.
        on_sigterm(lambda: os._exit(1))
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_NUM_THREADS, "ray calls"))
        earlier = await load_record() if self._is_successor else None
        if earlier is None or earlier.stopping:
            await remove_everything()
        record = replace(earlier, generation=earlier.generation + 1) if earlier else FIRST_RECORD
        self._records.save(record)
        self._controller = make_controller(
            self._config,
            self._spawn,
            self._send_first_request,
            dial=self._trust.channel,
            record=record,
            save=self._records.save,
            canary_check=CanaryCheck(CanaryJudge(record.canary), self._trust.channel),
            nodes=None if self._embedded else RayNodes(self._node_id, self._exit),
            machines=await self._find_machines(),
        )
        self._watching = asyncio.create_task(self._trust.watcher.follow(), name="key files")
        # Routers keep the last membership until this service is back, so it must know every member by then.
        self._admin_address = f"{LOOPBACK}:{self._config.admin_port}"
        if earlier and not earlier.stopping:
            found = await find_running(self._take_over)
            left_behind = [each for each in found if self._is_left_behind(each)]
            self._controller.recover(record, [each for each in found if each not in left_behind])
            self._retiring = asyncio.create_task(self._retire(left_behind))
        try:
            self._admin, self._admin_address = await start_admin_server(
                self._controller, self._config.admin_host, self._config.admin_port, self._trust
            )
        except PenstockError as error:
            return to_status(error).SerializeToString()
        self._leave_token()
        self._began.set()
        if earlier and earlier.stopping:
            await self._controller.stop()
        else:
            self._controller.start()
        return b""

    def _is_left_behind(self, found: FoundProcess) -> bool:
        """Returns whether this router runs on the node that an earlier controller left."""
        is_router = found.incarnation.pool_name == ROUTER
        return is_router and found.started is not None and found.started.node != self._node_id

    async def _retire(self, routers: Sequence[FoundProcess]) -> None:
        """Stops routers that were left behind. New ones serve here first; the old ones' streams then have `drain_s` to
        end.
        """
        if not routers:
            return
        version, until_s = 0, time.monotonic() + self._config.start_timeout_s
        while not self._controller.is_ready and time.monotonic() < until_s:
            version = (await self._controller.wait(version, until_s - time.monotonic())).version
        drain_s = self._config.drain_s
        for each in routers:
            log.info("%s is ended on the node that the controller has left", each.incarnation.worker_id)
        with contextlib.suppress(TimeoutError, PenstockError):
            async with asyncio.timeout(drain_s + STOP_TIMEOUT_S):
                await asyncio.gather(*(each.process.stop(drain_s) for each in routers))
        await asyncio.gather(*(each.process.kill() for each in routers), return_exceptions=True)

    async def _exit(self) -> None:
        """Exits. Ray starts this actor again, on another node if its own is about to go."""
        await self._records.flush()
        os._exit(1)

    async def _find_machines(self) -> RayMachines:
        needs = {
            role: WorkerNeed(self._shares[role], self._config.engine_config(role).tensor_parallel) for role in Role
        }
        machines = RayMachines(needs, embedded=self._embedded, grows_to=self._config.grows_to)
        with contextlib.suppress(Unavailable):  # the record is read again before each change
            await machines.read([])
        return machines

    def _leave_token(self) -> None:
        assert self._trust.secrets is not None, "a deployment has a secret"
        leave_token(self._token_file, self._trust.secrets.current.token(ADMIN))

    def _on_key_file(self, files: WatchedFiles[Any]) -> None:
        """Records for operators that files were read again or refused. A new secret makes a new token."""
        self._controller.events.note(files.setting, KEYS_REFUSED if files.problem else KEYS_READ, files.problem)
        if self._admin is not None:
            self._leave_token()

    def _request_nodes(self) -> None:
        """Asks Ray's autoscaler for the resources of all desired workers and spares, unless all have theirs."""
        if self._autoscaler_hint is None:
            return
        pools = self._controller.pools
        counts = {role: pools[role.value].replicas + self._config.pool(role).spares for role in Role}
        ranks = {role: self._config.engine_config(role).tensor_parallel for role in Role}
        shares = [self._shares[role] for role in Role for _ in range(counts[role] * ranks[role])]
        self._autoscaler_hint.request([] if self._controller.is_placed else shares)

    def _spawn(self, incarnation: Incarnation, config: ServeConfig) -> RayProcess:
        return RayProcess(self._spec(incarnation, config), self._context)

    def _take_over(self, incarnation: Incarnation, found: ActorHandle) -> RayProcess:
        return RayProcess(self._spec(incarnation, self._config), self._context, found)

    def _spec(self, incarnation: Incarnation, config: ServeConfig) -> ActorSpec:
        kind = incarnation.pool_name
        if kind == ROUTER:
            # Routers run on the controller's node, where the user expects their ports.
            router = config.router_config(self._admin_address, incarnation.place)
            peer_host = LOOPBACK if self._embedded else ray.util.get_node_ip_address()
            plain = router.model_copy(update={"peer_host": peer_host}).model_dump(mode="json")
            return ActorSpec(kind, incarnation, plain, NO_CPU_SHARE, node_id=self._node_id)
        role = Role(incarnation.spare_of or kind)
        share = self._shares[role]
        worker = _worker_config(config, incarnation.worker_id, role, share)
        return ActorSpec(
            SPARE if incarnation.spare_of else kind,
            incarnation,
            worker.model_dump(mode="json"),
            share,
            use_node_address=not self._embedded,
            num_ranks=worker.engine.tensor_parallel,
        )

    async def _send_first_request(self, address: str) -> None:
        """Asks the router for one real token, which no tenant's budget pays for. The caller sets the deadline."""
        secrets = self._trust.secrets
        assert secrets is not None, "a deployment has a secret"
        async with AsyncClient(address, retry=_FIRST_REQUEST_RETRY, api_key=secrets.current.token(CANARY)) as client:
            await client.complete("Hello", max_tokens=1, temperature=0.0)

    async def on_progress(self, incarnation: Incarnation, detail: str) -> None:
        await self._began.wait()
        self._controller.on_progress(incarnation, detail)

    async def wait(self, version: int, timeout_s: float) -> tuple[int, bytes, bytes, bool]:
        """Returns `Controller.wait` as plain data: version, StatusResponse, google.rpc.Status or b"", stopped."""
        await self._began.wait()
        snapshot = await self._controller.wait(version, timeout_s)
        failure = to_status(snapshot.failure).SerializeToString() if snapshot.failure else b""
        return snapshot.version, snapshot.status.SerializeToString(), failure, snapshot.stopped

    async def stop(self, grace_s: float = 0.0) -> None:
        """Stops the routers, whose streams get `grace_s` to end, then every worker, then the Admin service."""
        if not self._began.is_set():
            return  # the start failed or never began
        await self._controller.stop(grace_s)
        await self._records.delete()
        if self._autoscaler_hint is not None:
            await self._autoscaler_hint.withdraw()
        if self._watching is not None:
            self._watching.cancel()
        remove_token(self._token_file)
        if self._admin is not None:
            await self._admin.stop()

    async def live(self) -> None:
        """Returns once the deployment is stopped; a detached controller then exits."""
        await self._began.wait()
        version = 0
        while not (snapshot := await self._controller.wait(version, timeout_s=3600.0)).stopped:
            version = snapshot.version
            self._request_nodes()
        await self.stop()
        if not self._embedded:
            ray.actor.exit_actor()


def _worker_config(config: ServeConfig, worker_id: WorkerId, role: Role, share: ResourceShare) -> WorkerConfig:
    """Returns a worker's configuration with the threads of its share."""
    worker = config.worker_config(worker_id, role)
    engine = worker.engine
    if engine.num_threads is None:
        engine = engine.model_copy(update={"num_threads": share.num_threads})
    return worker.model_copy(update={"engine": engine})
