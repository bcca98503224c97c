"""Measures in a separate process how an attack affects other callers: `python -m benchmarks.attack.witness ADDRESS`.

Two streams run one answer after the other, and the router's health service is called every 5 ms; it answers on the
event loop that serves all requests. The health service of a server that does nothing else (this module without an
address) is called as well, to show how slow the machine itself makes a server. Prints `ready` with the first token; for
each line that it reads, prints a `Window` as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import time

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.attack.verdict import StreamGaps, Window, WindowSums
from penstock import AsyncClient
from penstock.errors import PenstockError
from penstock.rpc.server import LIVE, GrpcServer
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
        self._probes = [_Probe(), _Probe()]  # probes of the router and of the idle server
        self._first = asyncio.Event()

    async def run(self) -> None:
        """Runs until the input ends."""
        idle = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.attack.witness", stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert idle.stdout is not None
        idle_address = (await idle.stdout.readline()).decode().strip()
        async with AsyncClient(self._address, timeout_s=120.0) as client:
            streams = [self._stream(client, gaps, number) for number, gaps in enumerate(self._sums.gaps)]
            addresses = zip((self._address, idle_address), self._probes, strict=True)
            probes = [self._probe(address, probe) for address, probe in addresses]
            tasks = [asyncio.create_task(each) for each in (*streams, *probes, self._tick())]
            await self._first.wait()
            print("ready", flush=True)
            while await asyncio.to_thread(sys.stdin.readline):
                print(json.dumps(dataclasses.asdict(self._close())), flush=True)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        idle.terminate()
        await idle.wait()

    def _close(self) -> Window:
        now_s = time.monotonic()
        self._sums.pause_s, self._sums.idle_pause_s = [probe.close(now_s) for probe in self._probes]
        return self._sums.close(now_s)

    async def _stream(self, client: AsyncClient, gaps: StreamGaps, number: int) -> None:
        prompt = f"Once upon a time there was child number {number}. "
        while True:
            try:
                chunks = client.generate(
                    prompt, lane=Lane.INTERACTIVE, max_tokens=_MAX_TOKENS, temperature=0.0, ignore_eos=True
                )
                async for chunk in chunks:
                    gaps.on_tokens(len(chunk.token_ids), time.monotonic())
                    self._first.set()
                gaps.on_end()
            except PenstockError as error:
                gaps.on_end()
                self._sums.failures.append(f"stream: {type(error).__name__}: {error.message}")
                await asyncio.sleep(_AGAIN_S)

    async def _probe(self, address: str, probe: _Probe) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                probe.begin(time.monotonic())
                try:
                    await stub.Check(health_pb2.HealthCheckRequest(service=LIVE), timeout=_PROBE_TIMEOUT_S)
                except grpc.aio.AioRpcError as error:
                    self._sums.failures.append(f"probe: {error.code().name}: {error.details()}")
                probe.end(time.monotonic())
                self._sums.num_probes += 1
                await asyncio.sleep(_PROBE_EVERY_S)

    async def _tick(self) -> None:
        """Measures how late this process itself runs."""
        while True:
            due_s = time.monotonic() + _TICK_S
            await asyncio.sleep(_TICK_S)
            for probe in self._probes:
                probe.held_up_s = max(probe.held_up_s, time.monotonic() - due_s)


class _Probe:
    """The longest time that one server took to answer."""

    def __init__(self) -> None:
        self.held_up_s = 0.0  # the longest delay of this process itself, during the call in flight
        self._began_s: float | None = None
        self._pause_s = 0.0

    def begin(self, now_s: float) -> None:
        self.held_up_s, self._began_s = 0.0, now_s

    def end(self, now_s: float) -> None:
        self._count(now_s)
        self._began_s = None

    def close(self, now_s: float) -> float:
        """Returns the longest pause, a call in flight included, and counts from zero again."""
        self._count(now_s)
        pause_s, self._pause_s = self._pause_s, 0.0
        return pause_s

    def _count(self, now_s: float) -> None:
        if self._began_s is not None:
            self._pause_s = max(self._pause_s, now_s - self._began_s - self.held_up_s)


async def _serve_idly() -> None:
    server = GrpcServer([], keepalive=False)
    print(f"127.0.0.1:{await server.start('127.0.0.1', 0)}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attack.witness",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "address", nargs="?", help="the router's gRPC address; without it, serve only the health service"
    )
    address = parser.parse_args().address
    if address is None:
        asyncio.run(_serve_idly())
    else:
        assert os.environ.get("PENSTOCK_API_KEY"), "set PENSTOCK_API_KEY to the witness's key"
        asyncio.run(Witness(address).run())


if __name__ == "__main__":
    main()
