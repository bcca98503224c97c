"""Tests signals to processes: SIGTERM lets running requests finish, SIGINT ends at once; live differs from ready."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.cli import main
from cluster.cli.commands.running import serve
from penstock.client.async_client import AsyncClient
from penstock.client.results import GenerateResult
from penstock.client.retry import RetryPolicy
from penstock.config import RouterConfig, ServeConfig
from penstock.errors import Unavailable
from penstock.rpc.server import LIVE, make_channel
from penstock.types import Role
from penstock.v1 import admin_pb2, worker_pb2, worker_pb2_grpc
from tests.cluster.lifecycle.test_flips import config as flips_config
from tests.support.hosted import hosted
from tests.support.plain_processes import Deployment, Process
from tests.support.prefork.module_process import start_module
from tests.support.serving import worker_config
from tests.system.test_faults import MODEL, TIMEOUT_S, client, load_of

pytestmark = pytest.mark.processes

PROMPT = [(7 * i) % 900 + 20 for i in range(60)]
ENGINE = {"num_pages": 256, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with Deployment() as made:
        yield made


def start_workers(deployment: Deployment, *names: str) -> list[Process]:
    local = {"placement": "local"}
    return deployment.start_workers(
        [worker_config(Role.DECODE, MODEL, name, engine=ENGINE, decode=local) for name in names]
    )


def start_router(deployment: Deployment, *workers: Process) -> Process:
    addresses = tuple(each.address for each in workers)
    config = RouterConfig(model=str(MODEL), grpc_port=0, http_port=0, workers=addresses, policy="round-robin")
    return deployment.start_router(config)


async def ask(router: Process, max_tokens: int = 200) -> GenerateResult:
    async with client(router) as made:
        return await made.complete(PROMPT, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


async def served_by(router: Process) -> str:
    return (await ask(router, max_tokens=2)).timing.decode_worker


async def until_busy(worker: Process, num_running: int = 1) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while (await load_of(worker)).num_running < num_running:  # noqa: ASYNC110 - the worker is asked
            await asyncio.sleep(0.01)


async def health(address: str, name: str) -> int:
    async with make_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=name), timeout=60
        )
        return int(answer.status)


SERVING = health_pb2.HealthCheckResponse.SERVING


async def test_a_worker_that_gets_sigterm_finishes_its_requests_and_is_live_but_not_ready(
    deployment: Deployment,
) -> None:
    leaving, staying = start_workers(deployment, "leaving", "staying")
    router = start_router(deployment, leaving, staying)
    async with asyncio.timeout(TIMEOUT_S):
        while await served_by(router) == await served_by(router):  # until the router knows both
            continue
    held = [asyncio.create_task(ask(router, max_tokens=500)) for _ in range(4)]
    for worker in (leaving, staying):
        await until_busy(worker)
    leaving.signal(signal.SIGTERM)
    async with asyncio.timeout(TIMEOUT_S):
        while await health(leaving.address, "") == SERVING:  # noqa: ASYNC110 - the worker is asked
            await asyncio.sleep(0.01)
    assert await health(leaving.address, LIVE) == SERVING
    assert (await load_of(leaving)).leaving
    in_a_row = 0
    async with asyncio.timeout(TIMEOUT_S):
        while in_a_row < 6:  # once the router knows, it chooses the other worker
            in_a_row = in_a_row + 1 if await served_by(router) == "staying" else 0
    results = [await each for each in held]
    assert {result.timing.decode_worker for result in results} == {"leaving", "staying"}
    assert [(len(each.token_ids), each.timing.num_redispatches) for each in results] == [(500, 0)] * 4
    assert await asyncio.to_thread(leaving.popen.wait, TIMEOUT_S) == 0
    for process in (router, staying):
        process.signal(signal.SIGINT)  # at once
        assert await asyncio.to_thread(process.popen.wait, TIMEOUT_S) == 0


async def test_a_router_that_gets_sigterm_refuses_new_requests_and_finishes_its_streams(deployment: Deployment) -> None:
    (worker,) = start_workers(deployment, "decode-0")
    router = start_router(deployment, worker)
    async with httpx.AsyncClient(base_url=f"http://{router.http}", timeout=60) as http:
        assert (await http.get("/health/live")).status_code == (await http.get("/health/ready")).status_code == 200
        body = {"model": "penstock-tiny", "prompt": "Once", "max_tokens": 500, "ignore_eos": True, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body, timeout=TIMEOUT_S) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            asking = asyncio.create_task(ask(router, max_tokens=500))
            await until_busy(worker, num_running=2)
            router.signal(signal.SIGTERM)
            assert [line async for line in lines if line][-1] == "data: [DONE]"
    assert len((await asking).token_ids) == 500
    assert await asyncio.to_thread(router.popen.wait, TIMEOUT_S) == 0
    async with AsyncClient(router.address, retry=RetryPolicy(max_attempts=1)) as impatient:
        with pytest.raises(Unavailable):
            await impatient.complete(PROMPT, max_tokens=2)
    worker.signal(signal.SIGTERM)  # an idle router has no reason to wait
    assert await asyncio.to_thread(worker.popen.wait, TIMEOUT_S) == 0


async def test_a_plain_process_flips_its_role(deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("host") / "worker.json"
    path.write_text(worker_config(Role.PREFILL, MODEL, "prefill-0", engine=ENGINE).model_dump_json())
    log = path.with_suffix(".log")
    with log.open("wb") as stderr:
        process = start_module("cluster.local.worker", ["--config", str(path)], stderr)
    try:
        ready = json.loads(await asyncio.to_thread(process.stdout.readline))
        assert ready["role"] == "prefill"
        async with make_channel(ready["host"]) as channel:
            host = worker_pb2_grpc.WorkerHostStub(channel)
            flipped = await host.Flip(
                worker_pb2.HostFlipRequest(worker_id="decode-0", role="decode"), timeout=TIMEOUT_S
            )
            with pytest.raises(grpc.aio.AioRpcError, match="give prefill or decode"):
                await host.Flip(worker_pb2.HostFlipRequest(worker_id="decode-0", role="router"), timeout=TIMEOUT_S)
        assert flipped.epoch != ready["epoch"]
        worker = Process(process, {"address": flipped.address}, log)
        result = await ask(start_router(deployment, worker), max_tokens=5)
        assert result.timing.decode_worker == "decode-0"
    finally:
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, TIMEOUT_S) == 0
        process.stdout.close()


async def test_a_stopping_deployment_refuses_new_requests_and_finishes_its_streams() -> None:
    """Stops a deployment as `penstock serve` does on SIGTERM."""
    async with hosted(flips_config(prefill=0, decode=1)) as deployment, AsyncClient(deployment.grpc) as each:
        stream = each.generate(PROMPT, max_tokens=400, temperature=0.0, ignore_eos=True, timeout_s=TIMEOUT_S)
        num_tokens = len((await anext(stream)).token_ids)
        stopping = asyncio.create_task(deployment.controller.stop(grace_s=TIMEOUT_S))
        async for chunk in stream:
            num_tokens += len(chunk.token_ids)
        assert num_tokens == 400
        await stopping
    assert deployment.pinned == [0]


class Served:
    """Stands in for the deployment of `penstock serve`; it gets a signal while it waits."""

    def __init__(self, config: ServeConfig, number: signal.Signals) -> None:
        self.config = config
        self.http_address = self.grpc_address = self.admin_address = "127.0.0.1:1"
        self.graces_s: list[float] = []
        self._number = number

    def status(self) -> admin_pb2.StatusResponse:
        return admin_pb2.StatusResponse()

    def wait_until_stopped(self, on_status: object) -> None:
        signal.raise_signal(self._number)

    def stop(self, grace_s: float = 0.0) -> None:
        self.graces_s.append(grace_s)


@pytest.mark.parametrize(("number", "grace_s"), [(signal.SIGTERM, 12.0), (signal.SIGINT, 0.0)])
def test_serve_gives_streams_their_time_on_sigterm_and_none_on_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals, grace_s: float
) -> None:
    served: list[Served] = []

    def launch(config: ServeConfig, on_status: object, *, attach: bool) -> Served:
        served.append(Served(config, number))
        return served[0]

    path = tmp_path / "serve.toml"
    path.write_text("drain_s = 12.0\n")
    monkeypatch.setattr(serve, "_import_launch", lambda: (launch, Unavailable))
    before = signal.signal(signal.SIGINT, signal.default_int_handler), signal.getsignal(signal.SIGTERM)
    try:
        assert main.main(["serve", "--model", str(MODEL), "--config", str(path)]) == 0
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])
    assert served[0].graces_s == [grace_s]
