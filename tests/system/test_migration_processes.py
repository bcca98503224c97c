"""Migrates running sequences between real processes under a real router, while workers freeze or die."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator

import grpc
import pytest

from engine.engine import Engine
from engine.generate import generate
from penstock.client.results import Timing
from penstock.config import EngineConfig
from penstock.rpc.server import make_channel
from penstock.types import Role, SamplingParams
from penstock.v1 import worker_pb2, worker_pb2_grpc
from tests.support.mended_fleet import MendedFleet
from tests.support.plain_processes import Deployment, Process
from tests.support.serving import worker_config
from tests.system.test_faults import GREEDY, MODEL, SEEDED, TIMEOUT_S, client, load_of, wait_until_empty

pytestmark = pytest.mark.processes

PROMPT = [(7 * i) % 900 + 20 for i in range(200)]
MAX_TOKENS = 280
LEASE_S = 5.0


@pytest.fixture(scope="module")
def shared_fleet() -> Iterator[MendedFleet]:
    engine = {"num_pages": 256, "dtype": "float32"}
    configs = [
        worker_config(Role.DECODE, MODEL, f"decode-{number}", engine=engine, transfer={"timeout_s": 5.0})
        for number in range(2)
    ]
    with Deployment() as deployment:
        yield MendedFleet(deployment, configs)


@pytest.fixture
def processes(shared_fleet: MendedFleet) -> tuple[Process, list[Process]]:
    """Returns a router and two decode workers that prefill locally."""
    shared_fleet.mend()
    return shared_fleet.router, shared_fleet.workers


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[int]]:
    engine = Engine.load(EngineConfig(model=str(MODEL), num_pages=256, num_threads=1, dtype="float32"))
    greedy = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    seeded = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.875, top_p=0.9375, seed=11, ignore_eos=True)
    return {"greedy": generate(engine, PROMPT, greedy), "seeded": generate(engine, PROMPT, seeded)}


async def describe(process: Process) -> worker_pb2.WorkerDescription:
    async with make_channel(process.address) as channel:
        return await worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest(), timeout=TIMEOUT_S)


async def migrate(source: Process, target: worker_pb2.WorkerDescription, address: str) -> worker_pb2.MigrateResponse:
    request = worker_pb2.MigrateRequest(worker_id=target.worker_id, epoch=target.epoch, address=address)
    async with make_channel(source.address) as channel:
        return await worker_pb2_grpc.DecodeWorkerStub(channel).Migrate(request, timeout=TIMEOUT_S)


async def busiest(decode: list[Process]) -> tuple[Process, Process]:
    """Returns the worker with the most sequences and the other one, once there are any."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            loads = [(await load_of(process)).num_running for process in decode]
            if any(loads):
                return (decode[0], decode[1]) if loads[0] >= loads[1] else (decode[1], decode[0])


async def answers(router: Process) -> list[tuple[str, list[int], Timing]]:
    async def each(kind: str, params: dict[str, object]) -> tuple[str, list[int], Timing]:
        async with client(router) as made:
            result = await made.complete(PROMPT, max_tokens=MAX_TOKENS, **params)  # type: ignore[arg-type]
            return kind, list(result.token_ids), result.timing

    kinds = [("greedy", GREEDY), ("seeded", SEEDED)] * 2
    return await asyncio.gather(*(each(kind, params) for kind, params in kinds))


async def test_streams_that_migrate_repeatedly_equal_those_of_a_single_process(
    processes: tuple[Process, list[Process]], undisturbed: dict[str, list[int]]
) -> None:
    router, decode = processes
    descriptions = {process.address: await describe(process) for process in decode}
    num_migrations, turn = 0, 0
    timings: list[Timing] = []
    while num_migrations <= 10:
        requests = asyncio.create_task(answers(router))
        await busiest(decode)
        while not requests.done():
            source, target = decode[turn], decode[1 - turn]
            response = await migrate(source, descriptions[target.address], target.address)
            num_migrations += len(response.migrated)
            turn = 1 - turn
        for kind, token_ids, timing in await requests:
            assert token_ids == undisturbed[kind]
            timings.append(timing)
    assert sum(timing.num_migrations for timing in timings) == num_migrations > 10
    assert all(timing.num_redispatches == 0 for timing in timings)
    pauses = [timing.migration_pause_ms / timing.num_migrations for timing in timings if timing.num_migrations]
    print(f"\n{num_migrations} migrations, mean pauses {[f'{ms:.1f}' for ms in pauses]} ms")
    await wait_until_empty(decode)


@pytest.mark.parametrize(
    ("victim", "number"),
    [("target", signal.SIGSTOP), ("target", signal.SIGKILL), ("source", signal.SIGKILL)],
    ids=["target frozen", "target killed", "source killed"],
)
async def test_a_worker_lost_during_a_migration_loses_no_token(
    processes: tuple[Process, list[Process]], undisturbed: dict[str, list[int]], victim: str, number: signal.Signals
) -> None:
    router, decode = processes
    descriptions = {process.address: await describe(process) for process in decode}
    requests = asyncio.create_task(answers(router))
    source, target = await busiest(decode)
    migrating = asyncio.create_task(migrate(source, descriptions[target.address], target.address))
    await asyncio.sleep(random.Random(str(number)).uniform(0.01, 0.03))
    lost, survivor = (target, source) if victim == "target" else (source, target)
    lost.signal(number)
    for kind, token_ids, _ in await requests:
        assert token_ids == undisturbed[kind]
    try:
        await migrating
    except grpc.aio.AioRpcError:
        assert victim == "source"
    if number is signal.SIGSTOP:
        lost.signal(signal.SIGCONT)
        await wait_until_empty([lost])
    await wait_until_empty([survivor])
