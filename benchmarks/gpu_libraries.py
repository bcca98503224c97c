"""What is installed of `engine.attention`'s libraries, beside our own kernels: decodes, chunks, and both at once."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.gpu_kernels import TOY_HEADS, paged
from benchmarks.ground import Ground
from benchmarks.report import Row
from engine.kernels import AttentionBackend, select_backend
from penstock.errors import ConfigError

_SHAPES = {
    "64 decodes of 2048": ([1] * 64, [2048] * 64),
    "chunk of 2048": ([2048], [2048]),
    "chunk of 512 behind 7680": ([512], [8192]),
    "32 decodes beside it": ([1] * 32 + [512], [2048] * 32 + [8192]),
}


def library_rows(ground: Ground, own: AttentionBackend) -> Iterator[Row]:
    """A step is planned before it is timed; what planning takes of the host is a row of its own."""
    (heads, kv_heads), dim = ground.pick((32, 8), TOY_HEADS), ground.pick(128, 16)
    for name in ground.pick(("flashinfer", "varlen"), ("flashinfer", "torch")):
        try:
            library = select_backend(name, ground.device)
        except ConfigError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        for at, (query_lens, context_lens) in ground.pick(_SHAPES, {"a chunk": ([3], [20])}).items():
            meta, num_pages = paged(query_lens, context_lens, 16, ground.device)
            q, pool = ground.noise(sum(query_lens), heads, dim), ground.noise(num_pages, 2, kv_heads, 16, dim)
            library.paged_attention(q, pool, meta, 0.1, None)
            ground.cuda.synchronize()
            started_s = time.perf_counter()
            library.paged_attention(q, pool, replace(meta), 0.1, None)
            planning_s = time.perf_counter() - started_s
            theirs_s = ground.seconds(lambda: library.paged_attention(q, pool, meta, 0.1, None))  # noqa: B023
            ours_s = ground.seconds(lambda: own.paged_attention(q, pool, meta, 0.1, None))  # noqa: B023
            yield Row(f"{name}, {at}", theirs_s * 1e6, "us", "ours", ours_s * 1e6)
            yield Row(f"{name}, {at}, first call of a step on the host", planning_s * 1e6, "us")
