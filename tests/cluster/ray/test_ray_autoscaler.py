"""Tests requests for nodes, and a deployment that needs more of them, with Ray's own autoscaler, which adds and removes
nodes (Ray's provider of fake nodes)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import grpc
import pytest
import ray
import ray.autoscaler.v2.utils

from cluster.pools.resources import ResourceShare
from cluster.ray.autoscaler_hint import AutoscalerHint
from cluster.ray.launch import RayDeployment, launch
from penstock.config import ServeConfig
from penstock.v1 import admin_pb2, admin_pb2_grpc
from tests.support.ray_nodes import LocalRayNodes
from tests.system.test_faults import MODEL

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

WITHIN_S = 200.0
POLL_S = 0.2  # Ray has no call that waits for a change of its nodes


@pytest.fixture(scope="module")
def ray_nodes() -> Iterator[LocalRayNodes]:
    with LocalRayNodes(grow_by={"decode": 1}, num_more=3) as nodes:
        yield nodes


async def until_nodes(count: int) -> set[str]:
    """Returns the ids of the nodes beside the head once there are `count` of them."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            alive = [node for node in await asyncio.to_thread(ray.nodes) if node["Alive"]]
            added = {node["NodeID"] for node in alive if "decode" in node["Resources"]}
            if len(added) == count:
                return added
            await asyncio.sleep(POLL_S)


async def test_the_hint_alone_starts_nodes_keeps_them_and_gives_them_back(
    ray_nodes: LocalRayNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing runs on the nodes, so that without the hint Ray removes them."""
    monkeypatch.setattr(ray.autoscaler.v2.utils, "cached_is_autoscaler_v2", None)  # another Ray's answer, perhaps
    ray.init(address=ray_nodes.address, log_to_driver=False)
    share, hint = ResourceShare(num_cpus=0.1, num_threads=1, resources={"decode": 1}), AutoscalerHint()
    try:
        hint.request([share, share])
        both = await until_nodes(2)
        hint.request([share])
        assert await until_nodes(1) < both
        await hint.withdraw()
        assert await until_nodes(0) == set()
    finally:
        ray.shutdown()


async def scale(running: RayDeployment, replicas: int) -> None:
    token = (("authorization", f"Bearer {running.admin_token}"),)
    async with grpc.aio.insecure_channel(running.admin_address) as channel:
        request = admin_pb2.ScaleRequest(pool="decode", replicas=replicas)
        await admin_pb2_grpc.AdminStub(channel).Scale(request, timeout=WITHIN_S, metadata=token)


async def test_a_pool_grows_to_nodes_that_ray_has_yet_to_add_and_gives_them_back(
    ray_nodes: LocalRayNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the first worker has a node at the start. `grows_to` allows two workers, and no `--force` is needed."""
    monkeypatch.setattr(ray.autoscaler.v2.utils, "cached_is_autoscaler_v2", None)
    config = ServeConfig.model_validate(
        {
            "model": str(MODEL),
            "engine": {"num_threads": 1, "num_pages": 64},
            "http_port": 0,
            "grpc_port": 0,
            "admin_port": 0,
            "routers": 1,
            "address": ray_nodes.address,
            "security": ray_nodes.security,
            "grows_to": {"CPU": 2, "decode": 2},
            "prefill_pool": {"replicas": 0},
            "decode_pool": {"replicas": 1, "num_cpus": 0.1, "resources": {"decode": 1}},
            "start_timeout_s": WITHIN_S,
        }
    )
    with launch(config) as running:
        await until_nodes(1)
        await scale(running, 2)
        await until_nodes(2)
        with pytest.raises(grpc.aio.AioRpcError, match="the decode pool can have 2"):
            await scale(running, 3)
        await scale(running, 1)
        await until_nodes(1)
