"""Starts a deployment and follows it until it is ready, for `penstock serve`, `make demo` and tests.

Owns the Ray it starts; the controller owns what runs in it. With `address` it joins a running Ray cluster instead,
where the deployment outlives this process.
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
from cluster.pools.resources import NO_CPU_SHARE, ResourceShare, with_device_defaults
from cluster.ray.connection import check_ray_version, connect, disconnect, with_descendants
from cluster.ray.controller_actor import ControllerActor
from cluster.ray.daemon_watch import DaemonWatch
from cluster.ray.key_files import leave_secret, remove_secret, with_absolute_paths
from cluster.ray.nodes import HEAD, is_head
from cluster.ray.process import NAMESPACE, ONE_BYTE
from engine.models.config import ModelConfig
from penstock.config import ServeConfig
from penstock.errors import ConfigError, Unavailable, from_status
from penstock.rpc.addresses import LOOPBACK, callable_host
from penstock.rpc.admin_token import remove_token, token_file
from penstock.rpc.secret import ADMIN, ClusterSecrets
from penstock.v1 import admin_pb2

CONTROLLER = "controller"
_POLL_S = 10.0  # length of one long poll; a change answers it at once
_WATCH_S = 2.0  # length of one long poll while Ray is watched
_CALL_TIMEOUT_S = 30.0  # deadline of a controller call, on top of what the call itself waits for
_STOP_TIMEOUT_S = 45.0

_QUIET_PORTS = range(20_000, 30_000)  # above Ray's worker ports, below the system's range for outgoing connections
_PORT_TRIES = 50

OnStatus = Callable[[admin_pb2.StatusResponse], None]


@dataclass(frozen=True, slots=True)
class StartUp:
    """The parts of the time until ready, in seconds."""

    ray_s: float  # start of Ray itself
    controller_s: float
    workers_s: float  # then until the last worker and the router were ready
    first_request_s: float  # then until a real request succeeded; 0 without routers


def resolve_ports(config: ServeConfig) -> ServeConfig:
    """Returns `config` with every port 0 replaced by a free port. Raises ConfigError for a port that is taken.

    Ports are resolved only here, so that a replaced router listens where the first one did.
    """
    public = {"http_port": config.host, "grpc_port": config.host} if config.routers else {}
    hosts = {**public, "admin_port": config.admin_host}
    ports: dict[str, int] = {}
    for key, host in hosts.items():
        wanted = getattr(config, key)
        if wanted and wanted in ports.values():
            raise ConfigError(f"{key} = {wanted}: another port has the same number; choose a different one")
        ports[key] = _bind_once(key, host, wanted) if wanted else _free_port(key, host, set(ports.values()))
    return config.model_copy(update={**ports, "metrics_ports": _metrics_ports(config, set(ports.values()))})


def _metrics_ports(config: ServeConfig, taken: set[int]) -> tuple[int, ...]:
    """Returns a metrics port for each router, or none if there is only one: its public ports serve its metrics."""
    key = "metrics_ports"
    found: list[int] = []
    for port in config.metrics_ports or (0,) * (config.routers if config.routers > 1 else 0):
        if port and port in taken:
            raise ConfigError(f"{key} = {port}: another port has the same number; choose a different one")
        found.append(_bind_once(key, config.host, port) if port else _free_port(key, config.host, taken))
        taken.add(found[-1])
    return tuple(found)


def _free_port(key: str, host: str, taken: set[int]) -> int:
    """Returns a free port outside the system's range for outgoing connections, so that it is likely to stay free.

    Binding to 0 would return a port in the system's own range, which a connection made in the meantime could take; Ray
    makes dozens.
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


def launch(config: ServeConfig, on_status: OnStatus = lambda status: None, *, attach: bool = False) -> RayDeployment:
    """Starts a deployment and blocks until a real request has succeeded or, if it has no routers of its own, until
    every worker is ready. Calls `on_status` at each change until then.

    With `attach`, follows the deployment that already runs in the Ray cluster instead, whatever its configuration.
    Raises ConfigError, CheckpointError, or Unavailable if it is not ready within `start_timeout_s`; in each case
    nothing is left running.
    """
    check_ray_version(ray.__version__)
    config = config.model_copy(update={"model": str(Path(config.model).resolve())})
    ModelConfig.from_folder(config.model)  # refuses a folder that cannot be served before anything starts
    config = with_absolute_paths(config if attach else resolve_ports(config))
    began_s = time.monotonic()
    shares, daemons = connect(config)
    deployment = RayDeployment(with_device_defaults(config, shares), daemons)
    try:
        found = running_controller() if attach else None
        if attach and found is None:
            deployment = RayDeployment(resolve_ports(config), daemons)
        deployment.start(shares, began_s, on_status, found)
    except BaseException:
        deployment.stop()
        raise
    return deployment


class RayLost(Unavailable):
    """The embedded Ray has lost a daemon while the deployment started, so that nothing more can start in it."""


class RayDeployment:
    """A running deployment. Leaving its `with` block stops it and every process that belongs to it."""

    def __init__(self, config: ServeConfig, daemons: list[psutil.Process]) -> None:
        self.config = config
        self.start_up = StartUp(0.0, 0.0, 0.0, 0.0)
        self.admin_address = f"{LOOPBACK}:{config.admin_port}"
        self.grpc_address = f"{callable_host(config.host)}:{config.grpc_port}"
        self.http_address = f"{callable_host(config.host)}:{config.http_port}"
        self._daemons = daemons  # processes of the Ray that was started for this deployment
        self._controller: Any = None
        self._has_answered = False  # the controller
        # The watch begins before everything else starts, because a daemon may die meanwhile.
        self._watch = None if config.address else DaemonWatch()
        self._token_file = token_file(config.admin_port)
        self._own_secret: Path | None = None  # made for a configuration that names no secret

    def start(self, shares: dict[str, ResourceShare], began_s: float, on_status: OnStatus, found: Any = None) -> None:
        """Starts the controller, or follows `found`, a running deployment's controller, until everything is ready."""
        ray_s = time.monotonic() - began_s
        if found is None and not self.config.security.secret_file:
            self._own_secret = leave_secret(self.config.admin_port)
            security = self.config.security.model_copy(update={"secret_file": str(self._own_secret)})
            self.config = self.config.model_copy(update={"security": security})
        self._controller = found or self._make_controller(shares)
        # The process of a new controller imports Ray and Penstock first, which takes a busy machine minutes.
        timeout_s = _CALL_TIMEOUT_S if found else self.config.start_timeout_s
        address, failure = self._get_unless_lost(self._controller.start.remote(), timeout_s)
        if failure:
            raise from_status(status_pb2.Status.FromString(failure))
        self._has_answered = True
        self._life = self._controller.live.remote()
        assert found is not None or address == self.admin_address
        controller_s = time.monotonic() - began_s
        workers_s = self._follow_until_ready(began_s, on_status)
        ready_s = time.monotonic() - began_s
        self.start_up = StartUp(ray_s, controller_s - ray_s, workers_s - controller_s, ready_s - workers_s)

    def _make_controller(self, shares: dict[str, ResourceShare]) -> Any:
        root = str(Path(cluster.__file__).resolve().parent.parent)
        python_path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
        embedded = not self.config.address
        options: dict[str, Any] = {
            "name": CONTROLLER,
            "namespace": NAMESPACE,
            "num_cpus": 0,
            "memory": ONE_BYTE,
            "max_restarts": -1,
            "max_task_retries": -1,  # calls wait for a restarted controller
            "lifetime": None if embedded else "detached",
            "runtime_env": {"env_vars": {**NO_CPU_SHARE.environment(), "PYTHONPATH": python_path}},
        }
        home = _home_node()
        if not embedded and is_head(home):
            options["resources"] = {HEAD: 0.001}  # on the head node, also after the head has been replaced
        else:
            # The actor runs on this node, where the user expects the ports, and on another only once this node is gone.
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(home, soft=not embedded)
        try:
            return (
                ray.remote(ControllerActor)
                .options(**options)
                .remote(self.config.model_dump(mode="json"), shares, python_path, embedded, str(self._token_file))
            )
        except ValueError as error:
            raise ConfigError(
                f"address = {self.config.address!r}: a deployment runs in this Ray cluster already ({error}); "
                "end it with `penstock stop`, or choose another cluster"
            ) from error

    def _follow_until_ready(self, began_s: float, on_status: OnStatus) -> float:
        """Returns how long after `began_s` every worker was ready, in seconds."""
        version, workers_s = 0, None
        deadline_s = began_s + self.config.start_timeout_s
        status = admin_pb2.StatusResponse()
        while time.monotonic() < deadline_s:
            wait_s = max(0.0, min(_POLL_S, deadline_s - time.monotonic()))
            answer = self._controller.wait.remote(version, wait_s)
            version, status, _ = self._read(self._get_unless_lost(answer, wait_s + _CALL_TIMEOUT_S))
            on_status(status)
            if workers_s is None and status.workers and all(worker.state == "ready" for worker in status.workers):
                workers_s = time.monotonic() - began_s
            if status.ready:
                return workers_s or time.monotonic() - began_s
        raise Unavailable(
            f"not ready within start_timeout_s = {self.config.start_timeout_s:g} s: {_unready_workers(status)}"
        )

    @property
    def admin_token(self) -> str:
        """The Admin service's current token."""
        secrets = ClusterSecrets.of(self.config.security)
        assert secrets is not None, "start first"
        return secrets.current.token(ADMIN)

    def wait(self, version: int, timeout_s: float) -> tuple[int, admin_pb2.StatusResponse, bool]:
        """Returns version, status and whether it was stopped, once there is a newer `version` or after `timeout_s`."""
        return self._read(self._get(self._controller.wait.remote(version, timeout_s), timeout_s + _CALL_TIMEOUT_S))

    @staticmethod
    def _read(answer: tuple[int, bytes, bytes, bool]) -> tuple[int, admin_pb2.StatusResponse, bool]:
        found, status, failure, stopped = answer
        if failure:
            raise from_status(status_pb2.Status.FromString(failure))
        return found, admin_pb2.StatusResponse.FromString(status), stopped

    def _get_unless_lost(self, ref: Any, timeout_s: float) -> Any:
        """Returns the controller's answer. Raises RayLost as soon as the embedded Ray can start nothing any more."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            try:
                return self._get(ref, min(_WATCH_S, left_s))
            except Unavailable as error:
                if self._watch is not None and self._watch.lost:
                    raise RayLost(self._watch.lost) from error
                if not isinstance(error.__cause__, GetTimeoutError):
                    raise
                if not left_s:
                    raise _no_answer(timeout_s) from error

    def _get(self, ref: Any, timeout_s: float) -> Any:
        try:
            return ray.get(ref, timeout=timeout_s)
        except GetTimeoutError as error:
            raise _no_answer(timeout_s) from error
        except RayError as error:
            raise Unavailable(f"the controller is lost: {str(error).strip().splitlines()[0]}") from error

    def status(self) -> admin_pb2.StatusResponse:
        return self.wait(-1, 0.0)[1]

    def wait_until_stopped(self, on_status: OnStatus = lambda status: None) -> str:
        """Blocks until the deployment is stopped through its Admin service or its embedded Ray is lost. Returns the
        reason.
        """
        version, stopped = 0, False
        while not stopped:
            if self._watch is not None and self._watch.lost:
                return self._watch.lost
            try:
                version, status, stopped = self.wait(version, _WATCH_S)
            except Unavailable as error:
                if self._watch is None:
                    raise
                return self._watch.lost or error.message
            on_status(status)
        return ""

    def processes(self) -> list[psutil.Process]:
        """Returns every process of the Ray that was started for this deployment, including workers and routers."""
        return with_descendants(self._daemons)

    def stop(self, grace_s: float = 0.0) -> None:
        """Stops the deployment, whose streams get `grace_s` to end, and the Ray that was started for it. May be called
        twice.
        """
        if not ray.is_initialized():
            return
        if self._watch is not None:
            self._watch.disarm()
        try:
            if self._has_answered:
                self._get(self._controller.stop.remote(grace_s), grace_s + _STOP_TIMEOUT_S)
        except Unavailable as error:
            logging.getLogger(__name__).warning("stopping: %s", error.message)
        finally:
            disconnect(self._daemons)
            if self._watch is not None:
                self._watch.close()
            if self._controller is not None:
                remove_token(self._token_file)
            if self._own_secret is not None:
                remove_secret(self._own_secret)

    def leave(self) -> None:
        """Disconnects from a joined cluster; the deployment continues."""
        ray.shutdown()

    def __enter__(self) -> RayDeployment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def running_controller() -> Any:
    """Returns the controller of the deployment in this Ray cluster; None if there is none."""
    try:
        return ray.get_actor(CONTROLLER, namespace=NAMESPACE)
    except ValueError:
        return None


def _home_node() -> str:
    """Returns the id of the node where `penstock serve` was called, on which the controller and the routers start."""
    return str(ray.get_runtime_context().get_node_id())


def _no_answer(timeout_s: float) -> Unavailable:
    return Unavailable(f"the controller did not answer within {timeout_s:g} s")


def _unready_workers(status: admin_pb2.StatusResponse) -> str:
    unready = (worker for worker in status.workers if worker.state != "ready")
    waiting = [f"{worker.member.worker_id} is {worker.state} {worker.detail}".strip() for worker in unready]
    return "; ".join(waiting) or "no request succeeded"
