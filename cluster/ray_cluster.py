"""Ray itself: started here for one deployment, or joined, and ended with nothing left of it.

Knows nothing of workers beyond what Ray must know of the machine to place them.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Container, Iterator, Sequence
from pathlib import Path

import psutil
import ray
from ray.exceptions import RayError

from cluster.addresses import LOOPBACK
from cluster.ray_process import NAMESPACE
from cluster.shares import Share, divide, num_cpus_needed
from penstock.config import ServeConfig
from penstock.errors import ConfigError

MINIMUM_RAY = "2.40"
_CONNECT_TIMEOUT_S = 5.0
_EXIT_TIMEOUT_S = 5.0  # until Ray's own processes are gone after its shutdown
_ROOM = 4  # times the cores that there are: bookkeeping, so that a pool which is scaled up on one machine finds a place
_OBJECT_STORE_BYTES = 100 * 1024 * 1024  # close to Ray's minimum: nothing of ours goes through it


def check_ray_version(found: str) -> None:
    """Raises ConfigError for a Ray that is too old."""
    if _version(found) < _version(MINIMUM_RAY):
        raise ConfigError(
            f"ray {found} is too old: Penstock needs {MINIMUM_RAY} or newer; run: pip install -U 'ray>={MINIMUM_RAY}'"
        )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def connect(config: ServeConfig) -> tuple[dict[str, Share], list[psutil.Process]]:
    """Starts Ray, or joins the one at `config.address`. Returns the workers' shares and the processes it started.

    Raises ConfigError; nothing that was started is left then.
    """
    bystanders = {child.pid for child in psutil.Process().children()}
    try:
        with _keep_sigterm_handler():
            shares = _join(config) if config.address else _start_embedded(config)
    except BaseException:
        disconnect(_children_but(bystanders))
        raise
    return shares, _children_but(bystanders)


@contextlib.contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Ray replaces the handler; the caller's is put back, so that SIGTERM stops things in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _start_embedded(config: ServeConfig) -> dict[str, Share]:
    num_cores = len(os.sched_getaffinity(0))
    num_gpus = _count_gpus(config)
    shares = divide(config, num_cores, num_gpus)
    # Read by Ray's daemons: no spare workers on a small machine, nothing sent home.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    os.environ.setdefault("RAY_enable_worker_prestart", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    verbose = "PENSTOCK_LOG" in os.environ
    ray.init(
        address="local",  # also where RAY_ADDRESS is set
        num_cpus=_ROOM * max(num_cores, math.ceil(num_cpus_needed(config, shares))),
        num_gpus=num_gpus,
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=False,
        namespace=NAMESPACE,
        log_to_driver=verbose,
        logging_level=logging.INFO if verbose else logging.ERROR,
        _node_ip_address=LOOPBACK,
    )
    return shares


def _count_gpus(config: ServeConfig) -> int:
    """As Ray itself would count them: by what the driver lists, not by importing torch here."""
    if config.engine_config().device == "cpu":
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() not in {"", "-1"}])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def _join(config: ServeConfig) -> dict[str, Share]:
    _check_address(config.address)
    try:
        ray.init(address=config.address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RayError, ValueError, RuntimeError) as error:
        raise _no_cluster(config.address, str(error)) from error
    resources = ray.cluster_resources()
    return divide(config, resources.get("CPU", 1.0), resources.get("GPU", 0.0))


def _check_address(address: str) -> None:
    """Asks the port first: Ray itself tries for more than a minute where nobody listens."""
    if address.startswith("ray://"):
        raise ConfigError(f"address = {address!r}: run this on a node of the cluster and give auto, or its host:port")
    host, colon, port = address.rpartition(":")
    if not colon:
        return  # auto, or another word that Ray itself looks up
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise _no_cluster(address, str(error)) from error


def _no_cluster(address: str, problem: str) -> ConfigError:
    return ConfigError(
        f"address = {address!r}: no Ray cluster could be joined ({problem}); start one with `ray start --head`, "
        "and where it asks for a token, set RAY_AUTH_MODE=token here as there"
    )


def disconnect(daemons: Sequence[psutil.Process]) -> None:
    """Disconnects from Ray, and leaves nothing of these daemons of ours nor of what they started."""
    family = with_descendants(daemons)
    ray.shutdown()
    _, alive = psutil.wait_procs(family, _EXIT_TIMEOUT_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, _EXIT_TIMEOUT_S)


def _children_but(bystanders: Container[int]) -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.pid not in bystanders]


def with_descendants(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    family = []
    for process in processes:
        try:
            family += [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue  # it ended, and so its children are nobody's here
    return family
