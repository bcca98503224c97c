"""Kills and freezes real processes under real streams: the client gets exactly the tokens of an undisturbed run.

One router, two prefill and two decode workers run as plain processes, with the bundled model in bf16. Long prompts in
tiny chunks make prefills slow, so that a kill hits a running one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.generate import generate
from penstock import AsyncClient
from penstock.config import EngineConfig, WorkerConfig
from penstock.errors import DeadlineExceeded, PenstockError
from penstock.rpc.server import make_channel
from penstock.types import Role, SamplingParams
from penstock.v1 import worker_pb2, worker_pb2_grpc
from tests.support.mended_fleet import MendedFleet
from tests.support.plain_processes import Deployment, Process
from tests.support.serving import worker_config

pytestmark = pytest.mark.processes

MODEL = Path(__file__).resolve().parents[2] / "models" / "penstock-tiny"
PROMPT = [(7 * i) % 900 + 20 for i in range(600)]
MAX_TOKENS = 240  # tokens: so many that a busy client has not read the last one when its test acts
TIMEOUT_S = 60.0
_NUMBERS = itertools.count()
SEEDED = {"temperature": 0.875, "top_p": 0.9375, "seed": 11, "ignore_eos": True}  # exact in single precision
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def config(role: Role, number: int) -> WorkerConfig:
    return worker_config(
        role,
        MODEL,
        f"{role.value}-{number}",
        engine={"num_pages": 512, "dtype": "bfloat16"},
        prefill={"max_batch_tokens": 4},  # 150 steps for the long prompt
        transfer={"timeout_s": 5.0},
    )


class Fleet(MendedFleet):
    """Runs two prefill and two decode workers."""

    @property
    def prefill(self) -> list[Process]:
        return self.workers[:2]

    @property
    def decode(self) -> list[Process]:
        return self.workers[2:]


@pytest.fixture(scope="module")
def shared_fleet() -> Iterator[Fleet]:
    with Deployment() as deployment:
        yield Fleet(deployment, [config(role, number) for role in Role for number in range(2)])


@pytest.fixture
def fleet(shared_fleet: Fleet) -> Fleet:
    """Returns the fleet with every process alive."""
    shared_fleet.mend()
    return shared_fleet


class Undisturbed:
    """Returns the answers of a single process to a prompt that no other test has sent and no worker has cached."""

    def __init__(self, engine: Engine, number: int) -> None:
        self.prompt = [20 + number, *PROMPT[1:]]
        self._engine = engine

    def __getitem__(self, how: str) -> list[int]:
        greedy = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
        seeded = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.875, top_p=0.9375, seed=11, ignore_eos=True)
        return generate(self._engine, self.prompt, {"greedy": greedy, "seeded": seeded}[how])


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(EngineConfig(model=str(MODEL), num_pages=256, num_threads=1, dtype="bfloat16"))


@pytest.fixture
def undisturbed(engine: Engine) -> Undisturbed:
    return Undisturbed(engine, next(_NUMBERS))


@contextlib.asynccontextmanager
async def client(process: Process) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(process.address, timeout_s=TIMEOUT_S) as made:
        yield made


async def load_of(process: Process) -> worker_pb2.Load:
    """Returns the worker's present load."""
    async with make_channel(process.address) as channel:
        call = worker_pb2_grpc.WorkerStub(channel).WatchEvents(worker_pb2.WatchEventsRequest(), timeout=TIMEOUT_S)
        batch = await call.read()
        call.cancel()
        return batch.load


async def wait_until_empty(processes: list[Process], timeout_s: float = TIMEOUT_S) -> None:
    deadline_s = time.monotonic() + timeout_s
    for process in processes:
        while (load := await load_of(process)).free_pages < load.total_pages or load.num_running or load.num_waiting:
            assert time.monotonic() < deadline_s, f"{process.ready['worker_id']} still holds: {load}"
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def busy_worker(processes: list[Process]) -> AsyncIterator[Awaitable[Process]]:
    """Yields a future of the first process that reports work. Begins once all processes are watched, so that a request
    sent within the block is seen however soon it ends.
    """
    found: asyncio.Future[Process] = asyncio.get_running_loop().create_future()
    async with contextlib.AsyncExitStack() as stack:
        watchers = []
        for process in processes:
            channel = await stack.enter_async_context(make_channel(process.address))
            call = worker_pb2_grpc.WorkerStub(channel).WatchEvents(worker_pb2.WatchEventsRequest(), timeout=TIMEOUT_S)
            batches = aiter(call)
            await anext(batches)
            watchers.append(asyncio.create_task(_report_work(process, batches, found)))
        try:
            yield found
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)


async def _report_work(
    process: Process, batches: AsyncIterator[worker_pb2.EventBatch], found: asyncio.Future[Process]
) -> None:
    async for batch in batches:
        if batch.load.num_running and not found.done():
            found.set_result(process)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_prefill_worker_lost_during_a_prefill_loses_no_token(
    fleet: Fleet, undisturbed: Undisturbed, number: signal.Signals
) -> None:
    async with client(fleet.router) as router:
        async with busy_worker(fleet.prefill) as busy:
            answer = asyncio.create_task(router.complete(undisturbed.prompt, max_tokens=MAX_TOKENS, **SEEDED))
            victim = await asyncio.wait_for(busy, TIMEOUT_S)
            victim.signal(number)
        result = await answer
        assert list(result.token_ids) == undisturbed["seeded"]
        victim.signal(signal.SIGKILL)
        survivors = [process for process in fleet.prefill if process is not victim]
        # Once the dead worker's death is known, the fence is lifted from pages that it might have written.
        await wait_until_empty([*survivors, *fleet.decode])
        again = await router.complete(undisturbed.prompt, max_tokens=40, **GREEDY)
        assert list(again.token_ids) == undisturbed["greedy"][:40]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_decode_worker_lost_during_a_stream_loses_no_token(
    fleet: Fleet, undisturbed: Undisturbed, number: signal.Signals
) -> None:
    async with client(fleet.router) as router:
        tokens: list[int] = []
        victim = None
        async with busy_worker(fleet.decode) as busy:
            async for chunk in router.generate(undisturbed.prompt, max_tokens=MAX_TOKENS, **SEEDED):
                tokens += chunk.token_ids
                if victim is None and len(tokens) > 10:
                    victim = await asyncio.wait_for(busy, TIMEOUT_S)
                    victim.signal(number)
        assert tokens == undisturbed["seeded"]
        assert victim is not None
        survivors = [process for process in fleet.decode if process is not victim]
        await wait_until_empty([*fleet.prefill, *survivors])


async def test_the_service_outlives_its_whole_prefill_pool(fleet: Fleet, undisturbed: Undisturbed) -> None:
    for process in fleet.prefill:
        process.kill()
    async with client(fleet.router) as router:
        result = await router.complete(undisturbed.prompt, max_tokens=MAX_TOKENS, **GREEDY)
        assert list(result.token_ids) == undisturbed["greedy"]


async def test_a_request_cancelled_in_any_phase_frees_its_pages(fleet: Fleet) -> None:
    """Cancels requests while queued, prefilling, transferring and decoding: every page is freed and no request
    completes."""
    everyone = [*fleet.prefill, *fleet.decode]
    before = [(await load_of(process)).requests.ended for process in fleet.decode]
    async with client(fleet.router) as router:
        for delay_s in (0.0, 0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3):
            streams = [router.generate(PROMPT, max_tokens=1400, **GREEDY) for _ in range(3)]
            readers = [asyncio.create_task(anext(stream)) for stream in streams]
            await asyncio.sleep(delay_s)
            for stream in streams:
                stream.close()
            await asyncio.gather(*readers, return_exceptions=True)
            await wait_until_empty(everyone)
            assert [(await load_of(process)).requests.ended for process in fleet.decode] == before


async def test_the_requests_deadline_bounds_every_leg(fleet: Fleet) -> None:
    async with client(fleet.router) as router:
        for process in fleet.decode:
            process.signal(signal.SIGSTOP)
        async with asyncio.timeout(TIMEOUT_S):
            with pytest.raises(PenstockError) as caught:
                await router.complete(PROMPT, max_tokens=MAX_TOKENS, timeout_s=1.5, **GREEDY)
        assert isinstance(caught.value, DeadlineExceeded)
        for process in fleet.decode:
            process.signal(signal.SIGCONT)


async def test_a_router_killed_under_load_loses_no_request_and_no_token(fleet: Fleet, undisturbed: Undisturbed) -> None:
    spare = fleet.start_router()
    async with AsyncClient([fleet.router.address, spare.address], timeout_s=TIMEOUT_S) as routers:
        streaming = asyncio.Event()

        async def read(number: int) -> list[int]:
            tokens: list[int] = []
            options = SEEDED if number % 2 else GREEDY
            async for chunk in routers.generate(undisturbed.prompt, max_tokens=MAX_TOKENS, **options):
                tokens += chunk.token_ids
                if len(tokens) > 20:
                    streaming.set()
            return tokens

        readers = [asyncio.create_task(read(number)) for number in range(2)]
        async with asyncio.timeout(TIMEOUT_S):
            await streaming.wait()
        fleet.router.kill()
        for number, tokens in enumerate(await asyncio.gather(*readers)):
            assert tokens == undisturbed["seeded" if number % 2 else "greedy"]
    await wait_until_empty([*fleet.prefill, *fleet.decode])
