"""Flips roles, scales down and restarts workers under load; compares the tokens of all streams (`make bench-flips`).

Plain processes on this machine (initially one router, two prefill and two decode workers, the bundled model) run under
the real controller. The time of a flip runs from the moment the worker is empty until it has answered its first
request, the canary, through the KV path; that of a restart runs from the order until then.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common.report import Row, publish
from benchmarks.common.shapes import BUNDLED
from cluster.lifecycle.flip import FlipStage
from engine.engine import Engine
from engine.generate import generate
from penstock.client.async_client import AsyncClient
from penstock.config import EngineConfig, ServeConfig
from penstock.errors import PenstockError
from penstock.types import Role, SamplingParams
from penstock.v1 import admin_pb2
from tests.support.supervised_processes import PlainDeployment, plain_deployment

ENGINE = {"num_pages": 512, "num_threads": 1, "dtype": "float32"}
PROMPTS = [[(7 * i + 131 * n) % 900 + 20 for i in range(40 + 16 * n)] for n in range(4)]
NUM_TOKENS = 150
SAMPLING: dict[str, Any] = {"temperature": 0.875, "top_p": 0.9375, "ignore_eos": True}


@dataclass
class ClientStreams:
    """Sends requests one after another in each of several tasks and compares the tokens of each answer."""

    expected: list[list[int]]
    stopping: bool = False
    num_ended: int = 0
    num_failed: int = 0
    num_wrong: int = 0
    num_migrations: int = 0
    num_redispatches: int = 0
    errors: list[str] = field(default_factory=list)

    async def run(self, address: str, number: int) -> None:
        async with AsyncClient(address, timeout_s=120) as client:
            while not self.stopping:
                prompt = number % len(PROMPTS)
                number += 1
                try:
                    result = await client.complete(PROMPTS[prompt], max_tokens=NUM_TOKENS, seed=prompt, **SAMPLING)
                except PenstockError as error:
                    self.num_failed += 1
                    self.errors.append(error.message)
                    continue
                self.num_ended += 1
                self.num_wrong += list(result.token_ids) != self.expected[prompt]
                if result.timing is not None:
                    self.num_migrations += result.timing.num_migrations
                    self.num_redispatches += result.timing.num_redispatches


@dataclass
class Changes:
    """Changes a running deployment and records how long each change took."""

    deployment: PlainDeployment
    flips_s: list[float] = field(default_factory=list)
    drains_s: list[float] = field(default_factory=list)  # seconds from the order to the end of the drain
    restarts_s: list[float] = field(default_factory=list)
    num_cut_short: int = 0

    async def flip(self, worker_id: str, role: Role) -> str:
        flip = self.deployment.controller.pool_service.flip(worker_id, role)
        async for progress in flip.follow():
            last = progress
        if last.stage is not FlipStage.READY:
            raise RuntimeError(f"{worker_id} did not flip: {last.detail}")
        self.flips_s.append(last.flip_s)
        self.num_cut_short += last.drain.num_cut_short
        return flip.target.worker_id

    async def flip_to_decode(self) -> None:
        self._flipped = await self.flip("prefill-1", Role.DECODE)

    async def flip_back(self) -> None:
        await self.flip(self._flipped, Role.PREFILL)

    async def scale_down(self) -> None:
        began_s = time.monotonic()
        self.deployment.controller.pool_service.scale("decode", 1)
        await self.deployment.until(lambda status: _ready(status, "decode") == 1)
        self.drains_s.append(time.monotonic() - began_s)
        self.deployment.controller.pool_service.scale("decode", 2)
        await self.deployment.until(lambda status: _ready(status, "decode") == 2)

    async def restart(self) -> None:
        status = self.deployment.controller.status()
        victim = max(
            (each for each in status.workers if each.member.role == "decode"), key=lambda each: each.load.num_open
        )
        began_s = time.monotonic()
        drain = self.deployment.controller.draining.drain(victim.member.worker_id, replaced=True)
        async for progress in drain.follow():
            self.num_cut_short += progress.num_cut_short if progress.stage == "ended" else 0
        self.drains_s.append(time.monotonic() - began_s)
        await self.deployment.until(lambda status: _ready(status, "decode") == 2)
        self.restarts_s.append(time.monotonic() - began_s)


def _ready(status: admin_pb2.StatusResponse, pool: str) -> int:
    """Returns the number of workers of a pool, or -1 while some are not ready."""
    workers = [each for each in status.workers if each.member.role == pool]
    return len(workers) if all(each.state == "ready" for each in workers) else -1


async def measure(num_changes: int, num_streams: int) -> None:
    engine = Engine.load(EngineConfig.model_validate({"model": str(BUNDLED), **ENGINE}))
    expected = [
        generate(engine, prompt, SamplingParams(max_tokens=NUM_TOKENS, seed=number, **SAMPLING))
        for number, prompt in enumerate(PROMPTS)
    ]
    del engine
    config = ServeConfig.model_validate(
        {
            "model": str(BUNDLED),
            "engine": ENGINE,
            "prefill_pool": {"replicas": 2},
            "decode_pool": {"replicas": 2},
            **dict.fromkeys(("grpc_port", "http_port", "admin_port"), 0),
        }
    )
    streams = ClientStreams(expected)
    async with plain_deployment(config) as deployment:
        tasks = [asyncio.create_task(streams.run(deployment.grpc_address, number)) for number in range(num_streams)]
        changes = Changes(deployment)
        turns: list[Callable[[], Awaitable[None]]] = [
            *([changes.flip_to_decode, changes.flip_back] * 3),
            changes.scale_down,
            changes.restart,
        ]
        for number in range(num_changes):
            await turns[number % len(turns)]()
        streams.stopping = True
        await asyncio.gather(*tasks)
    report(num_changes, num_streams, streams, changes)


def report(num_changes: int, num_streams: int, streams: ClientStreams, changes: Changes) -> None:
    for message in dict.fromkeys(streams.errors):
        print(f"failed: {message}")
    rows = [
        Row("changes under load", num_changes, "", "asked for", 50),
        Row("requests that ended", streams.num_ended, ""),
        Row("requests that failed", streams.num_failed, "", "allowed", 0),
        Row("streams with lost, repeated or other tokens", streams.num_wrong, "", "allowed", 0),
        Row("requests cut short by a drain", changes.num_cut_short, ""),
        Row("requests recomputed at another worker", streams.num_redispatches, ""),
        Row("sequences migrated with their KV", streams.num_migrations, ""),
        Row("flip, empty to first request answered: median", statistics.median(changes.flips_s), "s", "allowed", 1.0),
        Row("flip, empty to first request answered: longest", max(changes.flips_s), "s", "allowed", 1.0),
    ]
    if changes.drains_s:
        rows.append(Row("drain under load, order to end: median", statistics.median(changes.drains_s), "s"))
    if changes.restarts_s:
        median_s = statistics.median(changes.restarts_s)
        rows.append(Row("restart under load, order to ready: median", median_s, "s"))
    publish("flips", f"penstock-tiny, {num_streams} streams of {NUM_TOKENS} tokens at a time", rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster.flips", description=__doc__)
    parser.add_argument("--changes", type=int, default=50)
    parser.add_argument("--streams", type=int, default=6, help="streams at a time")
    arguments = parser.parse_args()
    asyncio.run(measure(arguments.changes, arguments.streams))


if __name__ == "__main__":
    main()
