"""Starts a deployment and follows it until it is ready: what `penstock serve`, `make demo` and tests call.

Owns the Ray that it starts, and nothing that runs in it: that is the controller's. With `address` it joins a running
Ray cluster instead, and what it starts there outlives this process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import ray
from google.rpc import status_pb2
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import cluster
from cluster.actors import ControllerActor
from cluster.addresses import LOOPBACK, callable_host
from cluster.admin_token import leave_token, remove_token
from cluster.ray_cluster import check_ray_version, connect, disconnect, with_descendants
from cluster.ray_process import NAMESPACE, ONE_BYTE
from cluster.shares import FRONT_SHARE, Share
from engine.model_config import ModelConfig
from penstock.config import ServeConfig
from penstock.errors import ConfigError, Unavailable, from_status
from penstock.secret import ClusterSecret
from penstock.trust import ADMIN
from penstock.v1 import admin_pb2

CONTROLLER = "controller"
_POLL_S = 10.0  # of one long poll; a change answers it at once
_CALL_TIMEOUT_S = 30.0  # of a call to the controller beyond what the call itself waits for
_STOP_TIMEOUT_S = 45.0

_QUIET_PORTS = range(20_000, 30_000)  # above Ray's worker ports, below what systems give to outgoing connections
_PORT_TRIES = 50

OnStatus = Callable[[admin_pb2.StatusResponse], None]


@dataclass(frozen=True, slots=True)
class StartUp:
    """Where the time until ready went, in seconds."""

    ray_s: float  # Ray itself
    controller_s: float
    workers_s: float  # until the last worker and the router were ready
    first_request_s: float  # until a real request had succeeded


def resolve_ports(config: ServeConfig) -> ServeConfig:
    """The same with every 0 replaced by a free port. Raises ConfigError that names the port that is taken.

    Resolved once, here: a replaced router listens where the first one did.
    """
    hosts = {"http_port": config.host, "grpc_port": config.host, "admin_port": LOOPBACK}
    ports: dict[str, int] = {}
    for key, host in hosts.items():
        wanted = getattr(config, key)
        if wanted and wanted in ports.values():
            raise ConfigError(f"{key} = {wanted}: another port has the same number; choose a different one")
        ports[key] = _bind_once(key, host, wanted) if wanted else _free_port(key, host, set(ports.values()))
    return config.model_copy(update={**ports, "more_router_ports": _more_router_ports(config, set(ports.values()))})


def _more_router_ports(config: ServeConfig, taken: set[int]) -> tuple[tuple[int, int], ...]:
    key = "more_router_ports"
    found = []
    for wanted in config.more_router_ports or [(0, 0)] * (config.routers - 1):
        pair = []
        for port in wanted:
            if port and port in taken:
                raise ConfigError(f"{key} = {wanted}: another port has the same number; choose different ones")
            pair.append(_bind_once(key, config.host, port) if port else _free_port(key, config.host, taken))
            taken.add(pair[-1])
        found.append((pair[0], pair[1]))
    return tuple(found)


def _free_port(key: str, host: str, taken: set[int]) -> int:
    """One that stays free until it is listened on: the system hands out none of these for outgoing connections.

    A port from binding to 0 is of the system's own range, and what starts meanwhile (Ray alone makes dozens of
    connections) may be given it.
    """
    tries = random.sample(_QUIET_PORTS, _PORT_TRIES)
    for port in (port for port in tries if port not in taken):
        with contextlib.suppress(ConfigError):
            return _bind_once(key, host, port)
    raise ConfigError(f"{key} = 0: none of {_PORT_TRIES} ports tried on {host} is free; name one")


def _bind_once(key: str, host: str, port: int) -> int:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            return int(listener.getsockname()[1])
    except OSError as error:
        flag = "--" + key.replace("_", "-")
        raise ConfigError(
            f"{key} = {port}: cannot listen on {host}:{port} ({error.strerror}); free it or choose another with {flag}"
        ) from error


def launch(config: ServeConfig, on_status: OnStatus = lambda status: None) -> RayDeployment:
    """Blocks until a real request has succeeded through the router; `on_status` hears of each change until then.

    Raises ConfigError, CheckpointError, or Unavailable when it is not ready within `start_timeout_s`; nothing is left
    running then.
    """
    check_ray_version(ray.__version__)
    config = config.model_copy(update={"model": str(Path(config.model).resolve())})
    ModelConfig.from_folder(config.model)  # a folder that cannot be served is refused before anything starts
    config = resolve_ports(config)
    began_s = time.monotonic()
    shares, daemons = connect(config)
    deployment = RayDeployment(config, daemons)
    try:
        deployment.start(shares, began_s, on_status)
    except BaseException:
        deployment.stop()
        raise
    return deployment


class RayDeployment:
    """A running deployment. Leaving its `with` block stops it, and every process that belongs to it."""

    def __init__(self, config: ServeConfig, daemons: list[psutil.Process]) -> None:
        self.config = config
        self.start_up = StartUp(0.0, 0.0, 0.0, 0.0)
        self.admin_address = f"{LOOPBACK}:{config.admin_port}"
        self.grpc_address = f"{callable_host(config.host)}:{config.grpc_port}"
        self.http_address = f"{callable_host(config.host)}:{config.http_port}"
        self._daemons = daemons  # of the Ray that was started for this deployment
        self._controller: Any = None
        self._secret = ClusterSecret.of(config.security) or ClusterSecret.make()
        self._token_left = False

    def start(self, shares: dict[str, Share], began_s: float, on_status: OnStatus) -> None:
        ray_s = time.monotonic() - began_s
        self._controller = self._make_controller(shares)
        address, failure = self._get(self._controller.start.remote(), _CALL_TIMEOUT_S)
        if failure:
            raise from_status(status_pb2.Status.FromString(failure))
        self._life = self._controller.live.remote()
        assert address == self.admin_address
        leave_token(self.config.admin_port, self.admin_token)
        self._token_left = True
        controller_s = time.monotonic() - began_s
        workers_s = self._follow_until_ready(began_s, on_status)
        ready_s = time.monotonic() - began_s
        self.start_up = StartUp(ray_s, controller_s - ray_s, workers_s - controller_s, ready_s - workers_s)

    def _make_controller(self, shares: dict[str, Share]) -> Any:
        root = str(Path(cluster.__file__).resolve().parent.parent)
        python_path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
        embedded = not self.config.address
        options = {
            "name": CONTROLLER,
            "namespace": NAMESPACE,
            "num_cpus": 0,
            "memory": ONE_BYTE,
            "max_restarts": -1,
            "max_task_retries": -1,  # a call waits for the successor
            "lifetime": None if embedded else "detached",
            "runtime_env": {"env_vars": {**FRONT_SHARE.environment(), "PYTHONPATH": python_path}},
            # Here, where the user looks for the ports; elsewhere only once this node is gone.
            "scheduling_strategy": NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=not embedded
            ),
        }
        try:
            return (
                ray.remote(ControllerActor)
                .options(**options)
                .remote(self.config.model_dump(mode="json"), self._secret.reveal(), shares, python_path, embedded)
            )
        except ValueError as error:
            raise ConfigError(
                f"address = {self.config.address!r}: a deployment runs in this Ray cluster already ({error}); "
                "end it with `penstock stop`, or choose another cluster"
            ) from error

    def _follow_until_ready(self, began_s: float, on_status: OnStatus) -> float:
        """Returns when every worker was ready, in seconds since `began_s`."""
        version, workers_s = 0, None
        deadline_s = began_s + self.config.start_timeout_s
        status = admin_pb2.StatusResponse()
        while time.monotonic() < deadline_s:
            version, status, _ = self.wait(version, max(0.0, min(_POLL_S, deadline_s - time.monotonic())))
            on_status(status)
            if workers_s is None and status.workers and all(worker.state == "ready" for worker in status.workers):
                workers_s = time.monotonic() - began_s
            if status.ready:
                return workers_s or time.monotonic() - began_s
        raise Unavailable(f"not ready within start_timeout_s = {self.config.start_timeout_s:g} s: {_say(status)}")

    @property
    def admin_token(self) -> str:
        """Opens the Admin service."""
        return self._secret.token(ADMIN)

    def wait(self, version: int, timeout_s: float) -> tuple[int, admin_pb2.StatusResponse, bool]:
        """Version, status and whether it was stopped, once newer than `version` or after `timeout_s`."""
        found, status, failure, stopped = self._get(
            self._controller.wait.remote(version, timeout_s), timeout_s + _CALL_TIMEOUT_S
        )
        if failure:
            raise from_status(status_pb2.Status.FromString(failure))
        return found, admin_pb2.StatusResponse.FromString(status), stopped

    def _get(self, ref: Any, timeout_s: float) -> Any:
        try:
            return ray.get(ref, timeout=timeout_s)
        except GetTimeoutError as error:
            raise Unavailable(f"the controller did not answer within {timeout_s:g} s") from error
        except RayError as error:
            raise Unavailable(f"the controller is lost: {str(error).strip().splitlines()[0]}") from error

    def status(self) -> admin_pb2.StatusResponse:
        return self.wait(-1, 0.0)[1]

    def wait_until_stopped(self, on_status: OnStatus = lambda status: None) -> None:
        """Blocks until somebody stops the deployment through its Admin service."""
        version, stopped = 0, False
        while not stopped:
            version, status, stopped = self.wait(version, _POLL_S)
            on_status(status)

    def processes(self) -> list[psutil.Process]:
        """Every process of the Ray that was started for it, the workers and the router included."""
        return with_descendants(self._daemons)

    def stop(self, grace_s: float = 0.0) -> None:
        """Ends the deployment, whose streams may take `grace_s` to end, and the Ray that was started for it. May be
        called twice."""
        if not ray.is_initialized():
            return
        try:
            if self._controller is not None:
                self._get(self._controller.stop.remote(grace_s), grace_s + _STOP_TIMEOUT_S)
        except Unavailable as error:
            logging.getLogger(__name__).warning("stopping: %s", error.message)
        finally:
            disconnect(self._daemons)
            if self._token_left:
                remove_token(self.config.admin_port)

    def leave(self) -> None:
        """Disconnects from a joined cluster; the deployment goes on."""
        ray.shutdown()

    def __enter__(self) -> RayDeployment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _say(status: admin_pb2.StatusResponse) -> str:
    waiting = [
        f"{one.member.worker_id} is {one.state} {one.detail}".strip() for one in status.workers if one.state != "ready"
    ]
    return "; ".join(waiting) or "no request succeeded"
