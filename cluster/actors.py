"""The Ray actor of the controller: hosts it and its Admin service, and gives it workers and routers as Ray actors.

Ray carries configuration, readiness and the end of things. No prompt, token or page passes through an actor call: the
servers inside `cluster.server_actor` speak gRPC and kv_transfer with each other.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import ray
from ray.actor import ActorHandle

from cluster.addresses import LOOPBACK
from cluster.admin_service import start_admin_server
from cluster.canary import Judge
from cluster.controller import Controller
from cluster.demand import Demand
from cluster.pool import SPARE, Incarnation
from cluster.proving import Proving
from cluster.ray_nodes import RayNodes
from cluster.ray_process import ActorSpec, Host, RayProcess
from cluster.ray_record import RecordWriter, load_record
from cluster.ray_sigterm import on_sigterm
from cluster.record import FIRST_RECORD, Record
from cluster.recovery import find_running, remove_everything
from cluster.server_actor import ServerActor
from cluster.shares import FRONT_SHARE, Share
from cluster.supervised import ROUTER
from penstock import log as logs
from penstock.async_client import AsyncClient
from penstock.config import ServeConfig, WorkerConfig, parse
from penstock.errors import PenstockError, to_status
from penstock.grpc_server import GrpcServer
from penstock.retry import RetryPolicy
from penstock.secret import ClusterSecret, with_secret
from penstock.trust import Trust
from penstock.types import Role, WorkerId
from router.identity import CANARY

log = logging.getLogger(__name__)

_NUM_THREADS = 64  # that may block on Ray's head at once while it is away
# The canary outlasts the moment in which the router has not heard of the workers yet; its deadline is the caller's.
_CANARY_RETRY = RetryPolicy(max_attempts=1000, initial_s=0.05, max_s=0.5)


class ControllerActor:
    """Hosts the controller and its Admin service.

    Ray makes it anew when its process dies; the new one takes over what the old one left running.
    """

    def __init__(
        self, config: Mapping[str, object], secret: str, shares: Mapping[str, Share], python_path: str, embedded: bool
    ) -> None:
        """`secret` is the deployment's; it reaches the workers as it reaches this actor, never by an environment."""
        logs.set_up("controller")
        self._secret = ClusterSecret(secret)
        self._config = parse(ServeConfig, with_secret(config, self._secret))
        self._trust = Trust(self._config.security)
        self._shares = shares
        self._embedded = embedded  # the Ray cluster is ours and on this machine alone
        context = ray.get_runtime_context()
        self._host = Host(ray.remote(ServerActor), python_path, context.current_actor, self._trust.channel)
        self._node_id = context.get_node_id()
        self._controller: Controller
        self._records = RecordWriter()
        self._demand = Demand() if not embedded else None
        self._admin: GrpcServer | None = None
        self._admin_address = ""
        self._began = asyncio.Event()
        self._beginning: asyncio.Task[bytes] | None = None
        self._is_successor = context.was_current_actor_reconstructed
        if self._is_successor:
            # Nobody else may be there to say it: who launched the deployment may have left.
            context.current_actor.start.remote()
            context.current_actor.live.remote()

    async def start(self) -> tuple[str, bytes]:
        """Begins to start everything. Returns the Admin service's host:port, or a google.rpc.Status."""
        if self._beginning is None:
            self._beginning = asyncio.create_task(self._begin())
        try:
            failure = await asyncio.shield(self._beginning)
        except Exception:
            if not self._is_successor:
                raise
            # Nobody hears of it: what runs would stay without a controller. The next one tries again.
            log.exception("taking over what runs failed")
            os._exit(1)
        return self._admin_address, failure

    async def _begin(self) -> bytes:
        # At once: Ray makes another one, and all that it needs is written down. Ray's own way out waits for threads.
        on_sigterm(lambda: os._exit(1))
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_NUM_THREADS, "ray calls"))
        earlier = await load_record() if self._is_successor else None
        if earlier is None or earlier.stopping:
            await remove_everything()
        record = replace(earlier, generation=earlier.generation + 1) if earlier else FIRST_RECORD
        self._records.save(record)
        self._controller = Controller(
            self._config,
            self._spawn,
            self._send_canary,
            self._trust.channel,
            record,
            self._on_record,
            Proving(Judge(record.canary), self._trust.channel),
            None if self._embedded else RayNodes(self._node_id),
        )
        # Routers keep the last membership until the service is back, hence it comes back knowing every member.
        self._admin_address = f"{LOOPBACK}:{self._config.admin_port}"
        if earlier and not earlier.stopping:
            self._controller.adopt(await find_running(self._process))
        try:
            self._admin, self._admin_address = await start_admin_server(
                self._controller, LOOPBACK, self._config.admin_port, self._trust
            )
        except PenstockError as error:
            return to_status(error).SerializeToString()
        self._began.set()
        if earlier and earlier.stopping:
            await self._controller.stop()
        else:
            self._controller.start()
        return b""

    def _on_record(self, record: Record) -> None:
        self._records.save(record)
        if self._demand is not None:
            counts = {role: record.replicas[role] + self._config.pool(role).spares for role in Role}
            ranks = {role: self._config.engine_config(role).tensor_parallel for role in Role}
            self._demand.want([self._shares[role] for role in Role for _ in range(counts[role] * ranks[role])])

    def _spawn(self, incarnation: Incarnation) -> RayProcess:
        return self._process(incarnation)

    def _process(self, incarnation: Incarnation, found: ActorHandle | None = None) -> RayProcess:
        kind = incarnation.pool_name
        if kind == ROUTER:
            # Beside the controller: its ports are the ones that the user was told.
            router = self._controller.config_of(incarnation).router_config(self._admin_address, incarnation.place)
            peer_host = LOOPBACK if self._embedded else ray.util.get_node_ip_address()
            config = router.model_copy(update={"peer_host": peer_host}).model_dump(mode="json")
            config = with_secret(config, self._secret)
            spec = ActorSpec(kind, incarnation, config, FRONT_SHARE, node_id=self._node_id)
        else:
            role = Role(incarnation.spare_of or kind)
            share = self._shares[role]
            worker = _worker_config(self._controller.config_of(incarnation), incarnation.worker_id, role, share)
            config = with_secret(worker.model_dump(mode="json"), self._secret)
            kind = SPARE if incarnation.spare_of else kind
            num_ranks = worker.engine.tensor_parallel
            spec = ActorSpec(kind, incarnation, config, share, use_node_address=not self._embedded, num_ranks=num_ranks)
        return RayProcess(spec, self._host, lambda why: self._controller.on_unplaced(incarnation, why), found)

    async def _send_canary(self, address: str) -> None:
        """One real token through the router, which is nobody's tenant. The deadline is the caller's."""
        async with AsyncClient(address, retry=_CANARY_RETRY, api_key=self._secret.token(CANARY)) as client:
            await client.complete("Hello", max_tokens=1, temperature=0.0)

    async def on_progress(self, incarnation: Incarnation, detail: str) -> None:
        await self._began.wait()
        self._controller.on_progress(incarnation, detail)

    async def wait(self, version: int, timeout_s: float) -> tuple[int, bytes, bytes, bool]:
        """`Controller.wait` as bytes: version, StatusResponse, google.rpc.Status of a failure or nothing, stopped."""
        await self._began.wait()
        snapshot = await self._controller.wait(version, timeout_s)
        failure = to_status(snapshot.failure).SerializeToString() if snapshot.failure else b""
        return snapshot.version, snapshot.status.SerializeToString(), failure, snapshot.stopped

    async def stop(self, grace_s: float = 0.0) -> None:
        """Ends the routers, whose streams may take `grace_s` to end, and every worker, then the Admin service."""
        if not self._began.is_set():
            return  # it failed, or never began
        await self._controller.stop(grace_s)
        await self._records.delete()
        if self._demand is not None:
            await self._demand.withdraw()
        if self._admin is not None:
            await self._admin.stop()

    async def live(self) -> None:
        """Returns once the deployment was stopped; a detached controller then ends itself."""
        await self._began.wait()
        version = 0
        while not (snapshot := await self._controller.wait(version, timeout_s=3600.0)).stopped:
            version = snapshot.version
        await self.stop()
        if not self._embedded:
            ray.actor.exit_actor()


def _worker_config(config: ServeConfig, worker_id: WorkerId, role: Role, share: Share) -> WorkerConfig:
    """Workers are never public: they listen on loopback, or on their node's address, whatever `host` says."""
    worker = config.worker_config(worker_id, role)
    engine = worker.engine
    if engine.num_threads is None:
        engine = engine.model_copy(update={"num_threads": share.num_threads})
    return worker.model_copy(update={"host": LOOPBACK, "engine": engine})
