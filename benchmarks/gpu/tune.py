"""Measures the configurations of the attention kernels on this machine's GPU and stores the fastest.

`python -m benchmarks.gpu.tune` writes to the cache folder, where workers of this machine look
(`engine.kernels.triton.attention.tuning`); `--ship` writes into the package. It measures the shapes named here, or
those given with `--shape HEADS/KV_HEADS/HEAD_DIM`, in that order, and stores each choice at once, so that an
interrupted run keeps the shapes that it has measured. `--rehearse` runs it without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources, PTXASError
from triton.runtime.jit import JITFunction

from benchmarks.gpu.bench_device import BenchDevice, RehearsalDevice
from benchmarks.gpu.kernels import paged
from engine.kernels.kv_quantization import quantize
from engine.kernels.triton.attention import paged_decode, paged_latent, paged_prefill, tuning
from engine.kernels.triton.attention.tuning import KernelConfig

_SHAPES = ("32/8/128", "16/8/128", "16/8/64", "32/32/96", "16/8/256")  # Llama-3.1-8B, Qwen3-0.6B, and other head dims
_LATENTS = ((16, 1), (128, 1), (128, 2048))  # heads and queries
_STORED = (None, torch.float8_e4m3fn, torch.int8)
_PAGE_SIZE = 16
_GAIN = 1.02  # less is not worth an entry
_DOES_NOT_FIT = (OutOfResources, PTXASError)  # more shared memory or registers than there are
_REPEATS = 15


@dataclass(frozen=True, slots=True)
class TuningCase:
    """A kernel and shape to choose a configuration for."""

    kernel: str
    shape: str
    default: KernelConfig
    candidates: list[KernelConfig]
    call: Callable[[KernelConfig], None]


def fastest(bench: BenchDevice, case: TuningCase) -> tuple[KernelConfig, float]:
    """Returns the fastest configuration, and how many times as fast as the default it is.

    The default stays if the gain is small or if no configuration runs.
    """
    configs = list(dict.fromkeys([case.default, *case.candidates]))
    compile_all(bench, case.call, configs)
    times = {}
    for config in configs:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(*_DOES_NOT_FIT):
            times[config] = bench.seconds(functools.partial(case.call, config), _REPEATS)
    best = min(times, key=lambda config: times[config], default=case.default)
    gain = times[case.default] / times[best] if case.default in times else float("inf")
    return (best, gain) if gain > _GAIN else (case.default, 1.0)


def compile_all(bench: BenchDevice, call: Callable[[KernelConfig], None], configs: list[KernelConfig]) -> None:
    """Compiles in parallel on all cores without launching; a configuration that fails fails again when it is
    measured.
    """
    if bench.is_rehearsal:
        return
    launch = JITFunction.run

    def compile_only(kernel: JITFunction[Any], *args: Any, warmup: bool, **options: Any) -> Any:
        return launch(kernel, *args, warmup=True, **options)

    JITFunction.run = compile_only
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),  # Triton prints kernels that ptxas refuses
            ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
            triton.AsyncCompileMode(pool, ignore_errors=True),
        ):
            for config in configs:
                call(config)
    finally:
        JITFunction.run = launch


def decode_case(bench: BenchDevice, heads: int, kv_heads: int, dim: int, stored: torch.dtype | None) -> TuningCase:
    batch, context = bench.pick((64, 8192), (2, 40))
    meta, num_pages = paged([1] * batch, [context] * batch, _PAGE_SIZE, bench.device)
    q, pool, scales = bench.noise(batch, heads, dim), bench.noise(num_pages, 2, kv_heads, _PAGE_SIZE, dim), None
    if stored is not None:
        pool, scales = quantize(pool, stored)
    out, groups = torch.empty_like(q), heads // kv_heads

    def call(config: KernelConfig) -> None:
        paged_decode.paged_decode(
            q, pool, meta.page_table_BP, meta.context_lens_B, out,
            scale=0.1, window=None, max_context_len=meta.max_context_len, scales=scales, config=config,
        )  # fmt: skip

    default = paged_decode.default_config(pool, groups)
    shape = paged_decode.tuning_shape(q, pool, groups)
    return TuningCase("paged_decode", shape, default, paged_decode.candidates(default), call)


def prefill_case(bench: BenchDevice, heads: int, kv_heads: int, dim: int) -> TuningCase:
    queries, context = bench.pick((4096, 8192), (20, 40))
    meta, num_pages = paged([queries], [context], _PAGE_SIZE, bench.device)
    q, pool = bench.noise(queries, heads, dim), bench.noise(num_pages, 2, kv_heads, _PAGE_SIZE, dim)
    out, groups = torch.empty_like(q), heads // kv_heads

    def call(config: KernelConfig) -> None:
        paged_prefill.paged_prefill(
            q, pool, meta.page_table_BP, meta.query_start_B1, meta.context_lens_B, out,
            scale=0.1, window=None, max_query_len=queries, max_context_len=context, config=config,
        )  # fmt: skip

    default = paged_prefill.default_config(q, pool, groups, queries)
    shape = paged_prefill.tuning_shape(q, pool, groups, default.rows)
    return TuningCase("paged_prefill", shape, default, paged_prefill.candidates(default), call)


def latent_case(bench: BenchDevice, heads: int, queries: int) -> TuningCase:
    batch, context = bench.pick((64 if queries == 1 else 1, 8192), (1, 40))
    half, rank = bench.pick((288, 512), (16, 24))
    meta, num_pages = paged([queries] * batch, [context] * batch, _PAGE_SIZE, bench.device)
    q, pool = bench.noise(batch * queries, heads, 2 * half), bench.noise(num_pages, 2, 1, _PAGE_SIZE, half)
    out = torch.empty(batch * queries, heads, rank, device=bench.device, dtype=q.dtype)

    def call(config: KernelConfig) -> None:
        paged_latent.paged_latent(
            q, pool, meta.page_table_BP, meta.query_start_B1, meta.context_lens_B, out,
            scale=0.1, max_query_len=queries, max_context_len=context, config=config,
        )  # fmt: skip

    default = paged_latent.default_config(q, pool, queries)
    shape = paged_latent.tuning_shape(q, pool, default.rows)
    return TuningCase("paged_latent", shape, default, paged_latent.candidates(default), call)


def cases(bench: BenchDevice, shapes: list[str] | None) -> Iterator[TuningCase]:
    """Yields the cases one at a time, since each holds gigabytes of KV."""
    for shape in shapes or bench.pick(list(_SHAPES), ["2/1/16"]):
        heads, kv_heads, dim = map(int, shape.split("/"))
        for stored in _STORED:
            yield decode_case(bench, heads, kv_heads, dim, stored)
        yield prefill_case(bench, heads, kv_heads, dim)
    for heads, queries in bench.pick(_LATENTS, ((2, 1), (2, 3))):
        yield latent_case(bench, heads, queries)


def tune(bench: BenchDevice, file: Path, shapes: list[str] | None = None, seconds: float = 540) -> int:
    """Chooses configurations for up to `seconds`, stores each at once, and returns their number."""
    end_s, count = time.monotonic() + seconds, 0
    for case in cases(bench, shapes):
        if time.monotonic() > end_s:
            print(f"{case.kernel}, {case.shape} and the rest were not measured: {seconds:.0f} s are over")
            break
        if bench.is_rehearsal:
            del case.candidates[2:]
        started_s = time.monotonic()
        config, gain = fastest(bench, case)
        tuning.save_tuned(file, {case.kernel: {case.shape: config}})
        took_s = time.monotonic() - started_s
        print(f"{case.kernel}, {case.shape}: {config}, {gain:.2f} times as fast as the default, {took_s:.0f} s")
        sys.stdout.flush()
        count += 1
    return count


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.tune", description=__doc__)
    parser.add_argument("--shape", action="append", help="query heads/KV heads/head dim; may be given several times")
    parser.add_argument("--ship", action="store_true", help="write into the package instead of the cache folder")
    parser.add_argument("--file", type=Path, help="write there")
    parser.add_argument(
        "--seconds", type=float, default=540, help="no shape starts after this time; default: %(default)s"
    )
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, at toy shapes; TRITON_INTERPRET=1")
    arguments = parser.parse_args()
    if arguments.rehearse and arguments.file is None:
        print("benchmarks.gpu.tune: a rehearsal measures nothing; give --file FILE", file=sys.stderr)
        return 2
    if not arguments.rehearse and not torch.cuda.is_available():
        print(
            "benchmarks.gpu.tune needs a CUDA device; none was found. Give --rehearse to run it without",
            file=sys.stderr,
        )
        return 2
    bench = RehearsalDevice() if arguments.rehearse else BenchDevice()
    file = arguments.file
    if file is None:
        name = tuning.device_name(bench.device)
        file = tuning.SHIPPED / f"{name}.json" if arguments.ship else tuning.tuned_file(name)
    tune(bench, file, arguments.shape, arguments.seconds)
    print(f"written to {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
