"""Measures the attention kernels' configurations on the GPU at hand and keeps the fastest (`engine.kernels.tuning`).

`python -m benchmarks.tune` writes to the cache folder, where workers of this machine look; `--ship` into the package.
Only shapes that are named here, or given with `--shape HEADS/KV_HEADS/HEAD_DIM`, are measured; about a minute each.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.gpu import seconds
from benchmarks.gpu_kernels import noise, paged
from engine.kernels import paged_decode, paged_latent, paged_prefill, tuning
from engine.kernels.kv_codes import quantize
from engine.kernels.tuning import KernelConfig, Tuned

_SHAPES = ("32/8/128", "16/8/128", "16/8/64", "32/32/96", "16/8/256")  # Llama-3.1-8B, Qwen3-0.6B, and other head dims
_PAGE_SIZE = 16


def fastest(
    call: Callable[[KernelConfig], None], default: KernelConfig, candidates: list[KernelConfig]
) -> tuple[KernelConfig, float]:
    """And how many times as fast as the default it is; one within 2 % of the default is not worth an entry."""
    times = {}
    for config in {default: None} | dict.fromkeys(candidates):
        try:
            times[config] = seconds(functools.partial(call, config))
        except OutOfResources:
            continue  # more shared memory or registers than the device has
    best = min(times, key=lambda config: times[config])
    gain = times[default] / times[best]
    return (best, gain) if gain > 1.02 else (default, 1.0)


def tune_decode(heads: int, kv_heads: int, dim: int, stored: torch.dtype | None) -> tuple[str, KernelConfig, float]:
    meta, num_pages = paged([1] * 64, [8192] * 64, _PAGE_SIZE)
    q, pool, scales = noise(64, heads, dim), noise(num_pages, 2, kv_heads, _PAGE_SIZE, dim), None
    if stored is not None:
        pool, scales = quantize(pool, stored)
    out = torch.empty_like(q)
    groups = heads // kv_heads

    def call(config: KernelConfig) -> None:
        paged_decode.paged_decode(
            q, pool, meta.page_table_BP, meta.context_lens_B, out,
            scale=0.1, window=None, max_context_len=meta.max_context_len, scales=scales, config=config,
        )  # fmt: skip

    default = paged_decode.default_config(pool, groups)
    best, gain = fastest(call, default, paged_decode.candidates(default))
    return paged_decode.tuning_shape(q, pool, groups), best, gain


def tune_prefill(heads: int, kv_heads: int, dim: int) -> tuple[str, KernelConfig, float]:
    meta, num_pages = paged([4096], [8192], _PAGE_SIZE)
    q, pool = noise(4096, heads, dim), noise(num_pages, 2, kv_heads, _PAGE_SIZE, dim)
    out, groups = torch.empty_like(q), heads // kv_heads

    def call(config: KernelConfig) -> None:
        paged_prefill.paged_prefill(
            q, pool, meta.page_table_BP, meta.query_start_B1, meta.context_lens_B, out,
            scale=0.1, window=None, max_query_len=4096, max_context_len=8192, config=config,
        )  # fmt: skip

    default = paged_prefill.default_config(q, pool, groups, 4096)
    best, gain = fastest(call, default, paged_prefill.candidates(default))
    return paged_prefill.tuning_shape(q, pool, groups, default.rows), best, gain


def tune_latent(heads: int, queries: int) -> tuple[str, KernelConfig, float]:
    batch = 64 if queries == 1 else 1
    meta, num_pages = paged([queries] * batch, [8192] * batch, _PAGE_SIZE)
    q, pool = noise(batch * queries, heads, 576), noise(num_pages, 2, 1, _PAGE_SIZE, 288)
    out = torch.empty(batch * queries, heads, 512, device="cuda", dtype=q.dtype)

    def call(config: KernelConfig) -> None:
        paged_latent.paged_latent(
            q, pool, meta.page_table_BP, meta.query_start_B1, meta.context_lens_B, out,
            scale=0.1, max_query_len=queries, max_context_len=8192, config=config,
        )  # fmt: skip

    default = paged_latent.default_config(q, pool, queries)
    best, gain = fastest(call, default, paged_latent.candidates(default))
    return paged_latent.tuning_shape(q, pool, default.rows), best, gain


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", action="append", help="query heads/KV heads/head dim; may be given several times")
    parser.add_argument("--ship", action="store_true", help="write into the package instead of the cache folder")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks.tune needs a CUDA device; none was found", file=sys.stderr)
        return 2
    found: Tuned = {}

    def keep(kernel: str, result: tuple[str, KernelConfig, float]) -> None:
        shape, config, gain = result
        found.setdefault(kernel, {})[shape] = config
        print(f"{kernel}, {shape}: {config}, {gain:.2f} times as fast as the default", flush=True)

    for shape in arguments.shape or _SHAPES:
        heads, kv_heads, dim = map(int, shape.split("/"))
        for stored in (None, torch.float8_e4m3fn, torch.int8):
            keep("paged_decode", tune_decode(heads, kv_heads, dim, stored))
        keep("paged_prefill", tune_prefill(heads, kv_heads, dim))
    for heads, queries in ((16, 1), (128, 1), (128, 2048)):
        keep("paged_latent", tune_latent(heads, queries))
    name = tuning.device_name(torch.device("cuda"))
    file = Path(tuning.__file__).parent / "tuned" / f"{name}.json" if arguments.ship else tuning.tuned_file(name)
    tuning.save_tuned(file, found)
    print(f"written to {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
