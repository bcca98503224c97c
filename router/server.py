"""A whole router: both fronts, the fleet that it follows, health. A plain object for a process or an actor to hold."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from dataclasses import dataclass

import uvicorn

from penstock.config import RouterConfig
from penstock.errors import ConfigError
from penstock.grpc_server import GrpcServer
from penstock.secret import read_private
from penstock.trust import Trust, server_credentials
from penstock.v1 import admin_pb2
from router.demand_report import report_demand
from router.generation import Generator
from router.http import make_app
from router.http_tls import uvicorn_settings
from router.membership import Fleet, follow_admin
from router.metrics import RouterMetrics
from router.model_card import ModelCard
from router.service import SERVICE, InferenceService
from router.tokenizer import Tokenizer

_HTTP_STOP_S = 1.0
_LISTEN_BACKLOG = 2048
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Ports:
    grpc: int
    http: int
    control: int  # gRPC for whoever supervises this router; the same as `grpc` but with TLS


class _HttpServer(uvicorn.Server):
    """Leaves signals to whoever runs the process."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


class RouterServer:
    """`start` once and `stop` once, on the same event loop."""

    def __init__(self, config: RouterConfig) -> None:
        """Reads the model's folder. Raises CheckpointError, or ConfigError where there is nobody to route to."""
        if bool(config.admin) == bool(config.workers):
            raise ConfigError(
                f"admin = {config.admin!r}, workers = {config.workers!r}: give exactly one of them, the address of the "
                "Admin service or those of the workers"
            )
        self._config = config
        card = ModelCard.load(config)
        self._tokenizer = Tokenizer.load(config.model)
        self._metrics = RouterMetrics(card.name)
        self._tasks: list[asyncio.Task[None]] = []
        self._trust = Trust(config.security)
        self.fleet = Fleet(self._trust, config.index)
        self.generator = Generator(config, card, self._tokenizer, self.fleet, self._metrics)
        path = config.metrics_token_file
        self._metrics_token = read_private(path, "metrics_token_file") if path else ""
        self._watch_metrics()
        self.ports = Ports(0, 0, 0)

    async def start(self) -> None:
        """Listens on both ports and begins to follow the workers. Raises ConfigError where a port is taken.

        Health turns SERVING with the first decode worker, which this does not wait for.
        """
        self._tokenizer.start()
        http_socket = _listen(self._config.host, self._config.http_port)
        self._grpc = self._make_grpc()
        try:
            await self._start(http_socket)
        except BaseException:
            http_socket.close()
            await self._grpc.stop()
            raise

    def _make_grpc(self) -> GrpcServer:
        limits, tls = self._config.limits, self._config.tls
        return GrpcServer(
            [SERVICE],
            keepalive=False,
            credentials=server_credentials(tls, "tls") if tls else None,
            limits={
                "grpc.max_receive_message_length": limits.request_bytes,
                "grpc.max_metadata_size": limits.header_bytes,
                "grpc.absolute_max_metadata_size": limits.header_bytes,
                "grpc.max_concurrent_streams": limits.streams_per_connection,
            },
        )

    async def _start(self, http_socket: socket.socket) -> None:
        tls = self._config.tls
        InferenceService(self.generator, self.fleet, wants_tls=tls is not None).add_to(self._grpc.server)
        # Supervised by processes that know the cluster secret, whatever certificates the public port demands.
        control = self._grpc.add_control_port(_LOOPBACK) if tls and self._trust.secret else 0
        grpc_port = await self._grpc.start(self._config.host, self._config.grpc_port, "grpc_port")
        app = make_app(self.generator, self.fleet, self._metrics, self._metrics_token)
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=2 * self._config.limits.header_bytes,  # beyond this, unread
            **uvicorn_settings(tls),
        )
        self._http = _HttpServer(settings)
        self._http_task = asyncio.create_task(self._http.serve(sockets=[http_socket]), name="http")
        self.ports = Ports(grpc_port, http_socket.getsockname()[1], control or grpc_port)
        await self.fleet.peers.start(self._config.peer_host, self._config.peer_port)
        self._tasks.append(asyncio.create_task(self._follow_health(), name="health"))
        if self._config.admin:
            self._tasks.append(asyncio.create_task(follow_admin(self._config.admin, self.fleet), name="admin"))
            telling = report_demand(self._config.admin, self._trust.channel, self._demand)
            self._tasks.append(asyncio.create_task(telling, name="demand"))
        else:
            self.fleet.set_addresses(self._config.workers)
            self.fleet.peers.set_addresses(self._config.peers)

    def _demand(self) -> admin_pb2.DemandReport:
        num_waiting = self.generator.gate.admission.num_waiting
        return self.generator.demand.report(self.fleet.peers.address, self.fleet.peers.epoch, num_waiting)

    async def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Whether a request would be served, within this time."""
        return await self.fleet.wait_for(self.fleet.group, timeout_s) is not None

    async def leave(self, drain_s: float) -> None:
        """Takes no new request, and returns once those under way have ended or time is up. `stop` must follow."""
        self.generator.leaving = True
        await self._grpc.set_serving(False)
        self._http.config.timeout_graceful_shutdown = math.ceil(drain_s)
        self._http.should_exit = True
        await asyncio.gather(self._grpc.stop(drain_s), asyncio.wait([self._http_task], timeout=drain_s))

    async def stop(self) -> None:
        """Ends both fronts and lets go of every worker; requests under way are cut off."""
        await self._grpc.set_serving(False)
        self._http.config.timeout_graceful_shutdown = math.ceil(_HTTP_STOP_S)
        self._http.should_exit = True
        await asyncio.gather(self._grpc.stop(), asyncio.wait([self._http_task], timeout=2 * _HTTP_STOP_S))
        for task in (*self._tasks, self._http_task):
            task.cancel()
        await asyncio.wait([*self._tasks, self._http_task])
        self.generator.gate.close()
        await self.fleet.stop()
        self._tokenizer.close()

    async def _follow_health(self) -> None:
        while True:
            await self._grpc.set_serving(self.generator.ready)
            await self.fleet.wait_change()

    def _watch_metrics(self) -> None:
        fleet = self.fleet

        gate = self.generator.gate

        def loads() -> list[tuple[int, int]]:
            return [(one.load.free_pages, one.load.total_pages) for one in fleet.followers if one.link is not None]

        def usage() -> float:
            total = sum(pages for _, pages in loads())
            return 1.0 - sum(free for free, _ in loads()) / total if total else 0.0

        self._metrics.watch(
            num_running=lambda: sum(one.load.num_running for one in fleet.followers),
            num_waiting=lambda: sum(one.load.num_waiting for one in fleet.followers),
            cache_usage=usage,
            open_circuits=lambda: fleet.health.num_open(time.monotonic()),
            tier_hits=lambda tier: sum(getattr(one.load.cache, f"{tier}_hits") for one in fleet.followers),
            num_workers=lambda role: sum(one.takes_work and one.description.role == role for one in fleet.followers),
        )
        self._metrics.watch_spares(lambda pool: fleet.spares.get(pool, 0))
        self._metrics.watch_index(fleet.index, lambda: sum(one.is_mute for one in fleet.followers))
        self._metrics.admission.watch(
            num_waiting=gate.admission.num_waiting_in,
            num_out=lambda: gate.admission.out.num_requests,
            saturation=gate.saturation,
            level=lambda: gate.admission.level,
            retries_left=lambda: gate.retries.balance,
        )


def _listen(host: str, port: int) -> socket.socket:
    """Raises ConfigError where somebody else listens there already."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle's algorithm off: a delayed ACK would cost 40 ms an answer.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        problem = f"http_port = {port}: cannot listen on {host}:{port} ({error.strerror}); free it or choose another"
        raise ConfigError(problem) from error
    listener.setblocking(False)
    return listener
