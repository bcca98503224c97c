"""Runs faults, slow readers, bad input and cancellations at once for half an hour; nothing may grow (`make soak`).

The time is divided into rounds. After each, all traffic stops. Once every request has ended, the memory, files,
threads, tasks and shared-memory segments of the processes that were never killed are read, and so are the counts that
must be 0: pages held or fenced, and open requests. Answers are compared token by token throughout. Ends with status 1
if something has grown, an answer was wrong, or too many requests failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.attack.attacks import messages
from benchmarks.attack.attacks.readers import slow_readers_grpc, slow_readers_http
from benchmarks.attack.growth import Readings, find_growth
from benchmarks.attack.sockets import http_request, post
from benchmarks.attack.target import OUT, AttackTarget, attacked_deployment, becomes, call_code, channel
from benchmarks.attack.verdict import Breach
from benchmarks.common.report import Row, publish
from penstock import AsyncClient
from penstock.errors import PenstockError

_NUM_STEADY, _NUM_LEAVERS = 3, 2
_MAX_TOKENS = 120
_PROMPTS = [f"Once upon a time there were {number} children who lived by a river. " * number for number in range(1, 9)]
_FAULT_EVERY_S = 20.0
_FREEZE_S = 1.5
_POOL_BYTES = 32 << 20  # every page is touched in the first round, so that pools do not look like growth
_QUIET_WITHIN_S = 90.0
_KILLED = ("decode-1", "prefill-0")  # the others are never killed, so that growth shows
_MOST_FAILED = 0.02  # share of the steady requests; those in flight at a killed worker continue at another


@dataclass
class SoakCounts:
    """Counts of events by name, and the problems found."""

    happened: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class Soak:
    """Runs rounds of load and faults against one deployment."""

    def __init__(self, target: AttackTarget, seed: int) -> None:
        self._target = target
        self._rng = random.Random(seed)
        self._expected: dict[int, list[int]] = {}
        self.counts = SoakCounts()

    async def round(self, seconds: float) -> Readings:
        """Runs load and faults for that long, waits until every request has ended, and returns the readings."""
        end_s = time.monotonic() + seconds
        key = self._target.credentials.victim_key
        async with AsyncClient(self._target.grpc, timeout_s=60.0, api_key=key) as client:
            if not self._expected:
                for number in range(len(_PROMPTS)):
                    self._expected[number] = await self._answer(client, number)
            steady = [self._steady(client) for _ in range(_NUM_STEADY)]
            leaving = [self._leave(client) for _ in range(_NUM_LEAVERS)]
            others = [self._read_slowly(), self._send_garbage(), self._strike()]
            await asyncio.gather(*(self._until(end_s, each) for each in (*steady, *leaving, *others)))
        return await self._quiet_readings()

    async def _until(self, end_s: float, work: Awaitable[None]) -> None:
        """Ends the work, which never ends by itself, at that time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, end_s - time.monotonic())):
                await work

    async def _answer(self, client: AsyncClient, number: int) -> list[int]:
        result = await client.complete(_PROMPTS[number], max_tokens=_MAX_TOKENS, temperature=0.0, ignore_eos=True)
        return list(result.token_ids)

    async def _steady(self, client: AsyncClient) -> None:
        while True:
            number = self._rng.randrange(len(_PROMPTS))
            try:
                answer = await self._answer(client, number)
            except PenstockError as error:
                self.counts.happened["failed answers"] += 1
                self.counts.happened[f"failed: {type(error).__name__}"] += 1
                await asyncio.sleep(0.2)
                continue
            self.counts.happened["answers"] += 1
            if answer != self._expected[number]:
                self.counts.problems.append(f"answer {number} has other tokens than at first")

    async def _leave(self, client: AsyncClient) -> None:
        while True:
            stream = client.generate(self._rng.choice(_PROMPTS), max_tokens=800, ignore_eos=True)
            with contextlib.suppress(PenstockError, TimeoutError, StopAsyncIteration):
                async with asyncio.timeout(self._rng.random()):
                    for _ in range(self._rng.randrange(40)):
                        await anext(stream)
            stream.close()
            self.counts.happened["clients that left"] += 1

    async def _read_slowly(self) -> None:
        while True:
            attack = self._rng.choice((slow_readers_http, slow_readers_grpc))
            # A breach says nothing here, since other clients hold requests at the same time.
            with contextlib.suppress(Breach, OSError, RuntimeError, grpc.aio.AioRpcError):
                await attack(self._target)
            self.counts.happened["waves of slow readers"] += 1

    async def _send_garbage(self) -> None:
        bodies = (b'{"prompt":[' + b"{}," * 50_000, b"\xff" * 100_000, b'{"prompt":"x","stop":' + b"[" * 1000)
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                async with channel(self._target.grpc) as made:
                    data = self._rng.randbytes(self._rng.randrange(100_000))
                    await call_code(made, messages.GENERATE, data, self._target.key, timeout_s=5.0)
                head = post("/v1/completions", self._target.key)
                await http_request(self._target.http, head, self._rng.choice(bodies), timeout_s=5.0)
            self.counts.happened["bad messages"] += 2
            await asyncio.sleep(0.1)

    async def _strike(self) -> None:
        while True:
            await asyncio.sleep(self._rng.uniform(0.5, 1.5) * _FAULT_EVERY_S)
            name = self._rng.choice(_KILLED)
            with contextlib.suppress(ProcessLookupError, KeyError, grpc.aio.AioRpcError):
                pid = (await self._target.pids())[name]
                if self._rng.random() < 0.5:
                    os.kill(pid, signal.SIGKILL)
                    self.counts.happened["workers killed"] += 1
                else:
                    os.kill(pid, signal.SIGSTOP)
                    try:
                        await asyncio.sleep(_FREEZE_S)
                    finally:
                        os.kill(pid, signal.SIGCONT)
                    self.counts.happened["workers frozen"] += 1

    async def _quiet_readings(self) -> Readings:
        """Returns the readings once nothing is held, or after `_QUIET_WITHIN_S`."""
        await becomes(self._is_quiet, _QUIET_WITHIN_S)
        await asyncio.sleep(5.0)  # connections and tasks of the last clients end
        return await read_all(self._target)

    async def _is_quiet(self) -> bool:
        readings = await held(self._target)
        status = await self._target.status()
        return status.ready and all(each.state == "ready" for each in status.workers) and not any(readings.values())


async def held(target: AttackTarget) -> dict[str, float]:
    """Returns the counts that must be 0 once all requests are over."""
    found = {"router-0 requests": await target.metric(OUT)}
    for each in (await target.status()).workers:
        if each.member.role in ("prefill", "decode"):
            name = each.member.worker_id
            found[f"{name} pages"] = float(each.load.total_pages - each.load.free_pages)
            found[f"{name} requests"] = float(each.load.num_open)
    return found


async def read_all(target: AttackTarget) -> Readings:
    found = await held(target)
    found["router-0 tasks"] = await target.metric("penstock:router_tasks")
    for name, process in (await lasting_processes(target)).items():
        memory = process.memory_info()
        found[f"{name} memory"] = float(memory.rss - memory.shared)
        found[f"{name} shared"] = float(memory.shared)
        found[f"{name} files"] = float(process.num_fds())
        found[f"{name} threads"] = float(process.num_threads())
        found[f"{name} segments"] = float(num_segments(process))
    return found


async def lasting_processes(target: AttackTarget) -> dict[str, psutil.Process]:
    """Returns the processes that are never killed, by name."""
    found = {name: psutil.Process(pid) for name, pid in (await target.pids()).items() if name not in _KILLED}
    for process in target.processes():
        with contextlib.suppress(psutil.Error):
            if process.name() in ("gcs_server", "raylet"):
                found[process.name()] = process
            elif target.admin in target.listening(process.pid):
                found["controller"] = process
    found["serve"] = psutil.Process(target.serve_pid)
    return found


def num_segments(process: psutil.Process) -> int:
    """Counts the segments of shared memory that a process has mapped: page pools and weights, also those of peers."""
    return sum(each.path.startswith("/memfd:") for each in process.memory_maps())


async def run_rounds(soak: Soak, minutes: float, num_rounds: int, report: Callable[[str], None]) -> list[Readings]:
    quiet = []
    for number in range(num_rounds):
        quiet.append(await soak.round(60.0 * minutes / num_rounds))
        report(f"round {number + 1} of {num_rounds}: {dict(soak.counts.happened)}")
    return quiet


def verdict(soak_counts: SoakCounts, quiet: list[Readings]) -> list[str]:
    """Lists why the soak has failed; empty if it has not."""
    found = [*soak_counts.problems[:10], *find_growth(quiet)]
    failed, served = soak_counts.happened["failed answers"], soak_counts.happened["answers"]
    if failed > _MOST_FAILED * (served + failed):
        found.append(f"{failed} of {served + failed} steady requests failed")
    return found


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attack.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=8, help="quiet moments in which everything is read")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    changes = {
        "decode_pool": {"replicas": 2, "num_cpus": 0.1},
        "engine": {"kv_memory_bytes": _POOL_BYTES, "num_threads": 1},
    }
    with attacked_deployment(changes) as target:
        soak = Soak(target, arguments.seed)
        quiet = asyncio.run(run_rounds(soak, arguments.minutes, arguments.rounds, lambda line: print(line, flush=True)))
    _show(quiet)
    faults = verdict(soak.counts, quiet)
    print("\n".join(faults) if faults else "nothing grew, and no answer was wrong")
    rows = [Row(name, value, "at the end", "second round", quiet[1].get(name)) for name, value in quiet[-1].items()]
    rows += [Row(name, float(count), "in all") for name, count in soak.counts.happened.items()]
    publish("soak", f"{arguments.minutes:g} minutes, {arguments.rounds} rounds, bundled model", rows, quiet=True)
    return 1 if faults else 0


def _show(quiet: list[Readings]) -> None:
    table = Table("reading", *(f"round {number + 1}" for number in range(len(quiet))))
    for name in sorted({name for readings in quiet for name in readings}):
        unit = 1 << 20 if name.endswith(("memory", "shared")) else 1
        table.add_row(name, *(f"{readings[name] / unit:.0f}" if name in readings else "-" for readings in quiet))
    Console(width=170).print(table)


if __name__ == "__main__":
    sys.exit(main())
