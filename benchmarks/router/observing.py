"""Measures what metrics and traces cost a router, by the processor time of all its threads for a request.

One router, on core 0, is switched between its modes in turns (`benchmarks.router.switched`); a null worker with a step
every 2 ms, the clients and a collector that takes every export are on core 1. A round measures every mode once, and
each mode is first in its turn; ratios are medians over the rounds' ratios, with the median's 95 % interval. Answers
have 128 tokens or one, where the cost per request weighs most. A round is one batch of the metrics, so that every round
pays for counting it. A round of 128 tokens takes 8 seconds a mode.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import grpc.aio

from benchmarks.common.process_group import ROOT
from benchmarks.common.report import Row, publish, show
from benchmarks.common.shapes import BUNDLED
from benchmarks.common.timing import print_duration
from benchmarks.router.load import RouterLoad, run_load
from benchmarks.router.switched import MODES
from penstock.config import RouterConfig, TracingConfig
from router.metrics.request_metrics import BATCH

_ROUTER_CORE, _OTHER_CORE = 0, 1
_EXPORT = "opentelemetry.proto.collector.trace.v1.TraceService"
_START_S = 60.0
_NUM_CLIENTS = 16
_STEP_S = 0.002


@dataclass(frozen=True, slots=True)
class RouterProcess:
    """A running router."""

    address: str
    http: str
    process: subprocess.Popen[bytes]

    def cpu_s(self) -> float:
        """Returns the processor time of all its threads, in the scheduler's nanoseconds."""
        total = 0
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                total += int((task / "schedstat").read_text().split()[0])
        return total / 1e9

    def switch(self, mode: str) -> None:
        """Switches to a mode of `benchmarks.router.switched`, once requests in flight have ended."""
        self.process.send_signal(signal.SIGRTMIN + MODES.index(mode))
        assert self.process.stdout is not None
        answer = self.process.stdout.readline().decode().strip()
        assert answer == mode, f"the router answered {answer!r} to {mode!r}"


async def measure_rounds(
    router: RouterProcess, load: RouterLoad, num_rounds: int, modes: Sequence[str]
) -> dict[str, list[float]]:
    """Returns the processor seconds of a request in each mode, round by round."""
    found: dict[str, list[float]] = {mode: [] for mode in modes}
    for number in range(-2, num_rounds):  # the first two warm up
        turn = number % len(modes)
        for mode in (*modes[turn:], *modes[:turn]):
            router.switch(mode)
            before_s = router.cpu_s()
            await run_load(replace(load, address=router.address, seed=number))
            if number >= 0:
                found[mode].append((router.cpu_s() - before_s) / load.num_requests)
    return found


def compare(found: Mapping[str, Sequence[float]], mode: str, baseline: str, at: str) -> list[Row]:
    """Compares two modes, and bounds the ratio."""
    ratios = sorted(ours / theirs for ours, theirs in zip(found[mode], found[baseline], strict=True))
    middle, reach = len(ratios) / 2, 0.98 * len(ratios) ** 0.5  # a median's rank, plus and minus 1.96 deviations
    low, high = ratios[max(0, int(middle - reach))], ratios[min(len(ratios) - 1, int(middle + reach))]
    ours_us, theirs_us = median(found[mode]) * 1e6, median(found[baseline]) * 1e6
    return [
        Row(f"router time of a request, {mode}, {at}", ours_us, "us", baseline, theirs_us),
        Row(f"added by {mode}, {at}", (median(ratios) - 1) * 100, "%"),
        Row(f"added by {mode}, {at}, at least (95 %)", (low - 1) * 100, "%"),
        Row(f"added by {mode}, {at}, at most (95 %)", (high - 1) * 100, "%"),
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
def started(
    core: int, module: str, arguments: Sequence[str]
) -> Iterator[tuple[Mapping[str, str], subprocess.Popen[bytes]]]:
    """Runs a module on one core; yields the line that it prints once it is ready, and the process."""
    command = ["taskset", "-c", str(core), sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline()), process
    finally:
        process.terminate()
        process.wait(_START_S)


@contextlib.contextmanager
def started_router(worker: str, tracing: TracingConfig, module: str = "router") -> Iterator[RouterProcess]:
    """Runs a router of the one worker as `module` on core 0."""
    config = RouterConfig(
        model=str(BUNDLED), served_model="null", grpc_port=0, http_port=0, workers=(worker,), tracing=tracing
    )
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(config.model_dump_json(exclude_defaults=True))
        file.flush()
        with started(_ROUTER_CORE, module, ["--config", file.name]) as (ready, process):
            yield RouterProcess(ready["grpc"], ready["http"], process)


async def measure(loads: Mapping[str, RouterLoad], num_rounds: int, modes: Sequence[str]) -> list[Row]:
    """Starts everything and measures."""
    rows = []
    async with collector() as (url, sizes):
        tracing = TracingConfig(endpoint=url, sample_ratio=1.0)
        settings = json.dumps({"num_streams": _NUM_CLIENTS, "step_s": _STEP_S})
        with contextlib.ExitStack() as stack:
            worker, _ = stack.enter_context(started(_OTHER_CORE, "benchmarks.router.peers", ["worker", settings]))
            router = stack.enter_context(started_router(worker["address"], tracing, "benchmarks.router.switched"))
            for at, load in loads.items():
                found = await measure_rounds(router, load, num_rounds, modes)
                rows += compare(found, "metrics", "unobserved", at)
                for mode in modes[2:]:
                    rows += compare(found, mode, "metrics", at)
            await asyncio.to_thread(stack.close)  # the router exports what it holds
        assert sizes or modes != MODES, "no trace was exported"
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.router.observing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--requests", type=int, default=BATCH, help="in each mode in each round")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 128], help="of the answers; default: 1 and 128")
    parser.add_argument("--metrics-only", action="store_true", help="leave traces out, and write no result")
    parser.add_argument("--quick", action="store_true", help="a few rounds, and write no result")
    given = parser.parse_args()
    os.sched_setaffinity(0, {_OTHER_CORE})
    short = RouterLoad("", _NUM_CLIENTS, given.requests, 512, characters_per_token=2.17)
    loads = {f"{num} token{'s' if num > 1 else ''}": replace(short, max_tokens=num) for num in given.tokens}
    modes = MODES[:2] if given.metrics_only else MODES
    with print_duration():
        rows = asyncio.run(measure(loads, 4 if given.quick else given.rounds, modes))
        workload = f"prompts of 512 tokens of text, {_NUM_CLIENTS} clients, {given.rounds} rounds"
        is_part = given.quick or given.metrics_only
        show("observing", workload, rows) if is_part else publish("observing", workload, rows)


if __name__ == "__main__":
    main()
