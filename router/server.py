"""A whole router: starts and stops its APIs, the fleet that it follows, and health, for a process or an actor.

Owns the lifetimes of the parts that `router.composition` makes. Requests pass through `router.api`, not through here.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI

from penstock.config import RouterConfig
from penstock.errors import ConfigError
from penstock.process.setup import raise_file_limit
from penstock.process.task_set import TaskSet
from penstock.rpc.server import GrpcServer
from penstock.v1 import admin_pb2
from router.api.grpc.flood_guard import FloodGuard
from router.api.grpc.service import SERVICE, InferenceService
from router.api.http.app import make_app
from router.api.http.connections import ConnectionCounts, bound_unread, connections_for, http_protocol, tls_settings
from router.api.http.operations import make_operations_app
from router.composition import make_parts
from router.fleet.engines.follow import follow_engines
from router.fleet.worker_fleet import follow_admin
from router.live.routes import add_live_page
from router.metrics.demand_report import report_demand
from router.metrics.scrape_targets import ScrapeTarget

_HTTP_STOP_S = 1.0
_LISTEN_BACKLOG = 2048
_UVICORN_TICKS = 10  # ticks in a second; uvicorn renews the Date header at every tenth tick
_LOOPBACK = "127.0.0.1"
_MAX_MS = (1 << 31) - 2  # 2^31 - 1 disables a limit of gRPC


@dataclass(frozen=True, slots=True)
class Ports:
    grpc: int
    http: int
    control: int  # gRPC for the process that supervises this router; may equal `grpc`
    metrics: int | None = None  # HTTP with this router's metrics and health, if configured
    picker: int | None = None  # gRPC for gateways that let this router choose their engines, if configured


class _HttpServer(uvicorn.Server):
    """Serves at one socket as soon as it is made. Leaves signals to the process."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self._leaving = asyncio.Event()
        self.port: int = listener.getsockname()[1]
        self.task = asyncio.create_task(self.serve(sockets=[listener]), name="http")

    async def leave(self, drain_s: float, timeout_s: float) -> None:
        """Stops accepting connections; returns once the open ones have ended, or after `timeout_s`."""
        self.config.timeout_graceful_shutdown = math.ceil(drain_s)
        self.should_exit = True
        self._leaving.set()
        await asyncio.wait([self.task], timeout=timeout_s)

    async def end(self) -> None:
        """Closes connections that are still open."""
        self.task.cancel()
        await asyncio.wait([self.task])

    async def main_loop(self) -> None:
        """Returns as soon as `leave` is called, and renews the Date header of answers each second.

        Uvicorn's own loop wakes ten times a second, even if there is nothing to do.
        """
        tick = 0
        while not await self.on_tick(tick):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._leaving.wait()
            tick += _UVICORN_TICKS

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


class RouterServer:
    """A router. Call `start` and `stop` once each, on one event loop."""

    def __init__(self, config: RouterConfig) -> None:
        """Makes the parts and reads the model's folder. Raises CheckpointError or ConfigError."""
        parts = make_parts(config)
        self._config = config
        self._trust = parts.trust
        self._metrics = parts.metrics
        self._tokenizer = parts.tokenizer
        self._tracer = parts.tracer
        self._parsing = parts.parsing
        self._dispatcher = parts.dispatcher
        self._metrics_token = parts.metrics_token
        self._certificate = parts.certificate
        self._live = parts.live
        self._offline = parts.offline
        self._picker = parts.picker
        self.fleet = parts.fleet
        self.context = parts.context
        self.preparer = parts.preparer
        self._tasks = TaskSet()
        self.ports = Ports(0, 0, 0)

    async def start(self) -> None:
        """Listens on all ports and begins to follow the workers. Raises ConfigError if a port is taken.

        Does not wait for workers; health turns SERVING with the first decode worker.
        """
        limits = self._config.limits
        self._max_connections = connections_for(raise_file_limit(), limits)
        self.connections = ConnectionCounts(limits, self._max_connections, self._metrics)
        self._metrics.start()
        config = self._config
        sockets = [_listen(config.host, config.http_port, "http_port", shared=config.shares_ports)]
        self._grpc = self._make_grpc()
        try:
            if config.metrics_port is not None:
                # Shared as well: if the controller moves, the new router listens before the old one ends.
                metrics_socket = _listen(config.host, config.metrics_port, "metrics_port", shared=config.shares_ports)
                sockets.append(metrics_socket)
            await self._start(*sockets)
        except BaseException:
            for each in sockets:
                each.close()
            await self._grpc.stop()
            raise

    def _make_grpc(self) -> GrpcServer:
        limits = self._config.limits
        return GrpcServer(
            [SERVICE],
            keepalive=False,
            shares_port=self._config.shares_ports,
            credentials=self._certificate.grpc_credentials() if self._certificate else None,
            limits={
                "grpc.max_receive_message_length": limits.request_bytes,
                "grpc.max_metadata_size": limits.header_bytes,
                "grpc.absolute_max_metadata_size": limits.header_bytes,
                "grpc.max_concurrent_streams": limits.streams_per_connection,
                "grpc.max_allowed_incoming_connections": self._max_connections,
                "grpc.server_handshake_timeout_ms": _milliseconds(limits.header_timeout_s),
                "grpc.max_connection_idle_ms": _milliseconds(limits.idle_timeout_s),
                "grpc.max_connection_age_ms": _milliseconds(limits.connection_age_s),
                "grpc.max_connection_age_grace_ms": _milliseconds(self._config.max_timeout_s + limits.read_grace_s),
                "grpc.http2.max_ping_strikes": limits.ping_strikes,
            },
            max_calls=limits.calls,
        )

    async def _start(self, http_socket: socket.socket, metrics_socket: socket.socket | None = None) -> None:
        grpc_port, control_port = await self._start_grpc()
        self._start_http(http_socket, metrics_socket)
        if self._picker is not None:
            await self._picker.start()
        http_port, *metrics_port = [server.port for server in self._https]
        self.ports = Ports(
            grpc_port,
            http_port,
            control_port or grpc_port,
            metrics_port[0] if metrics_port else None,
            self._picker.port if self._picker is not None else None,
        )
        await self.fleet.peers.start(self._config.peer_host, self._config.peer_port, self.context.gate)
        self._tasks.start(self._follow_health(), name="health")
        self._tasks.start(self._trust.watcher.follow(), name="key files")
        self._follow_workers()

    async def _start_grpc(self) -> tuple[int, int]:
        """Serves the gRPC API. Returns its port and the supervisor's control port, or 0 if no such port is needed."""
        guard = FloodGuard(self._config.limits, self._metrics)
        service = InferenceService(
            self.preparer,
            self._dispatcher,
            self.fleet,
            self._metrics,
            self._parsing,
            guard,
            wants_tls=self._config.tls is not None,
        )
        service.add_to(self._grpc.server)
        control_port = self._grpc.add_control_port(_LOOPBACK) if self._needs_control_port else 0
        grpc_port = await self._grpc.start(self._config.host, self._config.grpc_port, "grpc_port")
        self._tasks.start(guard.watch(grpc_port), name="connections")
        return grpc_port, control_port

    def _start_http(self, http_socket: socket.socket, metrics_socket: socket.socket | None) -> None:
        """Serves the HTTP API and runs its batches. Serves metrics and health at `metrics_socket`, if given."""
        app, batch_runner = make_app(
            self.preparer,
            self._dispatcher,
            self._metrics,
            self._parsing,
            self._metrics_token,
            self._config.cors_origins,
            self._config.store,
            self._offline,
        )
        if batch_runner is not None:
            self.fleet.watch_loads(batch_runner.on_load)
            self._tasks.start(batch_runner.run(), name="batches")
        add_live_page(app, self._live, self._check_scraper)
        self._https = [self._serve_http(app, http_socket, self.connections, asks_for_certificate=True)]
        if metrics_socket is not None:
            operations = make_operations_app(
                self.preparer, self._metrics, self._metrics_token, targets=self._scrape_targets
            )
            add_live_page(operations, self._live, self._check_scraper)
            counts = ConnectionCounts(self._config.limits, self._max_connections, self._metrics)
            self._https.append(self._serve_http(operations, metrics_socket, counts, asks_for_certificate=False))

    def _follow_workers(self) -> None:
        """Begins to follow the controller's membership, or else the configured workers, engines and peers."""
        if self._config.admin:
            self._tasks.start(follow_admin(self._config.admin, self.fleet), name="admin")
            reporting = report_demand(self._config.admin, self._trust.channel, self._demand)
            self._tasks.start(reporting, name="demand")
        else:
            self.fleet.set_addresses(self._config.workers)
            follow_engines(self._config, self.preparer.card.name, self.fleet, self._trust)
            self.fleet.peers.set_addresses(self._config.peers)

    def _serve_http(
        self, app: FastAPI, listener: socket.socket, counts: ConnectionCounts, *, asks_for_certificate: bool
    ) -> _HttpServer:
        limits = self._config.limits
        bound_unread(listener, limits)
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
            timeout_keep_alive=math.ceil(limits.idle_timeout_s),
            http=http_protocol(counts),
            h11_max_incomplete_event_size=2 * limits.header_bytes,  # longer headers are refused
            **tls_settings(self._certificate, asks_for_certificate=asks_for_certificate),
        )
        return _HttpServer(settings, listener)

    @property
    def _needs_control_port(self) -> bool:
        """Returns whether a supervisor needs a port of its own.

        It does if other routers share the public port. If that port requires TLS, a supervisor calls without TLS and
        authenticates with the cluster secret, so that it needs a port only if there is a secret.
        """
        if self._config.tls:
            return bool(self._trust.secrets)
        return self._config.shares_ports

    def _demand(self) -> admin_pb2.DemandReport:
        admission, peers = self.context.gate.admission, self.fleet.peers
        return self.context.demand.report(peers.address, peers.epoch, admission.num_waiting, admission.waiting_tokens)

    def warm_up(self) -> None:
        """Starts the processes that render chats and compile grammars, off the event loop.

        Separate from `start`, which needs neither: the first chat or grammar starts them otherwise.
        """
        self._tokenizer.start()
        self.preparer.warm_up()

    async def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Waits until requests can be served, at most `timeout_s`. Returns whether they can."""
        return await self.fleet.wait_for(self.fleet.group, timeout_s) is not None

    async def leave(self, drain_s: float) -> None:
        """Refuses new requests; returns once those in flight have ended, or after `drain_s`. Call `stop` afterwards."""
        self.preparer.refuse_new()
        await self._set_serving(False)
        leaving = [self._grpc.stop(drain_s), *(each.leave(drain_s, drain_s) for each in self._https)]
        if self._picker is not None:
            leaving.append(self._picker.stop(drain_s))
        await asyncio.gather(*leaving)

    async def stop(self) -> None:
        """Stops serving and closes the links to workers. Requests in flight are cut off."""
        await self._set_serving(False)
        stopping = [self._grpc.stop(), *(each.leave(_HTTP_STOP_S, 2 * _HTTP_STOP_S) for each in self._https)]
        if self._picker is not None:
            stopping.append(self._picker.stop())
        await asyncio.gather(*stopping)
        await asyncio.gather(self._tasks.close(), *(each.end() for each in self._https))
        self._metrics.stop()
        self.context.gate.close()
        await self.fleet.stop()
        for threads in (self._tokenizer, self._parsing, self.preparer):
            threads.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    async def _set_serving(self, serving: bool) -> None:
        await self._grpc.set_serving(serving)
        if self._picker is not None:
            await self._picker.set_serving(serving)

    async def _follow_health(self) -> None:
        while True:
            await self._set_serving(self.preparer.ready)
            await self.fleet.wait_change()

    def _check_scraper(self, authorization: str | None) -> None:
        self.preparer.tenants.check_scraper(authorization, self._metrics_token())

    def _scrape_targets(self) -> list[ScrapeTarget]:
        described = [(worker.worker_id, worker.description) for worker in self.fleet.followers]
        return [
            ScrapeTarget(description.metrics_address, worker_id, description.role)
            for worker_id, description in described
            if description.metrics_address
        ]


def _milliseconds(seconds: float) -> int:
    return max(1, min(int(seconds * 1e3), _MAX_MS))


def _listen(host: str, port: int, key: str, *, shared: bool = False) -> socket.socket:
    """Returns a listening socket. Raises ConfigError if another process has the port and not both share it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio disables Nagle's algorithm only if the protocol is named. A delayed ACK would cost 40 ms a response.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
    try:
        listener.bind((host, port))
        listener.listen(_LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        problem = f"{key} = {port}: cannot listen on {host}:{port} ({error.strerror}); free it or choose another"
        raise ConfigError(problem) from error
    listener.setblocking(False)
    return listener
