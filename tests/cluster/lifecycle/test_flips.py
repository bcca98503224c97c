"""Tests role flips, shrinking pools and restarts of workers under load: no request fails and no token changes."""

from __future__ import annotations

import time

import pytest

from cluster.lifecycle.flip import FlipStage
from cluster.local.role_host import RoleHost
from engine.engine import Engine
from engine.generate import generate
from penstock.config import EngineConfig, ServeConfig
from penstock.errors import InvalidInput, Unavailable
from penstock.rpc.server import make_channel
from penstock.types import Role, SamplingParams, WorkerId
from penstock.v1 import admin_pb2, admin_pb2_grpc
from tests.support.hosted import PROMPTS, SAMPLING, Hosted, Load, hosted
from tests.system.test_faults import MODEL

MAX_TOKENS = 56
ENGINE = {"num_pages": 256, "num_threads": 1, "dtype": "float32"}


def config(prefill: int, decode: int, **settings: object) -> ServeConfig:
    return ServeConfig.model_validate(
        {
            "model": str(MODEL),
            "engine": ENGINE,
            "routers": 1,
            "decode": {"placement": "remote"},
            "prefill_pool": {"replicas": prefill},
            "decode_pool": {"replicas": decode},
            "start_timeout_s": 60,
            **dict.fromkeys(("http_port", "grpc_port", "admin_port"), 0),
            **settings,
        }
    )


@pytest.fixture(scope="module")
def undisturbed() -> list[list[int]]:
    engine = Engine.load(EngineConfig.model_validate({"model": str(MODEL), **ENGINE}))
    return [
        generate(engine, prompt, SamplingParams(max_tokens=MAX_TOKENS, seed=number, **SAMPLING))  # type: ignore[arg-type]
        for number, prompt in enumerate(PROMPTS)
    ]


def check(load: Load, undisturbed: list[list[int]]) -> None:
    assert load.errors == []
    for answer in load.answered:
        assert answer.token_ids == undisturbed[answer.prompt]
        assert answer.num_redispatches == 0


async def flip(deployment: Hosted, worker_id: str, role: Role) -> list[admin_pb2.FlipProgress]:
    async with make_channel(deployment.admin) as channel:
        request = admin_pb2.FlipRequest(worker_id=worker_id, role=role.value)
        return [each async for each in admin_pb2_grpc.AdminStub(channel).Flip(request, timeout=60)]


async def test_roles_flip_back_and_forth_under_load(undisturbed: list[list[int]]) -> None:
    async with hosted(config(prefill=2, decode=2)) as deployment:
        engines = {name: each.host.server.replica.engine for name, each in deployment.workers.items()}
        async with Load(deployment.grpc, max_tokens=MAX_TOKENS) as load:
            await load.more(2)
            for _ in range(2):
                for worker_id, role, successor in (
                    ("prefill-1", Role.DECODE, "decode-2"),
                    ("decode-2", Role.PREFILL, "prefill-1"),
                ):
                    reports = await flip(deployment, worker_id, role)
                    assert (reports[-1].stage, reports[-1].worker_id) == ("ready", successor)
                    assert worker_id not in deployment.members()
                    await load.more(2)
            pools = [each.partition("-")[0] for each in deployment.members()]
            assert (pools.count("prefill"), pools.count("decode")) == (2, 2)
        check(load, undisturbed)
        assert deployment.workers["prefill-1"].host.server.replica.engine is engines["prefill-1"]
        assert len(deployment.workers) == 4  # no new process was started
    assert deployment.pinned == [0, 0, 0, 0]


async def test_pools_shrink_and_workers_are_restarted_under_load(undisturbed: list[list[int]]) -> None:
    async with hosted(config(prefill=1, decode=2)) as deployment:
        controller = deployment.controller
        async with Load(deployment.grpc, max_tokens=MAX_TOKENS) as load:
            await load.more(2)
            for replicas in (1, 2):
                controller.pool_service.scale("decode", replicas)
                await deployment.until(lambda status: count(status, "decode") == replicas)  # noqa: B023
                await load.more(2)
            restarts, limit_s = ["decode-0", "decode-1", "prefill-0"], time.monotonic() + 120.0
            while restarts:
                worker_id = restarts.pop(0)
                before = deployment.members()[worker_id].epoch
                controller.draining.drain(worker_id, replaced=True)
                await deployment.until(lambda _: deployment.members().get(worker_id, NOBODY).epoch not in (0, before))  # noqa: B023
                await load.more(2)
                if (
                    not restarts
                    and time.monotonic() < limit_s
                    and not any(each.num_migrations for each in load.answered)
                ):
                    restarts = ["decode-0"]  # its requests ended before they could migrate, so it tries again
        check(load, undisturbed)
        assert sum(each.num_migrations for each in load.answered) > 0
    assert set(deployment.pinned) == {0}


NOBODY = admin_pb2.Member()


def count(status: admin_pb2.StatusResponse, pool: str) -> int:
    """Returns the size of a pool, or -1 while any of its workers is not ready."""
    workers = [each for each in status.workers if each.member.role == pool]
    return len(workers) if all(each.state == "ready" for each in workers) else -1


async def test_a_worker_asked_to_leave_is_replaced_at_once_and_its_streams_continue(
    undisturbed: list[list[int]],
) -> None:
    """Simulates a spot notice: the process gets it first, and the controller learns of it from the next report."""
    async with hosted(config(prefill=1, decode=2)) as deployment:
        async with Load(deployment.grpc, max_tokens=MAX_TOKENS) as load:
            await load.more(2)
            leaving = deployment.workers[WorkerId("decode-0")]
            await leaving.host.leave()
            await deployment.until(
                lambda _: "decode-0" not in deployment.members() and "decode-2" in deployment.members()
            )
            await load.more(2)
        check(load, undisturbed)
        assert deployment.controller.pool_service.replicas("decode") == 2


async def test_an_impossible_flip_is_refused_with_the_reason() -> None:
    async with hosted(
        config(prefill=0, decode=2, decode_pool={"replicas": 2, "engine": {"page_size": 32}})
    ) as deployment:
        flip = deployment.controller.pool_service.flip
        with pytest.raises(InvalidInput, match="decode-1 has already"):
            flip("decode-1", Role.DECODE)
        with pytest.raises(InvalidInput, match="the pools' engines differ"):
            flip("decode-1", Role.PREFILL)
        with pytest.raises(InvalidInput, match="the workers are decode-0, decode-1"):
            flip("prefill-0", Role.DECODE)


async def test_a_worker_that_dies_while_it_drains_is_restarted_in_its_new_role() -> None:
    async with hosted(config(prefill=1, decode=1)) as deployment:
        deployment.workers[WorkerId("prefill-0")].lose()
        reports = [
            report async for report in deployment.controller.pool_service.flip("prefill-0", Role.DECODE).follow()
        ]
        assert reports[-1].stage is FlipStage.FAILED
        assert "ended during its drain" in reports[-1].detail
        await deployment.until(lambda status: count(status, "decode") == 2)
        assert deployment.controller.pool_service.replicas("prefill") == 0


async def test_a_worker_with_fenced_pages_does_not_flip() -> None:
    host = RoleHost(config(prefill=1, decode=1).worker_config("decode-0", Role.DECODE))
    await host.start()
    pages = host.server.worker.scheduler._pool.allocate(2)
    assert pages
    with pytest.raises(Unavailable, match="2 of its pages may still be written"):
        await host.flip(WorkerId("prefill-0"), Role.PREFILL)
    with pytest.raises(InvalidInput, match="decode-0 has already"):
        await host.flip(WorkerId("decode-1"), Role.DECODE)
