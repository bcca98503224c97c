"""Measures whole steps as workers run them: decode steps compared with the roofline, idle time, and prompts.

Prompts are compared with the rate of a large matrix product. Scheduler, batch, forward, sampling and the copy to the
host are the worker's own; only requests and gRPC are missing.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from torch.profiler import profile

from benchmarks.common.report import Row
from benchmarks.common.shapes import (
    LLAMA_8B,
    LLAMA_135M,
    QWEN3_30B_A3B,
    QWEN3_600M,
    TOY,
    TOY_EXPERTS,
    hollow_model,
)
from benchmarks.gpu.bench_device import BenchDevice
from decode_worker.schedule.scheduler import DecodeScheduler
from engine.engine import Engine
from engine.step.compute import SampledTokens
from engine.step.plan import StepPlan
from engine.step.row_table import RowTable
from engine.step.sequence import ScheduledSequence, Sequence
from penstock.config import DecodeConfig, EngineConfig
from penstock.types import RequestId, SamplingParams

SHAPES = {
    "135M": (LLAMA_135M, "llama"),
    "0.6B": (QWEN3_600M, "qwen3"),
    "8B": (LLAMA_8B, "llama"),
    "30B-A3B": (QWEN3_30B_A3B, "qwen3_moe"),
}
PROMPT = 8192
_PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The device's limits, as measured in this run."""

    bytes_per_s: float  # bytes that a copy reads and writes
    products_per_s: float  # operations of a large bf16 matrix product, additions included


@dataclass(frozen=True, slots=True)
class Mode:
    """The way that steps are run: with CUDA graphs or not, and with the next step scheduled ahead or not."""

    name: str
    graphs: bool
    ahead: bool


AHEAD = Mode("graphs, ahead", True, True)
MODES = (AHEAD, Mode("graphs", True, False), Mode("eager", False, False))


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts that the worker computes itself between its decodes."""

    length: int
    count: int
    chunk_tokens: int  # tokens of prompts in each step


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """An engine with random weights, and the arithmetic of its shape."""

    name: str
    shape: dict[str, int]
    engine: Engine

    def layer_weights(self, batch: int | None = None) -> float:
        """Returns the number of weights that one layer multiplies a token with; given a batch, of those that it reads.

        Of experts it reads the expected number of different ones, if all are equally likely.
        """
        shape = self.shape
        heads = 2 * shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]
        inner, router = float(shape["intermediate_size"]), 0
        if (experts := shape.get("num_experts", 0)) > 0:
            chosen = shape["num_experts_per_tok"]
            used = chosen if batch is None else experts * (1 - (1 - chosen / experts) ** batch)
            inner, router = used * shape["moe_intermediate_size"], experts
        return shape["hidden_size"] * (heads * shape["head_dim"] + 3 * inner + router)

    @property
    def head_weights(self) -> int:
        return self.shape["hidden_size"] * self.shape["vocab_size"]

    def decode_floor_s(self, batch: int, context: int, ceilings: Ceilings) -> float:
        """Returns the seconds to read or multiply the weights, whichever takes longer, and to read the KV once."""
        layers = self.shape["num_hidden_layers"]
        read = layers * self.layer_weights(batch) + self.head_weights
        multiplied = layers * self.layer_weights() + self.head_weights
        kv_bytes = batch * context * self.engine.layout.page_bytes / self.engine.layout.page_size
        products_s = max(2 * read / ceilings.bytes_per_s, 2 * multiplied * batch / ceilings.products_per_s)
        return products_s + kv_bytes / ceilings.bytes_per_s

    def prompt_operations(self, tokens: int) -> float:
        """Returns the operations of a prompt that samples nothing: the last layer computes K, V and attention only."""
        shape, layers = self.shape, self.shape["num_hidden_layers"]
        qkv = shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]
        products = (layers - 1) * self.layer_weights() + shape["hidden_size"] * qkv * shape["head_dim"]
        attention = layers * 2 * shape["num_attention_heads"] * shape["head_dim"] * tokens**2
        return 2.0 * products * tokens + attention


@contextmanager
def loaded(bench: BenchDevice, name: str, contexts: dict[int, int]) -> Iterator[tuple[LoadedModel, list[Row]]]:
    """Yields an engine with room for `contexts`, by batch, and the rows about loading it; then frees its memory."""
    family = SHAPES[name][1]
    shape = bench.pick(SHAPES[name][0], TOY_EXPERTS if family == "qwen3_moe" else TOY)
    length = bench.pick(2 * PROMPT, 64)
    folder = hollow_model(shape, length, family, is_filled=bench.is_rehearsal)
    started_s = time.monotonic()
    steps = 3 * sum(_counts(bench))
    num_pages = max(batch * (-(-(context + steps) // _PAGE_SIZE) + 2) for batch, context in contexts.items())
    num_pages = max(num_pages, length // _PAGE_SIZE + 2)
    settings = bench.engine_settings() | {"num_pages": num_pages, "prefix_caching": False}
    engine = Engine.load(EngineConfig.model_validate({"model": str(folder), "page_size": _PAGE_SIZE, **settings}))
    engine.kv_pages.normal_()  # random values, since the speed of products depends on them
    fill_weights(bench, engine)
    loaded_s = time.monotonic()
    bench.warm_up(engine)
    warm_s = time.monotonic()
    bench.capture(engine)
    captured_s = time.monotonic()
    size = f"{(folder / 'model.safetensors').stat().st_size / 1e9:.3g} GB"
    rows = [
        Row(f"loading {name}, {size}", loaded_s - started_s, "s"),
        Row(f"compiling every kernel of {name}", warm_s - loaded_s, "s"),
        Row(f"capturing decode steps, {name}", captured_s - warm_s, "s"),
    ]
    try:
        yield LoadedModel(name, shape, engine), rows
    finally:
        del engine
        gc.collect()
        bench.cuda.empty_cache()


def fill_weights(bench: BenchDevice, engine: Engine) -> None:
    """Replaces the zeros of `hollow_model` on the device: norms by ones, other weights by noise. A rehearsal's weights
    are in the file, because a CPU packs them.
    """
    if bench.is_rehearsal:
        return
    seen: set[int] = set()

    def fill(thing: object) -> None:
        if isinstance(thing, torch.Tensor):
            if thing.dtype == torch.bfloat16 and thing.data_ptr() not in seen:
                seen.add(thing.data_ptr())
                thing.normal_(std=thing.shape[-1] ** -0.5) if thing.dim() > 1 else thing.fill_(1.0)
            return
        if isinstance(thing, list | tuple):
            parts = list(thing)
        elif not type(thing).__module__.startswith("engine.") or id(thing) in seen:
            return
        else:
            seen.add(id(thing))
            parts = [getattr(thing, name) for name in getattr(thing, "__slots__", ())]
            parts += list(getattr(thing, "__dict__", {}).values())
        for part in parts:
            fill(part)

    with torch.inference_mode():
        fill(engine.runner._model)


class DecodeRun:
    """Sequences that decode over whatever KV the pool holds, together with prompts, if any."""

    def __init__(self, engine: Engine, batch: int, context: int, prompts: Prompts | None = None) -> None:
        self._engine = engine
        size = engine.layout.page_size
        prompts = prompts or Prompts(0, 0, max(batch, 256))
        most = batch + prompts.count
        tokens_at_once = most + prompts.chunk_tokens
        config = DecodeConfig(max_batch_sequences=most, max_batch_tokens=tokens_at_once, watermark=0.0)
        self._chunk_tokens = prompts.chunk_tokens
        self.scheduler = DecodeScheduler(engine.pool, engine.prefix_cache, size, config, RowTable(size))
        self._sequences = []
        self._launched: deque[tuple[StepPlan, SampledTokens]] = deque()
        for number in range(batch):
            tokens = [(number * 31 + i) % engine.model.vocab_size for i in range(context + 1)]
            sampling = SamplingParams(max_tokens=10_000, temperature=0.0)
            sequence = Sequence(RequestId(str(number)), tokens, context, sampling, b"%d" % number)
            self.scheduler.track(sequence)
            sequence.pages = engine.pool.allocate(-(-context // size))
            self.scheduler.join(sequence, context)
            self._sequences.append(sequence)
        for number in range(prompts.count):
            tokens = [(number * 37 + i) % engine.model.vocab_size for i in range(prompts.length)]
            sampling = SamplingParams(max_tokens=10_000, temperature=0.0)
            sequence = Sequence(RequestId(f"prompt {number}"), tokens, prompts.length, sampling, b"%d" % number)
            self.scheduler.track(sequence)
            self.scheduler.compute_here(sequence)
            self._sequences.append(sequence)

    def step(self, ahead: bool) -> None:
        """Records the tokens of one step; with `ahead`, the next step is on the device by then."""
        if not self._launched:
            self._launch(self.scheduler.schedule(self._chunk_tokens))
        if ahead and (plan := self.scheduler.schedule_ahead(self._chunk_tokens)):
            self._launch(plan)
        self._record()

    def _record(self) -> None:
        plan, sampled = self._launched.popleft()
        tokens = sampled.wait()
        self.scheduler.record(plan, tokens.rows, tokens.chunks)

    def _launch(self, plan: StepPlan) -> None:
        before = self._launched[-1][1] if self._launched else None
        self._launched.append((plan, self._engine.compute(self._engine.prepare(plan), before)))

    def end(self) -> None:
        while self._launched:
            self._record()
        for sequence in self._sequences:
            self.scheduler.forget(sequence)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The median times of a step, and the share of idle device time, None if the profiler saw nothing."""

    step_s: float
    host_s: float  # processor time of the thread that schedules, launches and records; waiting takes none
    idle: float | None


def decode_step(
    bench: BenchDevice, engine: Engine, batch: int, context: int, mode: Mode, prompts: Prompts | None = None
) -> StepTimes:
    """Returns the times of a step."""
    graphs = engine._graphs
    engine._graphs = graphs if mode.graphs else None
    run = DecodeRun(engine, batch, context, prompts)
    warm_up, timed, profiled = _counts(bench)
    try:
        for _ in range(warm_up):
            run.step(mode.ahead)
        times, host_times = [], []
        for _ in range(timed):
            started_s, host_started_s = time.perf_counter(), time.thread_time()
            run.step(mode.ahead)
            times.append(time.perf_counter() - started_s)
            host_times.append(time.thread_time() - host_started_s)
        with profile(activities=[bench.activity]) as profiler:
            for _ in range(profiled):
                run.step(mode.ahead)
            bench.cuda.synchronize()
        return StepTimes(median(times), median(host_times), _idle_share(bench, profiler))
    finally:
        run.end()
        engine._graphs = graphs


def _counts(bench: BenchDevice) -> tuple[int, int, int]:
    """Returns the numbers of steps to warm up, to time and to profile."""
    return bench.pick((5, 40, 20), (1, 1, 1))


def _idle_share(bench: BenchDevice, profiler: profile) -> float | None:
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == bench.event_type
    )
    if not spans:
        return None
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return 1.0 - busy / max(end - spans[0][0], 1e-9)


def decode_rows(
    bench: BenchDevice, model: LoadedModel, contexts: dict[int, int], modes: tuple[Mode, ...], ceilings: Ceilings
) -> Iterator[tuple[Row, Row, Row | None]]:
    """Yields, for each batch and mode, the step time, the host's part and the idle share of the device."""
    for batch, context in contexts.items():
        for mode in modes:
            times = decode_step(bench, model.engine, batch, context, mode)
            floor_s = model.decode_floor_s(batch, context, ceilings)
            at = f"{model.name}, batch {batch} x {context}, {mode.name}"
            step = Row(f"whole step, {at}", times.step_s * 1e3, "ms", "weights and KV, once", floor_s * 1e3)
            host = Row(f"host time of a step, {at}", times.host_s * 1e6, "us", "the step", times.step_s * 1e6)
            yield step, host, _idle_row(at, times)


def _idle_row(at: str, times: StepTimes) -> Row | None:
    return None if times.idle is None else Row(f"idle between kernels, {at}", times.idle * 100, "%", "allowed", 3.0)


def prompt_step_s(bench: BenchDevice, engine: Engine, num_tokens: int) -> float:
    """Returns the seconds of a step over `num_tokens` of a prompt with one token more, so that nothing is sampled."""
    text = [number % engine.model.vocab_size for number in range(num_tokens + 1)]
    sequence = Sequence(RequestId("prompt"), text, len(text), SamplingParams(max_tokens=1, temperature=0.0), b"")
    sequence.pages = engine.pool.allocate(-(-len(text) // engine.layout.page_size))
    try:
        return bench.wall_seconds(lambda: engine.step([ScheduledSequence(sequence, num_tokens)]), 10)
    finally:
        engine.pool.release(sequence.pages)


def prompt_row(bench: BenchDevice, model: LoadedModel, tokens: int, ceilings: Ceilings) -> Row:
    """Measures one uncached prompt in one step that samples nothing."""
    took_s = prompt_step_s(bench, model.engine, tokens)
    rate = model.prompt_operations(tokens) / took_s
    at = f"prompt of {tokens}, {model.name}, {took_s * 1e3:.3g} ms"
    return Row(at, rate / 1e12, "TFLOP/s", "matrix product", ceilings.products_per_s / 1e12)


def mixed_rows(bench: BenchDevice, model: LoadedModel) -> Iterator[Row]:
    """Yields steps of a worker that computes its prompts itself, with the next step ahead and one at a time."""
    batch, context, length, chunk_tokens = bench.pick((64, 576, 2048, 512), (1, 20, 16, 8))
    prompts = Prompts(length, -(-(sum(_counts(bench)) + 1) * chunk_tokens // length), chunk_tokens)
    at = f"{model.name}, batch {batch} x {context} and {chunk_tokens} of prompts"
    alone, ahead = (decode_step(bench, model.engine, batch, context, mode, prompts) for mode in (MODES[1], AHEAD))
    yield Row(f"whole step, {at}, ahead", ahead.step_s * 1e3, "ms", "one at a time", alone.step_s * 1e3)
    for how, times in (("ahead", ahead), ("one at a time", alone)):
        if (row := _idle_row(f"{at}, {how}", times)) is not None:
            yield row


def expert_step_rows(bench: BenchDevice, name: str, ceilings: Ceilings) -> Iterator[Row]:
    """Yields decode steps of a model with experts as a worker runs them, and a prompt."""
    contexts = bench.pick({1: 576, 16: 576, 64: 576}, {2: 20})
    with loaded(bench, name, contexts) as (model, rows):
        yield from rows
        for found in decode_rows(bench, model, contexts, (AHEAD,), ceilings):
            yield from filter(None, found)
        yield prompt_row(bench, model, bench.pick(2048, 20), ceilings)


def other_step_rows(bench: BenchDevice, name: str, ceilings: Ceilings) -> Iterator[Row]:
    """Yields decode steps in every mode, mixed steps, and shorter prompts."""
    contexts = bench.pick({1: 576, 64: 576, 256: 576}, {2: 20})
    with loaded(bench, name, contexts) as (model, rows):
        yield from rows
        for found in decode_rows(bench, model, contexts, MODES, ceilings):
            yield from filter(None, found)
        yield from mixed_rows(bench, model)
        for tokens in bench.pick([512, 2048], [20]):
            yield prompt_row(bench, model, tokens, ceilings)
