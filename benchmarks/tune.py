"""Measures the attention kernels' configurations on the GPU at hand and keeps the fastest (`engine.kernels.tuning`).

`python -m benchmarks.tune` writes to the cache folder, where workers of this machine look; `--ship` into the package.
Only shapes that are named here, or given with `--shape HEADS/KV_HEADS/HEAD_DIM`, are measured, in that order; what was
found is written after each, so that a run that is cut short has the shapes before. `--rehearse` runs it without a GPU.
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

from benchmarks.gpu_kernels import paged
from benchmarks.ground import Ground, Rehearsal
from engine.kernels import paged_decode, paged_latent, paged_prefill, tuning
from engine.kernels.kv_codes import quantize
from engine.kernels.tuning import KernelConfig

_SHAPES = ("32/8/128", "16/8/128", "16/8/64", "32/32/96", "16/8/256")  # Llama-3.1-8B, Qwen3-0.6B, and other head dims
_LATENTS = ((16, 1), (128, 1), (128, 2048))  # heads and queries
_STORED = (None, torch.float8_e4m3fn, torch.int8)
_PAGE_SIZE = 16
_GAIN = 1.02  # less is not worth an entry
_DOES_NOT_FIT = (OutOfResources, PTXASError)  # more shared memory or registers than there are
_REPEATS = 15


@dataclass(frozen=True, slots=True)
class Choice:
    """What is chosen for one kernel and shape."""

    kernel: str
    shape: str
    default: KernelConfig
    candidates: list[KernelConfig]
    call: Callable[[KernelConfig], None]


def fastest(ground: Ground, choice: Choice) -> tuple[KernelConfig, float]:
    """And how many times as fast as the default it is. Nothing where not even the default runs."""
    configs = list(dict.fromkeys([choice.default, *choice.candidates]))
    compile_all(ground, choice.call, configs)
    times = {}
    for config in configs:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(*_DOES_NOT_FIT):
            times[config] = ground.seconds(functools.partial(choice.call, config), _REPEATS)
    best = min(times, key=lambda config: times[config], default=choice.default)
    gain = times[choice.default] / times[best] if choice.default in times else float("inf")
    return (best, gain) if gain > _GAIN else (choice.default, 1.0)


def compile_all(ground: Ground, call: Callable[[KernelConfig], None], configs: list[KernelConfig]) -> None:
    """Side by side on all cores; nothing is launched. What does not compile shows when it is measured."""
    if ground.is_rehearsal:
        return
    launch = JITFunction.run

    def compile_only(kernel: JITFunction[Any], *args: Any, warmup: bool, **options: Any) -> Any:
        return launch(kernel, *args, warmup=True, **options)

    JITFunction.run = compile_only
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),  # where Triton puts a kernel that ptxas refuses, whole
            ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
            triton.AsyncCompileMode(pool, ignore_errors=True),
        ):
            for config in configs:
                call(config)
    finally:
        JITFunction.run = launch


def decode_choice(ground: Ground, heads: int, kv_heads: int, dim: int, stored: torch.dtype | None) -> Choice:
    batch, context = ground.pick((64, 8192), (2, 40))
    meta, num_pages = paged([1] * batch, [context] * batch, _PAGE_SIZE, ground.device)
    q, pool, scales = ground.noise(batch, heads, dim), ground.noise(num_pages, 2, kv_heads, _PAGE_SIZE, dim), None
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
    return Choice("paged_decode", shape, default, paged_decode.candidates(default), call)


def prefill_choice(ground: Ground, heads: int, kv_heads: int, dim: int) -> Choice:
    queries, context = ground.pick((4096, 8192), (20, 40))
    meta, num_pages = paged([queries], [context], _PAGE_SIZE, ground.device)
    q, pool = ground.noise(queries, heads, dim), ground.noise(num_pages, 2, kv_heads, _PAGE_SIZE, dim)
    out, groups = torch.empty_like(q), heads // kv_heads

    def call(config: KernelConfig) -> None:
        paged_prefill.paged_prefill(
            q, pool, meta.page_table_BP, meta.query_start_B1, meta.context_lens_B, out,
            scale=0.1, window=None, max_query_len=queries, max_context_len=context, config=config,
        )  # fmt: skip

    default = paged_prefill.default_config(q, pool, groups, queries)
    shape = paged_prefill.tuning_shape(q, pool, groups, default.rows)
    return Choice("paged_prefill", shape, default, paged_prefill.candidates(default), call)


def latent_choice(ground: Ground, heads: int, queries: int) -> Choice:
    batch, context = ground.pick((64 if queries == 1 else 1, 8192), (1, 40))
    half, rank = ground.pick((288, 512), (16, 24))
    meta, num_pages = paged([queries] * batch, [context] * batch, _PAGE_SIZE, ground.device)
    q, pool = ground.noise(batch * queries, heads, 2 * half), ground.noise(num_pages, 2, 1, _PAGE_SIZE, half)
    out = torch.empty(batch * queries, heads, rank, device=ground.device, dtype=q.dtype)

    def call(config: KernelConfig) -> None:
        paged_latent.paged_latent(
            q, pool, meta.page_table_BP, meta.query_start_B1, meta.context_lens_B, out,
            scale=0.1, max_query_len=queries, max_context_len=context, config=config,
        )  # fmt: skip

    default = paged_latent.default_config(q, pool, queries)
    shape = paged_latent.tuning_shape(q, pool, default.rows)
    return Choice("paged_latent", shape, default, paged_latent.candidates(default), call)


def choices(ground: Ground, shapes: list[str] | None) -> Iterator[Choice]:
    """Made one at a time: each has gigabytes of KV."""
    for shape in shapes or ground.pick(list(_SHAPES), ["2/1/16"]):
        heads, kv_heads, dim = map(int, shape.split("/"))
        for stored in _STORED:
            yield decode_choice(ground, heads, kv_heads, dim, stored)
        yield prefill_choice(ground, heads, kv_heads, dim)
    for heads, queries in ground.pick(_LATENTS, ((2, 1), (2, 3))):
        yield latent_choice(ground, heads, queries)


def tune(ground: Ground, file: Path, shapes: list[str] | None = None, seconds: float = 540) -> int:
    """How many choices were made in that time; each is written at once."""
    end_s, count = time.monotonic() + seconds, 0
    for choice in choices(ground, shapes):
        if time.monotonic() > end_s:
            print(f"{choice.kernel}, {choice.shape} and what follows: not measured, {seconds:.0f} s are over")
            break
        if ground.is_rehearsal:
            del choice.candidates[2:]
        started_s = time.monotonic()
        config, gain = fastest(ground, choice)
        tuning.save_tuned(file, {choice.kernel: {choice.shape: config}})
        took_s = time.monotonic() - started_s
        print(f"{choice.kernel}, {choice.shape}: {config}, {gain:.2f} times as fast as the default, {took_s:.0f} s")
        sys.stdout.flush()
        count += 1
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", action="append", help="query heads/KV heads/head dim; may be given several times")
    parser.add_argument("--ship", action="store_true", help="write into the package instead of the cache folder")
    parser.add_argument("--file", type=Path, help="write there")
    parser.add_argument("--seconds", type=float, default=540, help="after which no shape begins; %(default)s")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, at toy shapes; TRITON_INTERPRET=1")
    arguments = parser.parse_args()
    if arguments.rehearse and arguments.file is None:
        print("benchmarks.tune: a rehearsal measures nothing; give --file FILE", file=sys.stderr)
        return 2
    if not arguments.rehearse and not torch.cuda.is_available():
        print("benchmarks.tune needs a CUDA device; none was found. Give --rehearse to run it without", file=sys.stderr)
        return 2
    ground = Rehearsal() if arguments.rehearse else Ground()
    file = arguments.file
    if file is None:
        name = tuning.device_name(ground.device)
        file = Path(tuning.__file__).parent / "tuned" / f"{name}.json" if arguments.ship else tuning.tuned_file(name)
    tune(ground, file, arguments.shape, arguments.seconds)
    print(f"written to {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
