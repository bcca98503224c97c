"""Tests the autoscaler of a deployment on Ray under load: both pools grow and shrink, a worker flips its role to and
fro, and every stream has the tokens of a single process.

The tests wait for each change and keep up the load meanwhile. Resources of the one Ray node bound what the pools can
have.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import grpc
import pytest

from cluster.ray.launch import RayDeployment, launch
from engine.engine import Engine
from engine.generate import generate
from penstock.config import EngineConfig, ServeConfig
from penstock.types import SamplingParams
from penstock.v1 import admin_pb2, admin_pb2_grpc
from tests.support.hosted import PROMPTS, SAMPLING, Load
from tests.support.ray_nodes import LocalRayNodes
from tests.system.test_faults import MODEL

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

ENGINE = {"num_threads": 1, "dtype": "float32"}
NUM_LANES = 12
WITHIN_S = 240.0
AUTOSCALER = {
    "mode": "on",
    "slo": {"ttft_s": 0.1, "itl_s": 10},  # queued prompts miss it
    "interval_s": 0.2,
    "history_s": 3,
    "up_cooldown_s": 0,
    "down_cooldown_s": 0,
    "down_after_s": 1.5,
    "start_s": 2,
}


@pytest.fixture(scope="module")
def ray_nodes() -> Iterator[LocalRayNodes]:
    with LocalRayNodes() as nodes:
        nodes.add({"either": 4, "flips": 3})
        yield nodes


@contextlib.contextmanager
def deployment(
    nodes: LocalRayNodes,
    resource: str,
    sizes: Mapping[str, int],
    num_pages: int,
    max_batch: int,
    autoscaler: Mapping[str, object],
) -> Iterator[RayDeployment]:
    """Yields a deployment with pools of these sizes, from 1 to 2 workers that take 1 of the resource each."""
    pools = {
        f"{role}_pool": {
            "replicas": size,
            "min_replicas": 1,
            "max_replicas": 2,
            "num_cpus": 0.1,
            "resources": {resource: 1},
        }
        for role, size in sizes.items()
    }
    config = ServeConfig.model_validate(
        {
            "model": str(MODEL),
            "engine": ENGINE | {"num_pages": num_pages},
            "http_port": 0,
            "grpc_port": 0,
            "admin_port": 0,
            "routers": 1,
            "address": nodes.address,
            "security": nodes.security,
            "decode": {"placement": "remote", "max_batch_sequences": max_batch},
            "start_timeout_s": 240,
            "autoscaler": {**AUTOSCALER, **autoscaler},
            **pools,
        }
    )
    with launch(config) as running:
        yield running


async def until(running: RayDeployment, sizes: Mapping[str, int]) -> admin_pb2.StatusResponse:
    """Returns the status once the pools have these sizes and every worker is ready."""

    def holds(status: admin_pb2.StatusResponse) -> bool:
        workers = [each for each in status.workers if each.member.role in sizes]
        return all(each.state == "ready" for each in workers) and Counter(each.member.role for each in workers) == sizes

    version, status = -1, admin_pb2.StatusResponse()
    async with asyncio.timeout(WITHIN_S):
        while not holds(status):
            version, status, _ = await asyncio.to_thread(running.wait, version, 2.0)
    return status


def pids(status: admin_pb2.StatusResponse) -> set[int]:
    return {each.pid for each in status.workers if each.member.role in ("prefill", "decode")}


def check(load: Load, prompts: Sequence[list[int]], max_tokens: int) -> None:
    """Compares every answer with the tokens of a single process."""
    assert load.errors == []
    engine = Engine.load(EngineConfig.model_validate(ENGINE | {"model": str(MODEL), "num_pages": 64}))
    expected = {
        number: generate(engine, prompts[number], SamplingParams(max_tokens=max_tokens, seed=number, **SAMPLING))
        for number in {each.prompt for each in load.answered}
    }
    assert expected
    assert [each.token_ids for each in load.answered] == [expected[each.prompt] for each in load.answered]


def changes(running: RayDeployment, pool: str) -> list[tuple[str, int, int]]:
    """Returns what the autoscaler did to a pool, oldest first: the verdict, and the sizes before and after."""
    token = (("authorization", f"Bearer {running.admin_token}"),)
    request = admin_pb2.ExplainRequest(pool=pool, limit=100, changes=True)
    with grpc.insecure_channel(running.admin_address) as channel:
        explained = admin_pb2_grpc.AdminStub(channel).Explain(request, timeout=60, metadata=token)
    return [(each.verdict, each.current, each.decided) for each in explained.records if not each.failed]


def long_prompts(count: int) -> list[list[int]]:
    """Returns prompts of 20 pages each."""
    return [[(11 * i + 173 * n) % 900 + 20 for i in range(320)] for n in range(count)]


async def test_both_pools_follow_the_load(ray_nodes: LocalRayNodes) -> None:
    """The prompts are more than the caches hold, and the pages of one decode worker hold two of the sequences."""
    prompts, sizes = long_prompts(12), {"prefill": 1, "decode": 1}
    with deployment(ray_nodes, "either", sizes, 64, 64, {"flips": False}) as running:
        async with Load(running.grpc_address, NUM_LANES, 100, prompts) as heavy:
            await until(running, {"prefill": 2, "decode": 2})
            await heavy.more(NUM_LANES)
        async with Load(running.grpc_address, 1, 20) as light:
            await until(running, sizes)
            await light.more(1)
        for pool in sizes:
            first, *_, last = changes(running, pool)
            assert (first, last) == (("up", 1, 2), ("down", 2, 1))
    check(heavy, prompts, 100)
    check(light, PROMPTS, 20)


async def test_a_worker_flips_to_the_pool_that_lacks_one(ray_nodes: LocalRayNodes) -> None:
    """The node holds no fourth worker. A decode worker runs 16 sequences at a time, so that 40 long answers need two of
    them; many prompts that no cache holds need two prefill workers."""
    prompts, sizes = long_prompts(250), {"prefill": 2, "decode": 1}
    at_once = {"flip_after_s": 0, "flip_cooldown_s": 0, "down_after_s": 1e6}
    with deployment(ray_nodes, "flips", sizes, 4096, 16, at_once) as running:
        before = pids(await until(running, sizes))
        async with Load(running.grpc_address, 40, 100) as generating:
            flipped = await until(running, {"prefill": 1, "decode": 2})
            await generating.more(40)
        async with Load(running.grpc_address, 8, 1, prompts) as computing:
            again = await until(running, sizes)
            await computing.more(8)
        assert pids(flipped) == pids(again) == before
        assert changes(running, "decode")[:2] == [("flip", 1, 2), ("flip", 2, 1)]
    check(generating, PROMPTS, 100)
    check(computing, prompts, 1)
