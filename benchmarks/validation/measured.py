"""Runs requests on a real deployment of plain processes, as a client sees it, and records what steps took."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from benchmarks.validation.workloads import spell_prompt
from engine.memory.estimates import saturating_tokens
from penstock import AsyncClient, wire
from penstock.config import DecodeConfig, EngineConfig, RouterConfig, WorkerConfig
from penstock.errors import PenstockError
from penstock.types import Role
from penstock.v1 import worker_pb2, worker_pb2_grpc
from simulator.costs.fit import StepRecorder
from simulator.fleet import FleetSpec
from simulator.request import TraceRequest
from tests.support.plain_processes import Deployment, Process

VOCAB_SIZE = 2048
_TIMEOUT_S = 60.0
_WATCH_TIMEOUT_S = 600.0


@dataclass(slots=True)
class Latencies:
    """Latencies as clients saw them, in seconds; `ttft_s` by request."""

    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)  # mean of each request with several tokens
    num_tokens: int = 0
    num_failed: int = 0
    elapsed_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.elapsed_s if self.elapsed_s else 0.0


@dataclass(frozen=True, slots=True)
class RealSystem:
    """A running deployment, and the description of it that the simulator takes."""

    router: Process
    workers: dict[str, Process]
    roles: dict[str, Role]
    spec: FleetSpec


@contextmanager
def real_system(model: Path, num_prefill: int, num_decode: int, pages: int = 4000) -> Iterator[RealSystem]:
    """Yields a deployment with a thread for each worker, or two for the only one."""
    roles = {f"prefill-{number}": Role.PREFILL for number in range(num_prefill)}
    roles |= {f"decode-{number}": Role.DECODE for number in range(num_decode)}
    threads = 2 if len(roles) == 1 else 1
    decode = DecodeConfig()
    configs = [
        WorkerConfig(
            worker_id=name,
            role=role,
            engine=EngineConfig.model_validate({"model": str(model), "num_threads": threads, "num_pages": pages}),
            decode=decode,
        )
        for name, role in roles.items()
    ]
    chunk = saturating_tokens("cpu")
    prefill = configs[0].prefill
    spec = FleetSpec(
        num_prefill,
        num_decode,
        page_size=configs[0].engine.page_size,
        prefill_pages=pages,
        decode_pages=pages,
        prefill=prefill.model_copy(update={"max_batch_tokens": prefill.max_batch_tokens or chunk}),
        decode=decode,
    )
    with Deployment() as deployment:
        started = deployment.start_workers(configs)
        addresses = tuple(process.address for process in started)
        router = deployment.start_router(
            RouterConfig(model=str(model), served_model="m", grpc_port=0, http_port=0, workers=addresses)
        )
        yield RealSystem(router, dict(zip(roles, started, strict=True)), roles, spec)


async def measure(
    system: RealSystem,
    requests: Sequence[TraceRequest],
    salt: str,
    fault: tuple[float, Callable[[], None]] | None = None,
) -> Latencies:
    """Sends the requests at their times. `salt` makes the prompts of each run different; `fault` is a time and an
    action.
    """
    found = Latencies()
    prompts = {request.number: spell_prompt(request, VOCAB_SIZE, salt) for request in requests}
    async with AsyncClient(system.router.address, timeout_s=_TIMEOUT_S) as client:
        started_s = time.perf_counter()

        async def send(request: TraceRequest) -> None:
            await asyncio.sleep(max(0.0, started_s + request.arrival_s - time.perf_counter()))
            sent_s, first_s, last_s, num_tokens = time.perf_counter(), 0.0, 0.0, 0
            try:
                stream = client.generate(
                    prompts[request.number],
                    max_tokens=request.num_output_tokens,
                    temperature=0.0,
                    ignore_eos=True,
                )
                async for chunk in stream:
                    if chunk.token_ids:
                        last_s = time.perf_counter()
                        first_s = first_s or last_s
                        num_tokens += len(chunk.token_ids)
            except PenstockError:
                found.num_failed += 1
                return
            found.ttft_s.append(first_s - sent_s)
            found.num_tokens += num_tokens
            if num_tokens > 1:
                found.itl_s.append((last_s - first_s) / (num_tokens - 1))

        acting = asyncio.create_task(_act(fault)) if fault else None
        await asyncio.gather(*map(send, requests))
        found.elapsed_s = time.perf_counter() - started_s
        if acting is not None:
            acting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await acting
    return found


async def _act(fault: tuple[float, Callable[[], None]]) -> None:
    await asyncio.sleep(fault[0])
    fault[1]()


def freeze(system: RealSystem, name: str) -> None:
    system.workers[name].signal(signal.SIGSTOP)


def thaw(system: RealSystem, name: str) -> None:
    system.workers[name].signal(signal.SIGCONT)


@asynccontextmanager
async def recording(system: RealSystem) -> AsyncIterator[StepRecorder]:
    """Records the load reports of every worker while the block runs."""
    recorder = StepRecorder()
    tasks = [
        asyncio.create_task(_watch(process.address, name, system.roles[name], recorder))
        for name, process in system.workers.items()
    ]
    try:
        yield recorder
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _watch(address: str, name: str, role: Role, recorder: StepRecorder) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        async for batch in stub.WatchEvents(worker_pb2.WatchEventsRequest(), timeout=_WATCH_TIMEOUT_S):
            recorder.observe(name, role, wire.load_from_wire(batch.load))
