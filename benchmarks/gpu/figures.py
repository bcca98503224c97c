"""Measures the figures that an engine at the roofline must meet, each as a share of the device's rate in the same run.

Rows named "check" have the wanted figure as their baseline: a ratio of at least 1 meets it, or of at most 1 where the
baseline says "at most". They come before all other rows, so that an interrupted run has them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.common.report import Row
from benchmarks.gpu.bench_device import BenchDevice
from benchmarks.gpu.checks import agreement_rows
from benchmarks.gpu.kernels import TOY_HEADS, decode_s
from benchmarks.gpu.steps import AHEAD, PROMPT, Ceilings, LoadedModel, decode_rows, loaded, prompt_row
from engine.kernels.attention_interface import AttentionBackend

DECODE_ATTENTION = 0.90  # share of the copy bandwidth, at 4 GB of KV or more
CODES_SLOPE = 0.55  # largest share of the cost of a token of context in bf16 pages
ONE_SEQUENCE = 0.85  # share of the copy bandwidth
WHOLE_STEP = 0.75  # share of the roofline, at batches of 64 and 256
PREFILL = 0.70  # share of the rate of a large matrix product, at a prompt of 8192


def measure_ceilings(bench: BenchDevice) -> tuple[Ceilings, list[Row]]:
    """Measures the device's limits: a large copy and a large matrix product."""
    num_bytes, size = bench.pick((4 << 30, 8192), (1 << 16, 64))
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    bytes_per_s = 2 * num_bytes / bench.seconds(lambda: target.copy_(source))
    left, right = bench.noise(size, size), bench.noise(size, size)
    products_per_s = 2 * size**3 / bench.seconds(lambda: left @ right)
    rows = [
        Row("device copy, read and written", bytes_per_s / 1e9, "GB/s"),
        Row(f"matrix product, {size} cubed, bf16", products_per_s / 1e12, "TFLOP/s"),
    ]
    return Ceilings(bytes_per_s, products_per_s), rows


def attention_figures(bench: BenchDevice, backend: AttentionBackend, ceilings: Ceilings) -> Iterator[Row]:
    """Yields one layer of Llama-3.1-8B at 4.3 GB of KV, and the cost of a token of context in bf16, fp8 and int8."""
    heads, dim = bench.pick((32, 8), TOY_HEADS), bench.pick(128, 16)
    for batch, context, page_size in bench.pick([(64, 16384, 16), (256, 4096, 64)], [(2, 40, 16)]):
        found, kv_bytes = decode_s(bench, backend, batch, context, heads, dim, page_size)
        at = f"paged decode, {batch} x {context}, page {page_size}"
        yield Row(at, kv_bytes / found / 1e9, "GB/s", "device copy", ceilings.bytes_per_s / 1e9)
        yield _check(at, kv_bytes / found / ceilings.bytes_per_s, "of the copy bandwidth", DECODE_ATTENTION)
    batch, (near, far) = bench.pick(64, 2), bench.pick((2048, 16384), (20, 40))
    slopes = {}
    for stored in (None, torch.float8_e4m3fn, torch.int8):
        times = [decode_s(bench, backend, batch, context, heads, dim, 16, stored)[0] for context in (near, far)]
        slopes[stored] = (times[1] - times[0]) / (batch * (far - near))
    for stored, name in ((torch.float8_e4m3fn, "fp8"), (torch.int8, "int8")):
        at = f"a token of context in {name} pages, {near} to {far}"
        yield Row(at, slopes[stored] * 1e12, "ps", "bf16 pages", slopes[None] * 1e12)
        yield _check(at, slopes[stored] / (slopes[None] or 1.0), "of bf16", CODES_SLOPE, "at most")


def step_figures(bench: BenchDevice, name: str, ceilings: Ceilings) -> Iterator[Row]:
    """Yields decode steps as a worker runs them, and a prompt of 8192 tokens."""
    contexts = bench.pick({1: 576, 64: 576, 256: 576}, {1: 20, 2: 20})
    with loaded(bench, name, contexts) as (model, rows):
        yield from rows
        yield from agreement_rows(bench, model)
        yield from _decode_figures(bench, model, contexts, ceilings)
        prompt = prompt_row(bench, model, bench.pick(PROMPT, 40), ceilings)
        yield prompt
        yield _check(prompt.metric, prompt.ratio or 0.0, "of the matrix product", PREFILL)


def _decode_figures(
    bench: BenchDevice, model: LoadedModel, contexts: dict[int, int], ceilings: Ceilings
) -> Iterator[Row]:
    for (batch, _), (step, host, idle) in zip(
        contexts.items(), decode_rows(bench, model, contexts, (AHEAD,), ceilings), strict=True
    ):
        yield step
        yield host
        share, wanted = 1 / (step.ratio or 1.0), ONE_SEQUENCE if batch == 1 else WHOLE_STEP
        yield _check(step.metric, share, "of the copy bandwidth" if batch == 1 else "of the roofline", wanted)
        if idle is not None:
            yield Row(f"check: {idle.metric}", idle.value, "%", "wanted at most", idle.baseline_value)


def _check(at: str, share: float, of: str, wanted: float, kind: str = "at least") -> Row:
    return Row(f"check: {at}", share, of, f"wanted {kind}", wanted)


def is_met(row: Row) -> bool | None:
    """Returns whether a check is met, or None for a row that is not a check."""
    if row.baseline is None or not row.baseline.startswith("wanted "):
        return None
    ratio = row.ratio or 0.0
    return ratio <= 1.0 if row.baseline.endswith("at most") else ratio >= 1.0
