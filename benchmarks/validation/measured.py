"""Runs requests on a real deployment of plain processes, as a client sees it, and records what steps took."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import grpc.aio

from benchmarks.common.report import hardware, today, versions
from benchmarks.validation.cpu_clocks import CpuTimes, cpu_seconds
from benchmarks.validation.runs import (
    DISTURBED,
    MODEL,
    NUM_PAGES,
    REFERENCES,
    Fault,
    Latencies,
    Measurement,
    PlannedRun,
    deployments,
    num_threads,
)
from benchmarks.validation.workloads import spell_prompt
from penstock import AsyncClient, wire
from penstock.client.results import Timing
from penstock.config import EngineConfig, RouterConfig, WorkerConfig
from penstock.errors import PenstockError
from penstock.types import Role
from penstock.v1 import worker_pb2, worker_pb2_grpc
from simulator.costs.records import StepRecord, StepRecorder
from simulator.request import TraceRequest
from tests.support.plain_processes import Deployment, Process

_VOCAB_SIZE = 2048
_TIMEOUT_S = 60.0
_WATCH_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class RealSystem:
    """A running deployment."""

    router: Process
    workers: dict[str, Process]
    roles: dict[str, Role]

    def pids(self) -> dict[str, int]:
        """Returns the processes of the benchmark, by name; the load generator is "client"."""
        pids = {"client": os.getpid(), "router": self.router.popen.pid}
        return pids | {name: process.popen.pid for name, process in self.workers.items()}


@contextmanager
def real_system(num_prefill: int, num_decode: int) -> Iterator[RealSystem]:
    """Yields a deployment with a thread for each worker, or two for the only one."""
    roles = {f"prefill-{number}": Role.PREFILL for number in range(num_prefill)}
    roles |= {f"decode-{number}": Role.DECODE for number in range(num_decode)}
    engine = {"model": str(MODEL), "num_threads": num_threads(len(roles)), "num_pages": NUM_PAGES}
    configs = [
        WorkerConfig(worker_id=name, role=role, engine=EngineConfig.model_validate(engine))
        for name, role in roles.items()
    ]
    with Deployment() as deployment:
        started = deployment.start_workers(configs)
        addresses = tuple(process.address for process in started)
        router = deployment.start_router(
            RouterConfig(model=str(MODEL), served_model="m", grpc_port=0, http_port=0, workers=addresses)
        )
        yield RealSystem(router, dict(zip(roles, started, strict=True)), roles)


async def measure_shape(shape: str, round: int, seconds: float, max_repeats: int) -> Measurement:
    """Measures every run of a shape, and records the steps of each. Repeats at most `max_repeats` runs that other
    programs disturb, and keeps the least disturbed try.
    """
    num_repeats = 0
    runs: dict[str, Latencies] = {}
    records: dict[str, list[StepRecord]] = {}
    for sizes, planned in deployments(shape, seconds, round):
        with real_system(*sizes) as system:
            for run in planned:
                tries = [await _try(system, run, f"{shape} {round} {run.name}")]
                while tries[-1].others_share > DISTURBED and num_repeats < max_repeats and not run.fault:
                    num_repeats += 1
                    tries.append(await _try(system, run, f"{shape} {round} {run.name} {num_repeats}"))
                best = min(tries, key=lambda one: one.others_share)
                best.found.cpu_s = best.cpu_s
                if run.fault is None or run.fault.stall_s is not None:  # the times of a killed worker are lost
                    best.found.others_share = best.others_share
                runs[run.name], records[run.name] = best.found, best.records
    machine = {"date": today(), "hardware": hardware(), "versions": versions()}
    return Measurement(shape, round, seconds, machine, records, runs)


@dataclass(frozen=True, slots=True)
class _Try:
    found: Latencies
    records: list[StepRecord]
    others_share: float
    cpu_s: dict[str, float]


async def _try(system: RealSystem, run: PlannedRun, salt: str) -> _Try:
    before = CpuTimes.now(system.pids())
    async with _recording(system) as recorder:
        found = await measure(system, run, salt)
    after = CpuTimes.now(system.pids())
    return _Try(found, recorder.records, after.others_share(before), after.seconds_since(before))


async def measure(system: RealSystem, run: PlannedRun, salt: str) -> Latencies:
    """Sends the requests at their times. `salt` makes the prompts of each run different.

    In a run of requests that are alone, also reads the processor time of each process at its first and last token.
    """
    found, pids = Latencies(), system.pids() if run.name.startswith(REFERENCES) else {}
    prompts = {request.number: spell_prompt(request, _VOCAB_SIZE, salt) for request in run.requests}
    async with AsyncClient(system.router.address, timeout_s=_TIMEOUT_S) as client:
        started_s = time.perf_counter()

        async def send(request: TraceRequest) -> None:
            await asyncio.sleep(max(0.0, started_s + request.arrival_s - time.perf_counter()))
            sent_s, first_s, last_s, num_tokens = time.perf_counter(), 0.0, 0.0, 0
            cpu_s = [cpu_seconds(pids)]
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
                        cpu_s = [*cpu_s[:2], cpu_seconds(pids)] if pids else cpu_s
                    if chunk.timing is not None:
                        _note_place(found, chunk.timing)
            except PenstockError:
                found.num_failed += 1
                return
            found.ttft_s.append(first_s - sent_s)
            found.num_tokens += num_tokens
            if num_tokens > 1:
                found.itl_s.append((last_s - first_s) / (num_tokens - 1))
                if len(cpu_s) == 3:
                    found.note_cpu(cpu_s, num_tokens - 1)

        acting = asyncio.create_task(_break(system, run.fault)) if run.fault else None
        await asyncio.gather(*map(send, run.requests))
        found.elapsed_s = time.perf_counter() - started_s
        if acting is not None:
            acting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await acting
    return found


def _note_place(found: Latencies, timing: Timing) -> None:
    place = timing.prices[0].place if timing.prices else "local"
    found.num_elsewhere += place != "local"
    if place == "remote" and not timing.num_redispatches:
        found.hops_s.append((timing.decode_first_token_ms - timing.queue_ms - timing.prefill_ms) / 1e3)


async def _break(system: RealSystem, fault: Fault) -> None:
    worker = system.workers[fault.worker]
    await asyncio.sleep(fault.at_s)
    if fault.stall_s is None:
        worker.popen.kill()
        return
    worker.signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(fault.stall_s)
    finally:
        worker.signal(signal.SIGCONT)


@asynccontextmanager
async def _recording(system: RealSystem) -> AsyncIterator[StepRecorder]:
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
            recorder.observe(name, role, wire.load_from_wire(batch.load), time.perf_counter())
