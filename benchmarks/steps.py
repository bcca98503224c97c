"""What a step costs besides the model: a null model behind the real workers' steps.

Scheduling, laying out the batch, bringing tokens to the host, finish checks, page hashing and sharing, dealing tokens
out, and the router's frames to their last byte. Sequences in the middle of their text, as many as the batch, with
contexts from 512 on and ends at different times: those that end are followed by others, as in a worker that is always
full, and so is its prefix cache: a page is evicted for each that is taken. With and without the prefix cache, in
turns; nothing is ever found in it, so what it costs is pure loss. Colocated, those that follow are prompts, which are
computed in chunks beside the others. What a prefill worker's step costs is in `benchmarks.steps_prefill`.

Microseconds of the thread's own CPU time, the median of some hundred steps: on a busy machine the clock would count
others.
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
from types import SimpleNamespace
from typing import Any, cast

import torch

from benchmarks import steps_prefill
from benchmarks.report import Row, publish
from decode_worker.request import DecodeRequest, Delta
from decode_worker.stream import RouterStream
from decode_worker.worker import DecodeWorker
from engine.drawing import Drawn, LaidOutStep, lay_out_step
from engine.page_pool import PagePool
from engine.prefix_cache import PrefixCache
from engine.sequence import Sequence
from penstock.config import DecodeConfig
from penstock.kv_events import KvEventLog
from penstock.page_hash import hash_pages
from penstock.types import RequestId, SamplingParams

PAGE_SIZE = 16
CONTEXT = 512
OUTPUT_TOKENS = 512
VOCAB_SIZE = 32000
BATCHES = (1, 16, 64, 256)
CHUNK_TOKENS = 256  # of prompts, in a step of a colocated worker ...
COLOCATED_OUTPUT = 128  # ... whose sequences end so soon that every step has them


class NullEngine:
    """Stands in for `engine.engine.Engine`: the next token is as good as any."""

    def __init__(self, batch: int, prefix_caching: bool) -> None:
        self.layout = SimpleNamespace(page_size=PAGE_SIZE, page_bytes=1)
        self.model = SimpleNamespace(vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({2}), context_length=8192)
        self.pool = PagePool((batch * 9 // 8 + 4) * (CONTEXT + OUTPUT_TOKENS) // PAGE_SIZE)
        self.prefix_cache = PrefixCache(self.pool, PAGE_SIZE, KvEventLog(), prefix_caching)
        self._token_ids = torch.arange(batch) + 1000
        self._valid = torch.ones(batch, dtype=torch.bool)

    def fill_cache(self) -> None:
        """With pages that nobody wants."""
        pages = self.pool.allocate(self.pool.num_free)
        self.prefix_cache.insert(hash_pages(range(len(pages)), 1, b"salt"), pages)
        self.pool.release(pages)

    def compute(self, step: LaidOutStep) -> Drawn:
        count = len(step.host.drawing)
        return Drawn(step, self._token_ids[:count], self._valid[:count])


class NoTransfers:
    """Stands in for `decode_worker.transfers.Transfers`: everything is here already."""

    def grant_reservations(self, scheduler: object) -> None: ...

    def abandon(self, request: object) -> None: ...


@dataclass
class Stages:
    """Microseconds of each stage, a step each."""

    names: tuple[str, ...] = ("schedule", "lay out", "tokens", "deal out", "frames")
    steps: list[list[float]] = field(default_factory=list)

    def median(self, name: str | None = None) -> float:
        if name is None:
            return statistics.median(sum(step) for step in self.steps)
        return statistics.median(step[self.names.index(name)] for step in self.steps)


class Bench:
    """A worker whose batch is always full."""

    def __init__(self, batch: int, prefix_caching: bool, colocated: bool = False) -> None:
        self.engine = NullEngine(batch, prefix_caching)
        budget = batch + CHUNK_TOKENS if colocated else max(batch, 256)
        config = DecodeConfig(max_batch_sequences=batch, max_batch_tokens=budget)
        self.worker = DecodeWorker("bench", cast(Any, self.engine), cast(Any, NoTransfers()), config, 8192)  # type: ignore[arg-type]
        self.stream = RouterStream()
        self.sent: deque[list[Delta]] = deque()
        self._outlet = self.sent.append
        self._batch = batch
        self._colocated = colocated
        self._output_tokens = COLOCATED_OUTPUT if colocated else OUTPUT_TOKENS
        self._count = 0
        self._frames = 0
        self._num_bytes = 0

    def fill(self) -> None:
        """New sequences in the place of those that have ended; their KV landed from elsewhere, or is computed here."""
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
            request = DecodeRequest(number, sequence, self._outlet, deque(), deadline_s=1e9)
            if self._colocated:
                self.worker.submit(request)
                continue
            request.times.first_token_s = time.monotonic()
            self.worker.take_on(request)
            sequence.pages = self.engine.pool.allocate(-(-length // PAGE_SIZE))
            sequence.token_ids.append(5)
            self.worker.scheduler.join(sequence, length)
        if not self._frames:
            self.engine.fill_cache()

    def step(self) -> list[float]:
        clock = time.thread_time
        marks = [clock()]
        plan = self.worker.begin()
        marks.append(clock())
        laid_out = lay_out_step(plan, PAGE_SIZE)
        marks.append(clock())
        tokens = self.engine.compute(laid_out).wait()
        marks.append(clock())
        self.worker.finish(plan, tokens, 1e-3)
        marks.append(clock())
        while self.sent:
            self._frames += 1
            self._num_bytes += len(self.stream.encode(self._frames, self.sent.popleft()))
        del plan, laid_out, tokens  # what a step leaves behind is its own
        marks.append(clock())
        return [(after - before) * 1e6 for before, after in itertools.pairwise(marks)]


@contextmanager
def no_collection() -> Iterator[None]:
    """A pass of the garbage collector belongs to no step."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure(make: Callable[[], dict[str, Bench]], num_steps: int) -> dict[str, Stages]:
    """All in turns, step by step."""
    benches = make()
    found = {name: Stages() for name in benches}
    with no_collection():
        for number in range(num_steps):
            for name, bench in benches.items():
                bench.fill()
                taken = bench.step()
                if number >= num_steps // 5:
                    found[name].steps.append(taken)
    return found


async def rows(num_steps: int) -> list[Row]:
    made: list[Row] = []
    for batch in BATCHES:
        found = measure(lambda: {"cached": Bench(batch, True), "plain": Bench(batch, False)}, num_steps)  # noqa: B023
        cached, plain = found["cached"], found["plain"]
        at = f"batch {batch}"
        made.append(Row(f"step with a null model, {at}", cached.median(), "us", "allowed", 100.0 + batch))
        made += [Row(f"  {name}, {at}", cached.median(name), "us") for name in cached.names]
        mean = statistics.fmean
        cost = mean(sum(one) for one in cached.steps) - mean(sum(one) for one in plain.steps)
        made.append(Row(f"  prefix cache at 0 % hits, {at}", cost, "us a step"))
    return made + colocated_rows(num_steps) + prefill_rows(num_steps)


def colocated_rows(num_steps: int) -> list[Row]:
    made: list[Row] = []
    for batch in BATCHES[1:]:
        found = measure(lambda: {"one": Bench(batch, True, colocated=True)}, num_steps)["one"]  # noqa: B023
        at = f"batch {batch} and {CHUNK_TOKENS} tokens of prompts"
        made.append(Row(f"colocated step, {at}", found.median(), "us"))
        made += [Row(f"  {name}, {at}", found.median(name), "us") for name in found.names]
    return made


def prefill_rows(num_steps: int) -> list[Row]:
    made: list[Row] = []
    for num_prompts, num_tokens in steps_prefill.SHAPES:
        for num_queued in steps_prefill.QUEUED:
            bench = steps_prefill.bench_of(num_prompts, num_tokens, num_queued)
            taken: list[float] = []
            with no_collection():
                for _ in range(num_steps):
                    bench.fill()
                    taken.append(bench.step())
            median = statistics.median(taken[num_steps // 5 :])
            made.append(steps_prefill.row(num_prompts, num_tokens, num_queued, median))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    made = asyncio.run(rows(arguments.steps))
    publish("steps", f"context {CONTEXT}, page {PAGE_SIZE}, CPU time of the thread", made)


if __name__ == "__main__":
    main()
