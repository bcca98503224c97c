"""Measures what a step costs besides the model: the real workers' steps over a null engine.

A step here is scheduling, laying out the batch, bringing tokens to the host, finish checks, page hashing and sharing,
delivering tokens, and encoding the router's frames. The batch is always full: sequences have contexts from 512 tokens
on, end at different times and are replaced at once. The prefix cache is full, too, so that every allocated page evicts
another. Steps with and without the prefix cache alternate; nothing is ever found in it, so its cost is pure overhead.
In colocated steps the replacements are prompts, computed in chunks together with the running sequences. Steps of a
prefill worker are in `benchmarks.steps.prefill`.

Figures are microseconds of the thread's own CPU time, the median of some hundred steps, because wall time on a busy
machine would include other processes.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from benchmarks.common.report import Row, publish
from benchmarks.steps import prefill
from benchmarks.steps.null_engine import PAGE_SIZE, VOCAB_SIZE, NullEngine, NullTransfers
from decode_worker.delivery.router_stream import RouterStream
from decode_worker.request import DecodeRequest, Delta
from decode_worker.worker import DecodeWorker
from engine.step.compute import prepare_step
from engine.step.sequence import Sequence
from penstock.config import DecodeConfig
from penstock.types import RequestId, SamplingParams

CONTEXT = 512
OUTPUT_TOKENS = 512
BATCHES = (1, 16, 64, 256)
CHUNK_TOKENS = 256  # tokens of prompts in a step of a colocated worker
COLOCATED_OUTPUT = 128  # few enough that every step has prompts


@dataclass
class HostStageTimes:
    """Microseconds of each stage of each step."""

    names: tuple[str, ...] = ("schedule", "lay out", "tokens", "deliver", "frames")
    steps: list[list[float]] = field(default_factory=list)

    def median(self, name: str | None = None) -> float:
        """Returns the median of one stage, or of whole steps."""
        if name is None:
            return statistics.median(sum(step) for step in self.steps)
        return statistics.median(step[self.names.index(name)] for step in self.steps)


class FullWorker:
    """A decode or colocated worker whose batch is always full."""

    def __init__(self, batch: int, prefix_caching: bool, colocated: bool = False) -> None:
        num_pages = (batch * 9 // 8 + 4) * (CONTEXT + OUTPUT_TOKENS) // PAGE_SIZE
        self.engine = NullEngine(num_pages, batch, prefix_caching)
        budget = batch + CHUNK_TOKENS if colocated else max(batch, 256)
        config = DecodeConfig(max_batch_sequences=batch, max_batch_tokens=budget)
        self.worker = DecodeWorker("bench", cast(Any, self.engine), cast(Any, NullTransfers()), config, 8192)  # type: ignore[arg-type]
        self.stream = RouterStream()
        self.sent: deque[list[Delta]] = deque()
        self._batch = batch
        self._colocated = colocated
        self._output_tokens = COLOCATED_OUTPUT if colocated else OUTPUT_TOKENS
        self._count = 0
        self._frames = 0
        self._num_bytes = 0

    def send(self, deltas: list[Delta]) -> None:  # called by the worker
        self.sent.append(deltas)

    def fill(self) -> None:
        """Replaces ended sequences by new ones, whose KV was transferred or, if colocated, will be computed here."""
        while len(self.worker.requests) < self._batch:
            self._count += 1
            number = self._count
            left = self._output_tokens
            if number <= self._batch:
                left = 1 + number * 37 % left
            length = CONTEXT + number * 13 % PAGE_SIZE
            tokens = [(number * 7919 + i) % VOCAB_SIZE for i in range(length)]
            sampling = SamplingParams(max_tokens=left, temperature=0.0, ignore_eos=number % 2 == 0)
            sequence = Sequence(RequestId(str(number)), tokens, length, sampling, b"salt")
            request = DecodeRequest(number, sequence, self, deque(), deadline_s=1e9)
            if self._colocated:
                self.worker.submit(request)
                continue
            request.times.first_token_s = time.monotonic()
            self.worker.accept(request)
            sequence.pages = self.engine.pool.allocate(-(-length // PAGE_SIZE))
            sequence.token_ids.append(5)
            self.worker.scheduler.join(sequence, length)
        if not self._frames:
            self.engine.fill_cache()

    def step(self) -> list[float]:
        """Runs one step and returns the microseconds of its stages."""
        clock = time.thread_time
        marks = [clock()]
        plan = self.worker.begin_step()
        marks.append(clock())
        laid_out = prepare_step(plan, PAGE_SIZE, VOCAB_SIZE, self.engine.model.eos_token_ids)
        marks.append(clock())
        tokens = self.engine.compute(laid_out).wait()
        marks.append(clock())
        self.worker.finish_step(plan, tokens, 1e-3)
        marks.append(clock())
        while self.sent:
            self._frames += 1
            self._num_bytes += len(self.stream.encode(self._frames, self.sent.popleft()))
        del plan, laid_out, tokens  # a step is charged for freeing its own objects
        marks.append(clock())
        return [(after - before) * 1e6 for before, after in itertools.pairwise(marks)]


@contextmanager
def no_collection() -> Iterator[None]:
    """Turns garbage collection off, which would be charged to a random step."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure(make: Callable[[], dict[str, FullWorker]], num_steps: int) -> dict[str, HostStageTimes]:
    """Alternates the workers step by step; the first fifth of the steps does not count."""
    workers = make()
    found = {name: HostStageTimes() for name in workers}
    with no_collection():
        for number in range(num_steps):
            for name, worker in workers.items():
                worker.fill()
                taken = worker.step()
                if number >= num_steps // 5:
                    found[name].steps.append(taken)
    return found


async def rows(num_steps: int) -> list[Row]:
    made: list[Row] = []
    for batch in BATCHES:
        found = measure(lambda: {"cached": FullWorker(batch, True), "plain": FullWorker(batch, False)}, num_steps)  # noqa: B023
        cached, plain = found["cached"], found["plain"]
        at = f"batch {batch}"
        made.append(Row(f"step with a null model, {at}", cached.median(), "us", "allowed", 100.0 + batch))
        made += [Row(f"  {name}, {at}", cached.median(name), "us") for name in cached.names]
        mean = statistics.fmean
        cost = mean(map(sum, cached.steps)) - mean(map(sum, plain.steps))
        made.append(Row(f"  prefix cache at 0 % hits, {at}", cost, "us a step"))
    return made + colocated_rows(num_steps) + prefill_rows(num_steps)


def colocated_rows(num_steps: int) -> list[Row]:
    made: list[Row] = []
    for batch in BATCHES[1:]:
        found = measure(lambda: {"colocated": FullWorker(batch, True, colocated=True)}, num_steps)["colocated"]  # noqa: B023
        at = f"batch {batch} and {CHUNK_TOKENS} tokens of prompts"
        made.append(Row(f"colocated step, {at}", found.median(), "us"))
        made += [Row(f"  {name}, {at}", found.median(name), "us") for name in found.names]
    return made


def prefill_rows(num_steps: int) -> list[Row]:
    made: list[Row] = []
    for num_prompts, num_tokens in prefill.SHAPES:
        for num_queued in prefill.QUEUED:
            worker = prefill.BusyPrefillWorker(num_tokens, num_prompts + num_queued)
            taken: list[float] = []
            with no_collection():
                for _ in range(num_steps):
                    worker.fill()
                    taken.append(worker.step())
            median = statistics.median(taken[num_steps // 5 :])
            made.append(prefill.row(num_prompts, num_tokens, num_queued, median))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    made = asyncio.run(rows(arguments.steps))
    publish("steps", f"context {CONTEXT}, page {PAGE_SIZE}, CPU time of the thread", made)


if __name__ == "__main__":
    main()
