"""Whole decode steps on a CUDA device, as a decode worker drives them: beside one read of weights and KV, and how long
the device stands idle between them.

Scheduler, batch, forward, sampling and the copy out are the worker's own; only requests and gRPC are missing. In turns:
graphs with the next step given ahead, graphs alone, and neither.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.report import Row
from benchmarks.shapes import LLAMA_8B, LLAMA_135M, QWEN3_600M, random_llama
from decode_worker.scheduler import DecodeScheduler
from engine.drawing import Drawn, Known
from engine.engine import Engine
from engine.roster import DecodeRows
from engine.row_table import RowTable
from engine.sequence import Sequence
from engine.step_plan import StepPlan
from penstock.config import DecodeConfig, EngineConfig
from penstock.types import RequestId, SamplingParams

SHAPES = {"135M": LLAMA_135M, "0.6B": QWEN3_600M, "8B": LLAMA_8B}
BATCHES = (1, 64, 256)
CONTEXT = 576
_STEPS = 40
_WARM_UP = 5
_PROFILED = 20


@dataclass(frozen=True, slots=True)
class Mode:
    name: str
    graphs: bool
    ahead: bool


MODES = (Mode("graphs, ahead", True, True), Mode("graphs", True, False), Mode("eager", False, False))


class Decoding:
    """Sequences in the middle of their text; their KV is whatever the pool holds."""

    def __init__(self, engine: Engine, batch: int) -> None:
        self._engine = engine
        size = engine.layout.page_size
        config = DecodeConfig(max_batch_sequences=batch, max_batch_tokens=max(batch, 256))
        self.scheduler = DecodeScheduler(engine.pool, engine.prefix_cache, size, config, RowTable(size))
        self._sequences = []
        self._given: deque[tuple[StepPlan[DecodeRows], Drawn | Known]] = deque()
        for number in range(batch):
            tokens = [(number * 31 + i) % 30000 for i in range(CONTEXT + 1)]
            sampling = SamplingParams(max_tokens=10_000, temperature=0.0)
            sequence = Sequence(RequestId(str(number)), tokens, CONTEXT, sampling, b"%d" % number)
            self.scheduler.track(sequence)
            sequence.pages = engine.pool.allocate(-(-CONTEXT // size))
            self.scheduler.join(sequence, CONTEXT)
            self._sequences.append(sequence)

    def step(self, ahead: bool) -> None:
        """Brings one step's tokens in; with `ahead` the next one is on the device by then."""
        if not self._given:
            self._give(self.scheduler.schedule())
        if ahead and (plan := self.scheduler.schedule_ahead()):
            self._give(plan)
        plan, drawn = self._given.popleft()
        self.scheduler.record(plan, *drawn.wait().by_kind)

    def _give(self, plan: StepPlan[DecodeRows]) -> None:
        before = self._given[-1][1] if self._given else None
        self._given.append((plan, self._engine.compute(self._engine.lay_out(plan), before)))

    def end(self) -> None:
        while self._given:
            plan, drawn = self._given.popleft()
            self.scheduler.record(plan, *drawn.wait().by_kind)
        for sequence in self._sequences:
            self.scheduler.forget(sequence)


def step_rows(bytes_per_s: float) -> Iterator[Row]:
    """`bytes_per_s`: of a copy, read and written."""
    for name, shape in SHAPES.items():
        yield from _rows_of(random_llama(shape), name, bytes_per_s)
        gc.collect()  # the engine
        torch.cuda.empty_cache()


def _rows_of(folder: Path, name: str, bytes_per_s: float) -> Iterator[Row]:
    weight_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    num_pages = max(BATCHES) * (CONTEXT + 3 * (_STEPS + _WARM_UP + _PROFILED) + 64) // 16
    config = EngineConfig(model=str(folder), device="cuda", num_pages=num_pages, prefix_caching=False)
    engine = Engine.load(config)
    engine.warm_up()
    started_s = time.monotonic()
    engine.capture_graphs()
    yield Row(f"capturing decode steps, {name}", time.monotonic() - started_s, "s")
    graphs = engine._graphs
    for batch in BATCHES:
        kv_bytes = batch * CONTEXT * engine.layout.page_bytes / engine.layout.page_size
        floor_s = (weight_bytes + kv_bytes) / (bytes_per_s / 2)
        for mode in MODES:
            engine._graphs = graphs if mode.graphs else None
            decoding = Decoding(engine, batch)
            step_s, idle = _measure(decoding, mode.ahead)
            decoding.end()
            at = f"{name}, batch {batch}, {mode.name}"
            yield Row(f"whole step, {at}", step_s * 1e3, "ms", "one read of weights and KV", floor_s * 1e3)
            yield Row(f"idle between kernels, {at}", idle * 100, "%", "allowed", 3.0)


def _measure(decoding: Decoding, ahead: bool) -> tuple[float, float]:
    """Median seconds a step, and the share of the time in which the device ran nothing."""
    for _ in range(_WARM_UP):
        decoding.step(ahead)
    times = []
    for _ in range(_STEPS):
        started_s = time.perf_counter()
        decoding.step(ahead)
        times.append(time.perf_counter() - started_s)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(_PROFILED):
            decoding.step(ahead)
        torch.cuda.synchronize()
    return median(times), _idle_share(profiled)


def _idle_share(profiled: profile) -> float:
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiled.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return 1.0 - busy / (end - spans[0][0])
