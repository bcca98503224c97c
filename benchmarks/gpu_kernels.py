"""Each Triton kernel on a CUDA device beside what the device can do, or beside torch's own way to the same result.

Attention over pages is held against the copy bandwidth (decode) and against the rate of a large matrix product measured
here (prefill); what only moves memory against the copy bandwidth; draws against torch's operations. Small kernels are
timed inside a CUDA graph, as they run in a step, over more memory than the cache holds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.report import Row
from engine.draws import Draws
from engine.kernels import AttentionBackend, select_backend
from engine.kernels.copy_pages_triton import copy_pages
from engine.kernels.kv_codes import quantize
from engine.kernels.metadata import AttentionMetadata, KvLayer, Lengths, QkNorms
from engine.kernels.sample import draw_tokens
from engine.layers.ops import LayerOps
from penstock.errors import ConfigError
from penstock.types import SamplingParams

_CALLS = 20  # in a graph
Seconds = Callable[[Callable[[], object]], float]


def in_graph(call: Callable[[], object], seconds: Seconds) -> float:
    """Of one call, among many in a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            call()
    return seconds(graph.replay) / _CALLS


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def paged(query_lens: list[int], context_lens: list[int], page_size: int) -> tuple[AttentionMetadata, int]:
    """Sequences on shuffled pages, and how many pages they need."""
    counts = [-(-length // page_size) for length in context_lens]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)).int()
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    slots, taken = [], 0
    for row, (count, queries, context) in enumerate(zip(counts, query_lens, context_lens, strict=True)):
        table[row, :count] = order[taken : taken + count]
        taken += count
        positions = torch.arange(context - queries, context)
        slots.append(torch.stack([table[row, positions // page_size].long(), positions % page_size]))
    page, offset = torch.cat(slots, dim=1).cuda()
    meta = AttentionMetadata(
        page_table_BP=table.cuda(),
        query_start_B1=torch.tensor([0, *query_lens]).cumsum(0).int().cuda(),
        context_lens_B=torch.tensor(context_lens, dtype=torch.int32).cuda(),
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
        num_decodes=sum(length == 1 for length in query_lens),
        slot_page_T=page,
        slot_offset_T=offset,
        lengths=Lengths(np.array(context_lens), np.cumsum([0, *query_lens])),
    )
    return meta, taken


def decode_rows(backend: AttentionBackend, bytes_per_s: float, seconds: Seconds) -> Iterator[Row]:
    """4 GB of KV and more, one long sequence, every page size and head dim, and the slope of 8-bit pages."""
    for batch, context, heads, dim, page_size in (
        (64, 16384, (32, 8), 128, 16),
        (256, 4096, (32, 8), 128, 64),
        (1, 131072, (32, 8), 128, 32),
        (64, 16384, (16, 8), 128, 16),
        (64, 16384, (16, 8), 64, 16),
        (32, 16384, (32, 8), 96, 16),
        (32, 16384, (16, 8), 256, 16),
    ):
        meta, num_pages = paged([1] * batch, [context] * batch, page_size)
        q, pool = noise(batch, heads[0], dim), noise(num_pages, 2, heads[1], page_size, dim)
        found = seconds(lambda: backend.paged_attention(q, pool, meta, dim**-0.5, None))  # noqa: B023
        at = f"{batch} x {context}, {heads[0]}/{heads[1]} heads of {dim}, page {page_size}"
        kv_bytes = 2 * batch * context * heads[1] * dim * 2
        yield Row(f"paged decode, {at}", kv_bytes / found / 1e9, "GB/s", "device copy", bytes_per_s / 1e9)
    for name, stored in (("fp8", torch.float8_e4m3fn), ("int8", torch.int8)):
        for batch in (16, 64):
            meta, num_pages = paged([1] * batch, [8192] * batch, 16)
            q, pool = noise(batch, 32, 128), noise(num_pages, 2, 8, 16, 128)
            codes, scales = quantize(pool, stored)
            plain_s = seconds(lambda: backend.paged_attention(q, pool, meta, 0.1, None))  # noqa: B023
            codes_s = seconds(lambda: backend.paged_attention(q, codes, meta, 0.1, None, None, scales))  # noqa: B023
            yield Row(f"paged decode, {name}, {batch} x 8192", codes_s * 1e6, "us", "bf16 pages", plain_s * 1e6)


def prefill_rows(backend: AttentionBackend, seconds: Seconds) -> Iterator[Row]:
    left, right = noise(8192, 8192), noise(8192, 8192)
    peak = 2 * 8192**3 / seconds(lambda: left @ right)
    yield Row("matrix product, 8192 cubed, bf16", peak / 1e12, "TFLOP/s")
    for queries, context, dim in (
        (8192, 8192, 128),
        (2048, 2048, 128),
        (512, 8192, 128),
        (32, 32768, 128),
        (8192, 8192, 64),
    ):
        meta, num_pages = paged([queries], [context], 16)
        q, pool = noise(queries, 32, dim), noise(num_pages, 2, 8, 16, dim)
        found = seconds(lambda: backend.paged_attention(q, pool, meta, 0.1, None))  # noqa: B023
        products = 4 * 32 * dim * queries * (context - queries / 2)  # half of what stands on the diagonal is masked
        at = f"{queries} of {context}, heads of {dim}"
        yield Row(f"paged prefill, {at}", products / found / 1e12, "TFLOP/s", "matrix product", peak / 1e12)
    for heads in (16, 128):
        meta, num_pages = paged([1] * 64, [8192] * 64, 64)
        q, pool = noise(64, heads, 576), noise(num_pages, 2, 1, 64, 288)
        found = seconds(lambda: backend.latent_attention(q, pool, meta, 0.1, 512))  # noqa: B023
        products = 2 * heads * (576 + 512) * 64 * 8192
        yield Row(
            f"latents, 64 x 8192, {heads} heads", products / found / 1e12, "TFLOP/s", "matrix product", peak / 1e12
        )


def library_rows(own: AttentionBackend, seconds: Seconds) -> Iterator[Row]:
    """What is installed of `engine.attention`'s libraries, beside our own kernels: decodes, chunks, and both at once. A
    step is planned before it is timed; what planning takes of the host is a row of its own."""
    shapes = {
        "64 decodes of 2048": ([1] * 64, [2048] * 64),
        "chunk of 2048": ([2048], [2048]),
        "chunk of 512 behind 7680": ([512], [8192]),
        "32 decodes beside it": ([1] * 32 + [512], [2048] * 32 + [8192]),
    }
    for name in ("flashinfer", "varlen"):
        try:
            library = select_backend(name, torch.device("cuda"))
        except ConfigError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        for at, (query_lens, context_lens) in shapes.items():
            meta, num_pages = paged(query_lens, context_lens, 16)
            q, pool = noise(sum(query_lens), 32, 128), noise(num_pages, 2, 8, 16, 128)
            library.paged_attention(q, pool, meta, 0.1, None)
            torch.cuda.synchronize()
            started_s = time.perf_counter()
            library.paged_attention(q, pool, replace(meta), 0.1, None)
            planning_s = time.perf_counter() - started_s
            theirs_s = seconds(lambda: library.paged_attention(q, pool, meta, 0.1, None))  # noqa: B023
            ours_s = seconds(lambda: own.paged_attention(q, pool, meta, 0.1, None))  # noqa: B023
            yield Row(f"{name}, {at}", theirs_s * 1e6, "us", "ours", ours_s * 1e6)
            yield Row(f"{name}, {at}, first call of a step on the host", planning_s * 1e6, "us")


def memory_rows(backend: AttentionBackend, ops: LayerOps, bytes_per_s: float, seconds: Seconds) -> Iterator[Row]:
    """What is read and written once, as a share of the copy bandwidth."""
    tokens, hidden, inner = 16384, 4096, 14336
    x, residual, weight, gate_up = noise(tokens, hidden), noise(tokens, hidden), noise(hidden), noise(tokens, 2 * inner)
    qkv, cos_sin = noise(tokens, 48, 128), torch.randn(tokens, 2, 64, device="cuda")
    norms = QkNorms(noise(128), noise(128), 1e-6)
    meta, num_pages = paged([tokens], [tokens], 16)
    layer = KvLayer(noise(num_pages, 2, 8, 16, 128))
    pages = torch.randint(0, 255, (2048, 1 << 21), dtype=torch.uint8, device="cuda")
    order = torch.randperm(1024).tolist()
    moves: dict[str, tuple[int, Callable[[], object]]] = {
        "norm with residual": (4 * x.nbytes, lambda: ops.add_rms_norm(x, residual, weight, 1e-5)),
        "gates": (gate_up.nbytes * 3 // 2, lambda: ops.silu_and_mul(gate_up)),
        "rotation and pages": (2 * qkv.nbytes, lambda: backend.store_qkv(qkv, cos_sin, None, layer, meta, ops)),
        "norms, rotation and pages": (2 * qkv.nbytes, lambda: backend.store_qkv(qkv, cos_sin, norms, layer, meta, ops)),
    }
    for name, (num_bytes, call) in moves.items():
        rate = num_bytes / in_graph(call, seconds)
        yield Row(f"{name}, {tokens} tokens", rate / 1e9, "GB/s", "device copy", bytes_per_s / 1e9)
    words = pages.view(torch.int64)
    listed = (torch.tensor([1024 + page for page in order], device="cuda"), torch.tensor(order, device="cuda"))
    for name, numbers in (("", ([1024 + page for page in order], order)), (", numbers on the device", listed)):
        found = seconds(lambda: copy_pages(words, words, *numbers))  # noqa: B023
        rate = 2 * pages.nbytes / 2 / found
        yield Row(f"gather of 1024 pages of 2 MiB{name}", rate / 1e9, "GB/s", "device copy", bytes_per_s / 1e9)


def draw_rows(seconds: Seconds) -> Iterator[Row]:
    """64 and 256 rows of a vocabulary of 128256."""
    for batch in (64, 256):
        logits = torch.randn(batch, 128_256, device="cuda") * 3
        for name, sampling in (
            ("greedy", SamplingParams(max_tokens=1, temperature=0.0)),
            ("plain", SamplingParams(max_tokens=1, temperature=1.0)),
            ("top-k and top-p", SamplingParams(max_tokens=1, temperature=1.0, top_k=50, top_p=0.9)),
        ):
            draws = Draws.of([sampling] * batch, [7] * batch, logits.shape[1], logits.device)
            ours_s = in_graph(lambda: draw_tokens(logits, draws), seconds)  # noqa: B023
            base, call = {
                "greedy": ("torch argmax", lambda: logits.argmax(-1)),  # noqa: B023
                "plain": ("torch softmax and running sum", lambda: logits.softmax(-1).cumsum(-1)),  # noqa: B023
                "top-k and top-p": ("torch sort", lambda: F.softmax(logits, -1).sort(-1)),  # noqa: B023
            }[name]
            theirs_s = seconds(call)
            yield Row(f"draws, {name}, batch {batch}", ours_s * 1e6, "us", base, theirs_s * 1e6)


def kernel_rows(backend: AttentionBackend, ops: LayerOps, bytes_per_s: float, seconds: Seconds) -> Iterator[Row]:
    yield from decode_rows(backend, bytes_per_s, seconds)
    yield from prefill_rows(backend, seconds)
    yield from library_rows(backend, seconds)
    yield from memory_rows(backend, ops, bytes_per_s, seconds)
    yield from draw_rows(seconds)
