"""Tests requests for nodes with Ray's own autoscaler, which adds and removes nodes (Ray's provider of fake nodes)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import ray
import ray.autoscaler.v2.utils

from cluster.pools.resources import ResourceShare
from cluster.ray.autoscaler_hint import AutoscalerHint
from tests.support.ray_nodes import LocalRayNodes

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
