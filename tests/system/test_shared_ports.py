"""Tests router processes that share their public ports: the death of one refuses nobody."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import httpx
import pytest

from cluster.ray.launch import resolve_ports
from penstock.client.async_client import AsyncClient
from penstock.client.retry import RetryPolicy
from penstock.config import RouterConfig, ServeConfig
from penstock.errors import ConfigError
from penstock.types import Role
from router.server import RouterServer
from tests.support.plain_processes import Deployment, Process
from tests.support.serving import worker_config
from tests.system.test_faults import MODEL

pytestmark = pytest.mark.processes

NUM_CONNECTIONS = 24  # all of them would lead to one router once in 2^23 runs
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with Deployment() as made:
        yield made


@pytest.fixture(scope="module")
def shared(deployment: Deployment) -> RouterConfig:
    """Returns the configuration of every router."""
    engine, local = {"num_pages": 256, "dtype": "float32"}, {"placement": "local"}
    (worker,) = deployment.start_workers([worker_config(Role.DECODE, MODEL, "decode-0", engine=engine, decode=local)])
    served = resolve_ports(ServeConfig(model=str(MODEL), http_port=0, grpc_port=0, admin_port=0))
    config = served.router_config("admin:1")
    return config.model_copy(update={"admin": "", "workers": (worker.address,), "metrics_port": 0})


async def complete(address: str) -> int:
    """Sends a request over a new connection; returns the status."""
    async with httpx.AsyncClient(timeout=60) as client:
        body = {"model": "penstock-tiny", "prompt": PROMPT, "max_tokens": 2}
        return (await client.post(f"http://{address}/v1/completions", json=body)).status_code


async def num_completed(router: Process) -> float:
    async with httpx.AsyncClient(timeout=60) as client:
        text = (await client.get(f"http://{router.ready['metrics']}/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("vllm:request_success_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


async def test_a_killed_router_refuses_nobody_at_either_port(deployment: Deployment, shared: RouterConfig) -> None:
    first, second = deployment.start_router(shared), deployment.start_router(shared)
    assert (first.http, first.address) == (second.http, second.address)
    statuses = [await complete(first.http) for _ in range(NUM_CONNECTIONS)]
    assert await num_completed(first) > 0  # the system divides connections between both
    assert await num_completed(second) > 0
    first.kill()
    statuses += [await complete(first.http) for _ in range(NUM_CONNECTIONS)]
    assert set(statuses) == {200}
    for _ in range(NUM_CONNECTIONS):
        async with AsyncClient(first.address, retry=RetryPolicy(max_attempts=1), timeout_s=60) as client:
            assert (await client.complete(PROMPT, max_tokens=2)).finish_reason is not None
    host, _, port = str(second.ready["metrics"]).rpartition(":")
    succeeding = shared.model_copy(update={"metrics_port": int(port)})
    third = deployment.start_router(succeeding)  # at each port of the second router, as when the controller moves
    assert (third.http, third.ready["metrics"]) == (second.http, f"{host}:{port}")
    second.signal(signal.SIGTERM)
    assert await asyncio.to_thread(second.popen.wait, 60) == 0
    assert [await complete(third.http) for _ in range(3)] == [200] * 3
    third.kill()


async def test_a_port_that_is_not_shared_is_refused(shared: RouterConfig) -> None:
    sharing, alone = (RouterServer(shared.model_copy(update={"shares_ports": each})) for each in (True, False))
    await sharing.start()
    try:
        with pytest.raises(ConfigError, match="cannot listen"):
            await alone.start()
        with pytest.raises(ConfigError, match="free it or choose another with --http-port"):
            resolve_ports(ServeConfig(model="m", http_port=shared.http_port, grpc_port=0, admin_port=0))
    finally:
        await sharing.stop()
