"""Starts Ray for one deployment or joins a running cluster, and on shutdown leaves nothing behind.

Knows nothing about workers except the resources that Ray needs to place them.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path

import psutil
import ray
import ray._private.ray_constants as ray_constants
from ray.exceptions import RayError

from cluster.pools.resources import ResourceShare, divide_resources, num_cpus_needed
from cluster.ray.daemon_watch import keeps_state
from cluster.ray.process import NAMESPACE
from penstock.config import ServeConfig
from penstock.errors import ConfigError
from penstock.rpc.addresses import LOOPBACK

logger = logging.getLogger(__name__)

MINIMUM_RAY = "2.52"  # the first version that authenticates callers by a token
_CONNECT_TIMEOUT_S = 5.0
_EXIT_TIMEOUT_S = 5.0  # time for Ray's processes to exit after shutdown before they are killed
_KILLED_TIMEOUT_S = 10.0  # time for killed processes to be gone
_START_WAITS_S = (30, 60)  # wait for the port of an embedded Ray's control store, by attempt
_START_TIMEOUTS = ("Timed out waiting for file", "timed out during startup")  # in Ray's messages: it has no type for it
_PR_SET_CHILD_SUBREAPER = 36  # from Linux's <sys/prctl.h>
# Ray is given this multiple of the real cores. An upgrade's new workers then fit next to the old ones, however many
# there are, and a pool can be scaled up on one machine, where each worker has half the cores it had before.
_CPU_HEADROOM = 2
_OBJECT_STORE_BYTES = 100 * 1024 * 1024  # close to Ray's minimum: Penstock does not use the object store


def check_ray_version(found: str) -> None:
    """Raises ConfigError for a Ray that is too old."""
    if _version(found) < _version(MINIMUM_RAY):
        raise ConfigError(
            f"ray {found} is too old: Penstock needs {MINIMUM_RAY} or newer; run: pip install -U 'ray>={MINIMUM_RAY}'"
        )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def protect_token() -> None:
    """Makes the file of Ray's token readable only by its owner, and creates the token if there is none, since Ray would
    leave it readable by every account. Raises ConfigError for another account's file.
    """
    if "RAY_AUTH_TOKEN" in os.environ or os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(named) if named else Path.home() / ".ray" / "auth_token"
    try:
        if not named:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                    file.write(secrets.token_hex(32))
        if stat.S_IMODE(path.stat().st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
            path.chmod(0o600)
            logger.info("%s, Ray's token, was readable by other accounts: its mode is 600 now", path)
    except OSError as error:
        raise ConfigError(
            f"{path}: Ray's token must be readable by its owner alone ({error.strerror}); chmod 600 it, or name a file "
            "of this account in RAY_AUTH_TOKEN_PATH"
        ) from error


def connect(config: ServeConfig) -> tuple[dict[str, ResourceShare], list[psutil.Process]]:
    """Starts Ray, or joins the one at `config.address`. Returns the workers' shares and the processes it started.

    Raises ConfigError, in which case everything it started is stopped.
    """
    protect_token()
    if config.address:
        return _leaving_nothing(lambda: _join(config))
    return _start_embedded(config)


def _leaving_nothing(
    start: Callable[[], dict[str, ResourceShare]],
) -> tuple[dict[str, ResourceShare], list[psutil.Process]]:
    """Calls `start`. Returns its shares and the processes it started; stops those processes if it fails."""
    bystanders = {child.pid for child in psutil.Process().children()}
    try:
        with _keep_sigterm_handler():
            shares = start()
    except BaseException:
        disconnect(_children_but(bystanders))
        raise
    return shares, _children_but(bystanders)


@contextlib.contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Restores the caller's SIGTERM handler, which Ray replaces, so that SIGTERM still stops the deployment cleanly."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _start_embedded(config: ServeConfig) -> tuple[dict[str, ResourceShare], list[psutil.Process]]:
    """Starts an embedded Ray, and tries once more if its daemons do not come up."""
    first_wait_s, last_wait_s = _START_WAITS_S
    try:
        return _leaving_nothing(lambda: _init_embedded(config, first_wait_s))
    except Exception as error:  # Ray raises RuntimeError for some daemons and a bare Exception for others
        if not any(text in str(error) for text in _START_TIMEOUTS):
            raise
        logger.warning("Ray did not start (%s): its processes were ended, and one more attempt is made", error)
    return _leaving_nothing(lambda: _init_embedded(config, last_wait_s))


def _init_embedded(config: ServeConfig, wait_s: int) -> dict[str, ResourceShare]:
    num_cores = len(os.sched_getaffinity(0))
    num_gpus = _count_gpus(config)
    shares = divide_resources(config, num_cores, num_gpus)
    # Read by Ray's daemons: no idle workers on a small machine, no usage reports.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    os.environ.setdefault("RAY_enable_worker_prestart", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_gcs_server_port_wait_time_s"] = str(wait_s)  # noqa: SIM112 - the name is Ray's
    verbose = "PENSTOCK_LOG" in os.environ
    _become_subreaper()
    with _on_loopback_alone():
        ray.init(
            address="local",  # also if RAY_ADDRESS is set
            num_cpus=_CPU_HEADROOM * max(num_cores, math.ceil(num_cpus_needed(config, shares))),
            num_gpus=num_gpus,
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            namespace=NAMESPACE,
            log_to_driver=verbose,
            logging_level=logging.INFO if verbose else logging.ERROR,
            _node_ip_address=LOOPBACK,
            _system_config=_daemon_settings(),
        )
    return shares


@contextlib.contextmanager
def _on_loopback_alone() -> Iterator[None]:
    """Makes Ray keep the loopback address it is given, and listen only there.

    Otherwise, where it may be part of a cluster, Ray uses the machine's address and listens on every interface.
    """
    may_be_cluster = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = may_be_cluster


def _daemon_settings() -> dict[str, object]:
    """Returns settings of Ray's own that make the loss of one daemon harmless to the other processes."""
    # By default the control store would declare the only node dead, which ends all its processes: `DaemonWatch` decides
    # about that.
    settings: dict[str, object] = {"health_check_failure_threshold": 1000}
    # By default Ray runs actors at niceness 15. Next to other work that keeps the cores busy, routers and workers would
    # starve.
    settings["worker_niceness"] = 0
    if keeps_state():
        folder = tempfile.mkdtemp(prefix="penstock-ray-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        settings |= {"gcs_storage": "rocksdb", "gcs_storage_path": folder}
    return settings


def _become_subreaper() -> None:
    """Makes this process the parent of whatever a lost node manager leaves behind, so that `disconnect` finds it."""
    with contextlib.suppress(OSError, AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _count_gpus(config: ServeConfig) -> int:
    """Counts GPUs as Ray does, from what the driver lists, without importing torch."""
    if config.engine_config().device == "cpu":
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() not in {"", "-1"}])
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def _join(config: ServeConfig) -> dict[str, ResourceShare]:
    _check_address(config.address)
    try:
        ray.init(address=config.address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RayError, ValueError, RuntimeError) as error:
        raise _no_cluster(config.address, str(error)) from error
    resources = ray.cluster_resources()
    return divide_resources(config, resources.get("CPU", 1.0), resources.get("GPU", 0.0))


def _check_address(address: str) -> None:
    """Checks first that the port answers, since Ray retries for more than a minute if nothing listens."""
    if address.startswith("ray://"):
        raise ConfigError(f"address = {address!r}: run this on a node of the cluster and give auto, or its host:port")
    host, colon, port = address.rpartition(":")
    if not colon:
        return  # "auto" or another word that Ray resolves itself
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
    """Disconnects from Ray, and stops these daemons and everything they started.

    A Ctrl-C meanwhile does not leave them behind: it kills them at once.
    """
    family = alive = with_descendants([*daemons, *_orphans()] if daemons else [])
    try:
        ray.shutdown()
        _, alive = psutil.wait_procs(family, _EXIT_TIMEOUT_S)
    finally:
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    psutil.wait_procs(alive, _KILLED_TIMEOUT_S)


def _orphans() -> list[psutil.Process]:
    """Returns Ray's worker processes that a lost node manager left behind, found by the names that Ray gives them."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.cmdline()[:1] and child.cmdline()[0].startswith("ray::"):
                found.append(child)
    return found


def _children_but(bystanders: Container[int]) -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.pid not in bystanders]


def with_descendants(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    family = []
    for process in processes:
        try:
            family += [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue  # it has ended, so its children have a new parent
    return family
