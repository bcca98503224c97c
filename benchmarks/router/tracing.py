"""Measures what traces cost a router: turned off, beside the code of an earlier commit, and with requests sampled.

`--before DIR` is a checkout of the earlier commit. All routers are on core 0; the null worker, the clients and a
collector that takes every export are on core 1. Rounds alternate between the routers, each in turn the first. The
figure is the processor time of all threads of a router, export included, divided by its requests; ratios are medians
over the rounds' own ratios, with the 95 % interval of that median.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import grpc.aio

from benchmarks.common.process_group import ROOT
from benchmarks.common.report import Row, publish, show
from benchmarks.common.shapes import BUNDLED
from benchmarks.router.load import RouterLoad, run_load
from penstock.config import RouterConfig, TracingConfig

_ROUTER_CORE, _OTHER_CORE = 0, 1
_EXPORT = "opentelemetry.proto.collector.trace.v1.TraceService"
_START_S = 60.0


@dataclass(frozen=True, slots=True)
class TracedRouter:
    """A running router and how it traces."""

    name: str
    address: str
    pid: int
    http: str

    def cpu_s(self) -> float:
        """Returns the processor time of all its threads, in the scheduler's nanoseconds."""
        total = 0
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                total += int((task / "schedstat").read_text().split()[0])
        return total / 1e9


async def measure_rounds(routers: Sequence[TracedRouter], load: RouterLoad, num_rounds: int) -> dict[str, list[float]]:
    """Returns the processor seconds of a request at each router, round by round."""
    found: dict[str, list[float]] = {router.name: [] for router in routers}
    for number in range(-2, num_rounds):  # the first two warm up
        turn = number % len(routers)
        for router in (*routers[turn:], *routers[:turn]):
            before_s = router.cpu_s()
            await run_load(replace(load, address=router.address, seed=number))
            if number >= 0:
                found[router.name].append((router.cpu_s() - before_s) / load.num_requests)
    return found


def compare(found: Mapping[str, Sequence[float]], name: str, baseline: str) -> list[Row]:
    """Compares two routers, and bounds the ratio."""
    ratios = sorted(ours / theirs for ours, theirs in zip(found[name], found[baseline], strict=True))
    middle, reach = len(ratios) / 2, 0.98 * len(ratios) ** 0.5  # a median's rank, plus and minus 1.96 deviations
    low, high = ratios[max(0, int(middle - reach))], ratios[min(len(ratios) - 1, int(middle + reach))]
    ours_us, theirs_us = median(found[name]) * 1e6, median(found[baseline]) * 1e6
    return [
        Row(f"router time of a request, {name}", ours_us, "us", baseline, theirs_us),
        Row(f"added by {name}", (median(ratios) - 1) * 100, "%"),
        Row(f"added by {name}, at least (95 %)", (low - 1) * 100, "%"),
        Row(f"added by {name}, at most (95 %)", (high - 1) * 100, "%"),
    ]


@contextlib.asynccontextmanager
async def collector() -> AsyncIterator[tuple[str, list[int]]]:
    """Yields the URL of a collector that takes every export, and the sizes of what it took, in bytes."""
    sizes: list[int] = []

    async def export(raw: bytes, context: grpc.aio.ServicerContext) -> bytes:
        sizes.append(len(raw))
        return b""

    server = grpc.aio.server()
    methods = {"Export": grpc.unary_unary_rpc_method_handler(export)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_EXPORT, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"http://127.0.0.1:{port}", sizes
    finally:
        await server.stop(None)


@contextlib.contextmanager
def started(core: int, module: str, arguments: Sequence[str], folder: Path) -> Iterator[Mapping[str, object]]:
    """Runs a module of the checkout in `folder` on one core; yields the line that it prints once it is ready."""
    command = ["taskset", "-c", str(core), sys.executable, "-m", module, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=folder, env=environment)
    assert process.stdout is not None
    try:
        yield {"pid": process.pid, **json.loads(process.stdout.readline())}
    finally:
        process.terminate()
        process.wait(_START_S)


@contextlib.contextmanager
def router(name: str, worker: str, tracing: TracingConfig, folder: Path, scratch: Path) -> Iterator[TracedRouter]:
    config = RouterConfig(
        model=str(BUNDLED), served_model="null", grpc_port=0, http_port=0, workers=(worker,), tracing=tracing
    )
    path = scratch / f"{name}.json"
    path.write_text(config.model_dump_json(exclude_defaults=True))  # an earlier commit may not know the others
    with started(_ROUTER_CORE, "router", ["--config", str(path)], folder) as ready:
        yield TracedRouter(name, str(ready["grpc"]), int(str(ready["pid"])), str(ready["http"]))


async def measure(before: Path | None, load: RouterLoad, num_rounds: int, ratio: float) -> list[Row]:
    """Starts everything and measures."""
    stack = contextlib.ExitStack()
    try:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = json.dumps({"num_streams": load.num_clients})
        worker = stack.enter_context(started(_OTHER_CORE, "benchmarks.router.peers", ["worker", settings], ROOT))
        address = str(worker["address"])
        async with collector() as (url, sizes):
            off, on = TracingConfig(), TracingConfig(endpoint=url, sample_ratio=ratio)
            sampled = f"{ratio:.0%} sampled"
            plans = [
                ("off", off, ROOT),
                (sampled, on, ROOT),
                ("all sampled", TracingConfig(endpoint=url, sample_ratio=1.0), ROOT),
            ]
            if before is not None:
                plans.insert(0, ("before", off, before))
            routers = [stack.enter_context(router(*plan[:1], address, *plan[1:], scratch)) for plan in plans]
            found = await measure_rounds(routers, load, num_rounds)
            await asyncio.to_thread(stack.close)  # the routers export what they hold
        assert sizes, "no trace was exported"
    finally:
        stack.close()
    rows = compare(found, "off", "before") if before is not None else []
    return [*rows, *compare(found, sampled, "off"), *compare(found, "all sampled", "off")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="DIR", help="a checkout of the commit to compare with")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--requests", type=int, default=200, help="at each router in each round")
    parser.add_argument("--sample-ratio", type=float, default=0.01)
    parser.add_argument("--quick", action="store_true", help="a few rounds, and write no result")
    given = parser.parse_args()
    os.sched_setaffinity(0, {_OTHER_CORE})
    load = RouterLoad("", 16, given.requests, 512, characters_per_token=2.17)
    started_s = time.perf_counter()
    rows = asyncio.run(measure(given.before, load, 4 if given.quick else given.rounds, given.sample_ratio))
    workload = f"512 tokens of text, {load.num_clients} clients, {given.rounds} rounds of {given.requests} requests"
    show("tracing", workload, rows) if given.quick else publish("tracing", workload, rows)
    print(f"took {time.perf_counter() - started_s:.0f} s")


if __name__ == "__main__":
    main()
