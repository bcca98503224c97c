"""Tests the drain of the node that holds the controller and the routers, on a Ray of several nodes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import psutil
import pytest

from cluster.ray import launch as launching
from cluster.ray.launch import RayDeployment, launch
from penstock import Client
from penstock.config import DecodeConfig, PoolConfig, ServeConfig
from penstock.v1 import admin_pb2, admin_pb2_grpc
from tests.cluster.ray.test_nodes import MODEL, ask, until, whole
from tests.support.ray_nodes import LocalRayNodes

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

WITHIN_S = 200.0


@pytest.fixture
def deployment(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LocalRayNodes, Any, RayDeployment]]:
    """Yields the nodes, the one that holds the controller, and a deployment with one decode worker."""
    with LocalRayNodes() as nodes:
        home = nodes.add({"decode": 1})
        nodes.add({"decode": 1})
        # All nodes are on this machine, so the driver is on the head's; users call `penstock serve` elsewhere.
        monkeypatch.setattr(launching, "_home_node", lambda: home.node_id)
        config = ServeConfig(
            model=MODEL,
            http_port=0,
            grpc_port=0,
            admin_port=0,
            address=nodes.address,
            security=nodes.security,
            prefill_pool=PoolConfig(replicas=0),
            decode_pool=PoolConfig(replicas=1, num_cpus=0.1, resources={"decode": 1}),
            decode=DecodeConfig(placement="local"),
            engine={"kv_memory_bytes": 64 * 1024 * 1024},
            start_timeout_s=WITHIN_S,
        )
        with launch(config) as running:
            yield nodes, home, running


def test_the_controller_and_the_routers_move_and_streams_continue(
    deployment: tuple[LocalRayNodes, Any, RayDeployment],
) -> None:
    _, home, running = deployment
    before = whole(running)
    routers = {name: each for name, each in before.items() if name.startswith("router")}
    assert {each.node for each in routers.values()} == {home.node_id}
    token = (("authorization", f"Bearer {running.admin_token}"),)
    with ThreadPoolExecutor() as pool, Client(running.grpc_address, timeout_s=WITHIN_S) as client:
        tokens = ask(client, max_tokens=600)
        streams = [pool.submit(ask, client, 600) for _ in range(2)]
        with grpc.insecure_channel(running.admin_address) as channel:
            request = admin_pb2.DrainNodeRequest(node=home.node_id)
            reports = list(admin_pb2_grpc.AdminStub(channel).DrainNode(request, timeout=WITHIN_S, metadata=token))
        assert (reports[-1].worker_id, reports[-1].stage) == ("controller", "moving")
        moved = until(running, lambda workers: _are_elsewhere(workers, home.node_id))
        assert [each.result() for each in streams] == [tokens] * 2
        assert ask(client, max_tokens=60) == tokens[:60]
    assert {each.pid for each in moved.values()}.isdisjoint(each.pid for each in routers.values())
    deadline_s = time.monotonic() + WITHIN_S
    while any(_is_alive(each.pid) for each in routers.values()):
        assert time.monotonic() < deadline_s, "routers are left on the node"
        time.sleep(0.1)


def _is_alive(pid: int) -> bool:
    """Returns False for zombies too: without an init that reaps them, orphans stay zombies."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _are_elsewhere(workers: dict[str, admin_pb2.WorkerStatus], node: str) -> bool:
    roles = sorted(each.member.role for each in workers.values())
    are_ready = all(each.state == "ready" and each.node != node for each in workers.values())
    return roles == ["decode", "router", "router"] and are_ready
