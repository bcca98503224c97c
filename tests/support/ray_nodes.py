"""Runs several Ray nodes on one machine, for tests and the fault benchmark, which kill nodes and restart the head.

The head keeps its state on disk (Ray's RocksDB store); without it, Ray's nodes would end with the head. Nodes are added
by the test, or by Ray's own autoscaler through its provider of fake nodes. `ray.cluster_utils.AutoscalingCluster` does
the latter too, but ends every Ray of the machine first, and needs a file that Ray's wheel lacks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import ray
from ray._private.services import get_node_ip_address
from ray.cluster_utils import Cluster

from cluster.ray.connection import with_descendants
from cluster.ray.launch import RayDeployment
from penstock.config.security import SecurityConfig
from penstock.rpc.secret import ClusterSecret
from tests.support.key_files import write_secret
from tests.support.prefork.module_process import forked_ray_workers

log = logging.getLogger(__name__)

_STORE_BYTES = 80 * 1024 * 1024  # Ray's minimum; nothing of ours uses it
_GONE_TIMEOUT_S = 10.0
_ENVIRONMENT = {
    "RAY_gcs_storage": "rocksdb",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
_AUTOSCALER_ENVIRONMENT = {
    "RAY_FAKE_CLUSTER": "1",  # the provider requires it
    "RAY_enable_autoscaler_v2": "1",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
}
_PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
_HEAD_ID, _HEAD_TYPE = "f" * 51 + "00000", "ray.head.default"  # as the provider knows the head
_IDLE_MINUTES = 0.05  # after which Ray's autoscaler removes a node


class LocalRayNodes:
    """Runs a head without resources for workers, and added nodes. Its `with` block ends every process."""

    security: SecurityConfig  # the file of a secret that every node can read while it runs

    def __init__(self, *, grow_by: Mapping[str, float] | None = None, num_more: int = 0) -> None:
        """With `grow_by`, Ray's autoscaler adds up to `num_more` nodes with these resources, and removes idle ones."""
        self._grow_by = grow_by
        self._num_more = num_more
        self._context = contextlib.ExitStack()
        self._bystanders: set[int] = set()
        self._cluster: Any = None
        self._has_head = True
        self._added: dict[Any, dict[str, Any]] = {}  # the nodes that should run, and how each was added

    def __enter__(self) -> LocalRayNodes:
        with self._context as context:
            path = context.enter_context(tempfile.TemporaryDirectory(prefix="penstock-head-"))
            context.enter_context(_environment(_ENVIRONMENT | {"RAY_gcs_storage_path": path}))
            context.enter_context(forked_ray_workers())
            self._bystanders = {child.pid for child in psutil.Process().children()}
            context.callback(self._end_processes)
            secret = Path(context.enter_context(tempfile.TemporaryDirectory(prefix="penstock-secret-")), "secret")
            self.security = SecurityConfig.model_validate(write_secret(secret, ClusterSecret.make()))
            head = {"num_cpus": 0, "object_store_memory": _STORE_BYTES, "include_dashboard": False}
            if self._grow_by is not None:
                context.enter_context(_environment(_AUTOSCALER_ENVIRONMENT))
                head |= _autoscaled_head(self._grow_by, self._num_more, Path(path, "autoscaler.json"))
            self._cluster = Cluster(initialize_head=True, head_node_args=head)
            self._context = context.pop_all()
        return self

    @property
    def address(self) -> str:
        """Returns host:port of the head."""
        return str(self._cluster.address)

    @property
    def head(self) -> Any:
        """Returns the head's node, to which the driver connects."""
        return self._cluster.head_node

    def add(self, resources: Mapping[str, float], labels: Mapping[str, str] | None = None, num_cpus: int = 1) -> Any:
        """Adds a node, whose processes run on this machine, and returns it once it has joined."""
        how = {"num_cpus": num_cpus, "resources": dict(resources), "labels": dict(labels or {})}
        node = self._cluster.add_node(**how, object_store_memory=_STORE_BYTES)
        self._added[node] = how
        return node

    def replace_ended(self) -> None:
        """Restarts the head's own process if it has ended by itself, and replaces each node whose node manager has.
        Ray's daemons sometimes end like that, three seconds after their start."""
        status = self._cluster.head_node.all_processes["gcs_server"][0].process.poll() if self._has_head else None
        if status is not None:
            log.warning("the head's own process ended with status %s", status)
            self._cluster.head_node.kill_gcs_server(check_alive=False)
            self.restart_head()
        for node, how in list(self._added.items()):
            status = node.all_processes["raylet"][0].process.poll()
            if status is not None:
                log.warning("the node manager of %s ended with status %s", node.node_id, status)
                self.kill(node)
                self.add(**how)

    def kill(self, node: Any) -> None:
        """Kills all processes of a node at once, including its actors, like a machine that loses power."""
        for process in _family(node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._cluster.worker_nodes.discard(node)
        self._added.pop(node, None)

    def node_of(self, pid: int) -> Any:
        """Returns the node on which the actor of a process runs."""
        (found,) = [each for each in ray._private.state.actors().values() if each["Pid"] == pid]
        nodes = [self.head, *self._cluster.worker_nodes]
        return next(node for node in nodes if node.node_id == found["Address"]["NodeID"])

    def kill_head(self) -> None:
        """Kills only the head's own process; other processes of its node continue."""
        self._has_head = False
        self._cluster.head_node.kill_gcs_server()

    def restart_head(self) -> None:
        self._cluster.head_node.start_gcs_server()
        self._has_head = True

    def _end_processes(self) -> None:
        ray.shutdown()
        mine = [child for child in psutil.Process().children() if child.pid not in self._bystanders]
        family = with_descendants(mine)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _, alive = psutil.wait_procs(family, _GONE_TIMEOUT_S)
        if alive:
            log.warning("still there: %s", alive)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.close()


def _autoscaled_head(resources: Mapping[str, float], most: int, path: Path) -> dict[str, Any]:
    """Returns arguments of a head whose autoscaler adds up to `most` nodes; writes its configuration to `path`."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    node = {"CPU": 1, "object_store_memory": _STORE_BYTES, **resources}
    provider = {
        "type": "external",
        "module": _PROVIDER,
        "gcs_address": f"{get_node_ip_address()}:{port}",
        "head_node_id": _HEAD_ID,
        "launch_multiple": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "foreground_node_launch": True,
    }
    commands = ("setup", "head_setup", "worker_setup", "initialization", "head_start_ray", "worker_start_ray")
    unused: dict[str, Any] = {  # Ray requires them
        **{f"{each}_commands": [] for each in commands},
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
        "file_mounts_sync_continuously": False,
    }
    config = {
        **unused,
        "cluster_name": "penstock-tests",
        "provider": provider,
        "max_workers": most,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": _IDLE_MINUTES,
        "head_node_type": _HEAD_TYPE,
        "available_node_types": {
            _HEAD_TYPE: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {"resources": node, "node_config": {}, "min_workers": 0, "max_workers": most},
        },
    }
    path.write_text(json.dumps(config))
    identity = {
        "RAY_CLOUD_INSTANCE_ID": _HEAD_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD_ID,
        "RAY_NODE_TYPE_NAME": _HEAD_TYPE,
    }
    return {"gcs_server_port": port, "autoscaling_config": str(path), "env_vars": identity}


def controller_process(deployment: RayDeployment) -> psutil.Process:
    """Returns the process that listens at the deployment's Admin port."""
    processes = psutil.process_iter(["cmdline", "ppid"])
    (found,) = [each for each in processes if _is_controller(each, deployment.admin_address)]
    return found


def _is_controller(process: psutil.Process, admin_address: str) -> bool:
    if "ControllerActor" not in " ".join(process.info["cmdline"] or []):
        return False
    port = int(admin_address.rpartition(":")[2])
    return any(each.laddr.port == port for each in process.net_connections() if each.status == psutil.CONN_LISTEN)


def _family(node: Any) -> list[psutil.Process]:
    pids = [process.process.pid for processes in node.all_processes.values() for process in processes]
    return with_descendants([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)])


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Sets variables that Ray's daemons read when they start."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
