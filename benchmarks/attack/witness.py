"""`python -m benchmarks.attack.witness ADDRESS`: what other callers see of an attack, in a process of its own.

Two streams run one answer after the other, and the health service is asked every 5 ms, on the event loop that serves
all requests of the router. Prints `ready` with the first token; for each line that it reads, prints a `Window` as JSON.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import time

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.attack.verdict import StreamGaps, WindowSums
from penstock import AsyncClient
from penstock.errors import PenstockError
from penstock.types import Lane

_NUM_STREAMS = 2
_MAX_TOKENS = 1200
_PROBE_EVERY_S = 0.005
_PROBE_TIMEOUT_S = 60.0
_TICK_S = 0.005
_AGAIN_S = 0.05


class Witness:
    def __init__(self, address: str) -> None:
        self._address = address
        self._sums = WindowSums([StreamGaps() for _ in range(_NUM_STREAMS)])
        self._held_up_s = 0.0  # the longest of this process itself, during the probe in flight
        self._probe_began_s: float | None = None
        self._first = asyncio.Event()

    async def run(self) -> None:
        """Runs until the input ends."""
        async with AsyncClient(self._address, timeout_s=120.0) as client:
            streams = [self._stream(client, gaps, number) for number, gaps in enumerate(self._sums.gaps)]
            tasks = [asyncio.create_task(each) for each in (*streams, self._probe(), self._tick())]
            await self._first.wait()
            print("ready", flush=True)
            while await asyncio.to_thread(sys.stdin.readline):
                print(json.dumps(dataclasses.asdict(self._close())), flush=True)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _close(self) -> object:
        now_s = time.monotonic()
        if self._probe_began_s is not None:
            self._sums.pause_s = max(self._sums.pause_s, now_s - self._probe_began_s - self._held_up_s)
        return self._sums.close(now_s)

    async def _stream(self, client: AsyncClient, gaps: StreamGaps, number: int) -> None:
        prompt = f"Once upon a time there was child number {number}. "
        while True:
            try:
                options = {"max_tokens": _MAX_TOKENS, "temperature": 0.0, "ignore_eos": True}
                async for chunk in client.generate(prompt, lane=Lane.INTERACTIVE, **options):
                    gaps.on_tokens(len(chunk.token_ids), time.monotonic())
                    self._first.set()
                gaps.on_end()
            except PenstockError as error:
                gaps.on_end()
                self._sums.failures.append(f"stream: {type(error).__name__}: {error.message}")
                await asyncio.sleep(_AGAIN_S)

    async def _probe(self) -> None:
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                self._held_up_s, self._probe_began_s = 0.0, time.monotonic()
                try:
                    await stub.Check(health_pb2.HealthCheckRequest(service="live"), timeout=_PROBE_TIMEOUT_S)
                except grpc.aio.AioRpcError as error:
                    self._sums.failures.append(f"probe: {error.code().name}: {error.details()}")
                took_s = time.monotonic() - self._probe_began_s - self._held_up_s
                self._probe_began_s = None
                self._sums.pause_s = max(self._sums.pause_s, took_s)
                self._sums.num_probes += 1
                await asyncio.sleep(_PROBE_EVERY_S)

    async def _tick(self) -> None:
        """Measures how late this process itself runs."""
        while True:
            due_s = time.monotonic() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self._held_up_s = max(self._held_up_s, time.monotonic() - due_s)


if __name__ == "__main__":
    assert os.environ.get("PENSTOCK_API_KEY"), "the witness's key is handed over in PENSTOCK_API_KEY"
    asyncio.run(Witness(sys.argv[1]).run())
