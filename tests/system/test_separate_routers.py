"""Tests routers without a controller: separate processes that follow a deployment without routers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import httpx
import pytest

from penstock.client.async_client import AsyncClient
from penstock.client.async_stream import AsyncGenerateStream
from penstock.client.retry import RetryPolicy
from penstock.config import RouterConfig, ServeConfig
from penstock.types import FinishReason
from penstock.v1 import admin_pb2
from tests.support.plain_processes import Deployment, Process
from tests.support.supervised_processes import PlainDeployment, plain_deployment
from tests.system.test_faults import MODEL, TIMEOUT_S

pytestmark = pytest.mark.processes

MAX_TOKENS = 300
PROMPT = [(7 * i) % 900 + 20 for i in range(40)]
CONFIG = ServeConfig.model_validate(
    {
        "model": str(MODEL),
        "engine": {"num_pages": 512, "num_threads": 1, "dtype": "float32"},
        "prefill_pool": {"replicas": 0},
        "decode": {"placement": "local"},
        "admin_port": 0,
        "routers": 0,
        "start_timeout_s": 120,
    }
)
ONE_TRY = RetryPolicy(max_attempts=1)


def client(*routers: Process, retry: RetryPolicy = ONE_TRY) -> AsyncClient:
    return AsyncClient([each.address for each in routers], retry=retry, timeout_s=TIMEOUT_S)


def stream(made: AsyncClient) -> AsyncGenerateStream:
    return made.generate(PROMPT, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)


async def until_elsewhere(deployment: PlainDeployment, *routers: Process) -> admin_pb2.StatusResponse:
    peers = sorted(str(each.ready["peer"]) for each in routers)
    return await deployment.until(lambda status: list(status.routers_elsewhere) == peers, TIMEOUT_S)


async def statuses(router: Process) -> list[int]:
    """Returns the answers of the router's probes: live, then ready."""
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as http:
        urls = [f"http://{router.ready['metrics']}/health/{which}" for which in ("live", "ready")]
        return [(await http.get(url)).status_code for url in urls]


async def check_stream(made: AsyncClient) -> None:
    result = await stream(made).complete()
    assert (result.usage.completion_tokens, result.finish_reason) == (MAX_TOKENS, FinishReason.LENGTH)


@pytest.fixture
async def deployment() -> AsyncIterator[PlainDeployment]:
    async with plain_deployment(CONFIG) as made:
        yield made


async def test_separate_routers_serve_and_outlive_each_other_and_the_admin_service(deployment: PlainDeployment) -> None:
    ready = deployment.controller.status()
    assert (ready.ready, list(ready.endpoints), list(ready.routers_elsewhere)) == (True, [], [])
    assert [each.member.role for each in ready.workers] == ["decode"]
    config = RouterConfig(
        model=str(MODEL), grpc_port=0, http_port=0, metrics_port=0, admin=deployment.admin_address, drain_s=60
    )
    with Deployment() as processes:
        first, second = [await asyncio.to_thread(processes.start_router, config) for _ in range(2)]
        await until_elsewhere(deployment, first, second)
        assert await statuses(first) == await statuses(second) == [200, 200]

        # Without the Admin service both keep the last membership.
        await deployment.stop_admin()
        async with client(first) as to_first, client(second) as to_second:
            await asyncio.gather(check_stream(to_first), check_stream(to_second))
        assert await statuses(first) == await statuses(second) == [200, 200]
        await deployment.start_admin()
        await until_elsewhere(deployment, first, second)

        # The death of one router breaks no stream of the other, and callers with both addresses notice nothing.
        async with client(second) as other, client(first, second, retry=RetryPolicy()) as both:
            running = [stream(other), stream(other), *(stream(both) for _ in range(4))]
            begun = [(await anext(each)).text for each in running]
            first.kill()
            results = await asyncio.gather(*(each.complete() for each in running))
            assert {each.usage.completion_tokens for each in results} == {MAX_TOKENS}
            assert len({text + rest.text for text, rest in zip(begun, results, strict=True)}) == 1
            await check_stream(both)
        await until_elsewhere(deployment, second)
        assert deployment.controller.status().ready

        # After SIGTERM the stream in flight completes, and the process ends with it.
        async with client(second) as other:
            last = stream(other)
            await anext(last)
            second.signal(signal.SIGTERM)
            assert (await last.complete()).usage.completion_tokens == MAX_TOKENS
        assert await asyncio.to_thread(second.popen.wait, TIMEOUT_S) == 0
        status = await until_elsewhere(deployment)
        assert status.ready
