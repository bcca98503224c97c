"""Tests lookaside streams while a decode worker or router dies: the tokens equal those of an undisturbed run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from engine.engine import Engine
from engine.generate import generate
from penstock import AsyncClient
from penstock.client.results import Chunk
from penstock.config import EngineConfig, LookasideConfig, RouterConfig
from penstock.config.security import SecurityConfig
from penstock.rpc.secret import PEER, ClusterSecret
from penstock.rpc.server import make_channel
from penstock.types import Role, SamplingParams
from penstock.v1 import worker_pb2, worker_pb2_grpc
from tests.support.plain_processes import Deployment, Process
from tests.support.serving import worker_config
from tests.system.test_faults import MODEL, SEEDED, TIMEOUT_S

pytestmark = pytest.mark.processes

PROMPT = [(7 * i) % 900 + 20 for i in range(200)]
MAX_TOKENS = 500
FIRST = 20  # tokens before something is killed


class Fleet:
    """Starts two routers over two decode workers that prefill locally."""

    def __init__(self, deployment: Deployment, folder: str) -> None:
        secret = f"{folder}/secret"
        with open(secret, "w", opener=_private) as file:
            file.write("s" * 32)
        security = SecurityConfig(secret_file=secret)
        engine = {"num_pages": 256, "dtype": "float32"}
        made = [worker_config(Role.DECODE, MODEL, f"decode-{n}", engine=engine) for n in range(2)]
        changes = {"security": security, "lookaside": LookasideConfig()}
        self.decode = deployment.start_workers([each.model_copy(update=changes) for each in made])
        addresses = tuple(each.address for each in self.decode)
        config = RouterConfig(model=str(MODEL), grpc_port=0, http_port=0, workers=addresses, security=security)
        self.routers = [deployment.start_router(config) for _ in range(2)]

    async def load_of(self, worker: Process) -> worker_pb2.Load:
        token = ClusterSecret("s" * 32).token(PEER)
        async with make_channel(worker.address) as channel:
            call = worker_pb2_grpc.WorkerStub(channel).WatchEvents(
                worker_pb2.WatchEventsRequest(), timeout=60, metadata=(("authorization", f"Bearer {token}"),)
            )
            batch = await call.read()
            call.cancel()
            return batch.load

    async def busy(self) -> Process:
        (found,) = [each for each in self.decode if (await self.load_of(each)).num_open]
        return found


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Shares a fleet between both tests; the first one leaves every process alive."""
    with Deployment() as deployment:
        yield Fleet(deployment, str(tmp_path_factory.mktemp("secret")))


@pytest.fixture(scope="module")
def undisturbed() -> list[int]:
    engine = Engine.load(EngineConfig(model=str(MODEL), num_pages=256, num_threads=1, dtype="float32"))
    sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.875, top_p=0.9375, seed=11, ignore_eos=True)
    return generate(engine, PROMPT, sampling)


async def test_the_stream_of_a_frozen_worker_continues_elsewhere(fleet: Fleet, undisturbed: list[int]) -> None:
    async with AsyncClient(fleet.routers[0].address, timeout_s=TIMEOUT_S, lookaside=True) as client:
        stream = client.generate(PROMPT, max_tokens=MAX_TOKENS, **SEEDED)
        chunks = [await anext(stream), *await read(stream, FIRST)]
        worker = await fleet.busy()
        worker.signal(signal.SIGSTOP)
        async for chunk in stream:
            chunks.append(chunk)
        worker.signal(signal.SIGCONT)
    assert [token for chunk in chunks for token in chunk.token_ids] == undisturbed
    for each in fleet.decode:
        await emptied(fleet, each)


async def test_a_killed_worker_and_a_killed_router_lose_no_token(fleet: Fleet, undisturbed: list[int]) -> None:
    """Kills the router, which the stream does not notice, then the worker, after which the other router takes over."""
    targets = [each.address for each in fleet.routers]
    async with AsyncClient(targets, timeout_s=TIMEOUT_S, lookaside=True) as client:
        stream = client.generate(PROMPT, max_tokens=MAX_TOKENS, **SEEDED)
        chunks = [await anext(stream)]
        fleet.routers[0].kill()
        first_call = stream._call
        chunks += await read(stream, FIRST)
        assert stream._call is first_call
        worker = await fleet.busy()
        worker.kill()
        async for chunk in stream:
            chunks.append(chunk)
        assert stream._call is not first_call
    assert [token for chunk in chunks for token in chunk.token_ids] == undisturbed
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == MAX_TOKENS
    (left,) = [each for each in fleet.decode if each is not worker]
    await emptied(fleet, left)


async def read(stream: object, count: int) -> list[Chunk]:
    chunks: list[Chunk] = []
    with contextlib.suppress(StopAsyncIteration):
        while sum(len(each.token_ids) for each in chunks) < count:
            chunks.append(await anext(stream))  # type: ignore[call-overload]
    return chunks


async def emptied(fleet: Fleet, worker: Process) -> None:
    async with asyncio.timeout(60):
        while True:
            load = await fleet.load_of(worker)
            if load.free_pages == load.total_pages and not load.num_open:
                return
            await asyncio.sleep(0.02)
