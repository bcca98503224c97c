"""Each Triton kernel beside what the device can do, or beside torch's own way to the same result.

Attention over pages is held against the copy bandwidth (decode) and against the rate of a large matrix product measured
here (prefill), and against SDPA over contiguous tensors; what only moves memory against the copy bandwidth; draws
against torch's operations. Small kernels are timed inside a CUDA graph, as they run in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from benchmarks.ground import Ground
from benchmarks.report import Row
from engine.draws import Draws
from engine.kernels import AttentionBackend
from engine.kernels.copy_pages_triton import copy_pages
from engine.kernels.kv_codes import quantize
from engine.kernels.metadata import AttentionMetadata, KvLayer, Lengths, QkNorms
from engine.kernels.quantized_gemm import make_product
from engine.kernels.sample import draw_tokens
from engine.layers.ops import LayerOps
from engine.layers.quantized import Kind, quantize_weight
from penstock.types import SamplingParams

TOY_HEADS = (2, 1)


def paged(
    query_lens: list[int], context_lens: list[int], page_size: int, device: torch.device
) -> tuple[AttentionMetadata, int]:
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
    page, offset = torch.cat(slots, dim=1).to(device)
    meta = AttentionMetadata(
        page_table_BP=table.to(device),
        query_start_B1=torch.tensor([0, *query_lens]).cumsum(0).int().to(device),
        context_lens_B=torch.tensor(context_lens, dtype=torch.int32).to(device),
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
        num_decodes=sum(length == 1 for length in query_lens),
        slot_page_T=page,
        slot_offset_T=offset,
        lengths=Lengths(np.array(context_lens), np.cumsum([0, *query_lens])),
    )
    return meta, taken


def decode_s(
    ground: Ground,
    backend: AttentionBackend,
    batch: int,
    context: int,
    heads: tuple[int, int],
    dim: int,
    page_size: int,
    stored: torch.dtype | None = None,
) -> tuple[float, int]:
    """Seconds of one layer's decode attention, and the bytes of KV in bf16. Three layers lie in the pool, so that one
    is strided as in a model, if that fits."""
    meta, num_pages = paged([1] * batch, [context] * batch, page_size, ground.device)
    q, pool, scales = ground.noise(batch, heads[0], dim), ground.noise(num_pages, 2, heads[1], page_size, dim), None
    if stored is not None:
        pool, scales = quantize(pool, stored)
    found = ground.seconds(lambda: backend.paged_attention(q, pool, meta, dim**-0.5, None, None, scales))
    return found, 2 * batch * context * heads[1] * dim * 2


def decode_rows(ground: Ground, backend: AttentionBackend, bytes_per_s: float) -> Iterator[Row]:
    """One long sequence, every page size and head dim, 8-bit pages, and SDPA over the same KV in one piece."""
    for batch, context, heads, dim, page_size in ground.pick(
        [
            (1, 131072, (32, 8), 128, 32),
            (64, 16384, (16, 8), 128, 16),
            (64, 16384, (16, 8), 64, 16),
            (32, 16384, (32, 8), 96, 16),
            (32, 16384, (16, 8), 256, 16),
        ],
        [(2, 40, TOY_HEADS, 16, 16)],
    ):
        found, kv_bytes = decode_s(ground, backend, batch, context, heads, dim, page_size)
        at = f"{batch} x {context}, {heads[0]}/{heads[1]} heads of {dim}, page {page_size}"
        yield Row(f"paged decode, {at}", kv_bytes / found / 1e9, "GB/s", "device copy", bytes_per_s / 1e9)
    heads, dim = ground.pick((32, 8), TOY_HEADS), ground.pick(128, 16)
    for batch, context in ground.pick([(16, 2048), (64, 2048), (256, 1024)], [(2, 40)]):
        found, _ = decode_s(ground, backend, batch, context, heads, dim, 16)
        kv = ground.noise(2, batch, heads[1], context, dim)
        query = ground.noise(batch, heads[0], 1, dim)
        whole_s = ground.seconds(lambda: F.scaled_dot_product_attention(query, kv[0], kv[1], enable_gqa=True))  # noqa: B023
        yield Row(f"paged decode, {batch} x {context}", found * 1e6, "us", "contiguous SDPA", whole_s * 1e6)
    for stored in (torch.float8_e4m3fn, torch.int8):
        for batch, context in ground.pick([(16, 8192), (64, 8192)], [(2, 40)]):
            plain_s, _ = decode_s(ground, backend, batch, context, heads, dim, 16)
            codes_s, _ = decode_s(ground, backend, batch, context, heads, dim, 16, stored)
            at = f"{str(stored).removeprefix('torch.')}, {batch} x {context}"
            yield Row(f"paged decode, {at}", codes_s * 1e6, "us", "bf16 pages", plain_s * 1e6)


def prefill_rows(ground: Ground, backend: AttentionBackend, products_per_s: float) -> Iterator[Row]:
    for queries, context, dim in ground.pick(
        [(8192, 8192, 128), (2048, 2048, 128), (512, 8192, 128), (32, 32768, 128), (8192, 8192, 64)], [(5, 20, 16)]
    ):
        heads, kv_heads = ground.pick((32, 8), TOY_HEADS)
        meta, num_pages = paged([queries], [context], 16, ground.device)
        q, pool = ground.noise(queries, heads, dim), ground.noise(num_pages, 2, kv_heads, 16, dim)
        found = ground.seconds(lambda: backend.paged_attention(q, pool, meta, 0.1, None))  # noqa: B023
        products = 4 * heads * dim * queries * (context - queries / 2)  # half of what stands on the diagonal is masked
        at = f"{queries} of {context}, heads of {dim}"
        yield Row(f"paged prefill, {at}", products / found / 1e12, "TFLOP/s", "matrix product", products_per_s / 1e12)
        kv = ground.noise(2, 1, kv_heads, context, dim)
        query, mask = ground.noise(1, heads, queries, dim), causal_lower_right(queries, context)
        whole_s = ground.seconds(
            lambda: F.scaled_dot_product_attention(query, kv[0], kv[1], attn_mask=mask, enable_gqa=True)  # noqa: B023
        )
        yield Row(f"paged prefill, {at}", found * 1e6, "us", "contiguous SDPA", whole_s * 1e6)
    for heads, queries in ground.pick([(16, 1), (128, 1), (128, 2048)], [(4, 1), (4, 5)]):
        batch, context, half, rank = ground.pick((64 if queries == 1 else 1, 8192, 288, 512), (2, 20, 16, 24))
        meta, num_pages = paged([queries] * batch, [context] * batch, 16, ground.device)
        q, pool = ground.noise(batch * queries, heads, 2 * half), ground.noise(num_pages, 2, 1, 16, half)
        found = ground.seconds(lambda: backend.latent_attention(q, pool, meta, 0.1, rank))  # noqa: B023
        products = 2 * heads * (2 * half + rank) * batch * queries * (context - queries / 2)
        at = f"{batch} x {queries} of {context}, {heads} heads"
        yield Row(f"latents, {at}", products / found / 1e12, "TFLOP/s", "matrix product", products_per_s / 1e12)


def memory_rows(ground: Ground, backend: AttentionBackend, ops: LayerOps, bytes_per_s: float) -> Iterator[Row]:
    """What is read and written once, as a share of the copy bandwidth."""
    tokens, hidden, inner, dim = ground.pick((16384, 4096, 14336, 128), (3, 32, 48, 16))
    heads, kv_heads = ground.pick((32, 8), TOY_HEADS)
    noise = ground.noise
    x, residual, weight, gate_up = noise(tokens, hidden), noise(tokens, hidden), noise(hidden), noise(tokens, 2 * inner)
    qkv = noise(tokens, heads + 2 * kv_heads, dim)
    cos_sin = torch.randn(tokens, 2, dim // 2, device=ground.device)
    norms = QkNorms(noise(dim), noise(dim), 1e-6)
    meta, num_pages = paged([tokens], [tokens], 16, ground.device)
    layer = KvLayer(noise(num_pages, 2, kv_heads, 16, dim))
    moves: dict[str, tuple[int, Callable[[], object]]] = {
        "norm with residual": (4 * x.nbytes, lambda: ops.add_rms_norm(x, residual, weight, 1e-5)),
        "gates": (gate_up.nbytes * 3 // 2, lambda: ops.silu_and_mul(gate_up)),
        "rotation and pages": (2 * qkv.nbytes, lambda: backend.store_qkv(qkv, cos_sin, None, layer, meta, ops)),
        "norms, rotation and pages": (2 * qkv.nbytes, lambda: backend.store_qkv(qkv, cos_sin, norms, layer, meta, ops)),
    }
    for name, (num_bytes, call) in moves.items():
        rate = num_bytes / ground.in_graph(call)
        yield Row(f"{name}, {tokens} tokens", rate / 1e9, "GB/s", "device copy", bytes_per_s / 1e9)
    num_moved, page_bytes = ground.pick((1024, 1 << 21), (2, 64))
    words = torch.randint(0, 255, (2 * num_moved, page_bytes), dtype=torch.uint8, device=ground.device)
    words, order = words.view(torch.int64), torch.randperm(num_moved).tolist()
    to = [num_moved + page for page in order]
    on_device = (torch.tensor(to, device=ground.device), torch.tensor(order, device=ground.device))
    for name, numbers in (("", (to, order)), (", numbers on the device", on_device)):
        rate = 2 * num_moved * page_bytes / ground.seconds(lambda: copy_pages(words, words, *numbers))  # noqa: B023
        at = f"gather of {num_moved} pages of {page_bytes} bytes{name}"
        yield Row(at, rate / 1e9, "GB/s", "device copy", bytes_per_s / 1e9)


def draw_rows(ground: Ground) -> Iterator[Row]:
    """Rows of a vocabulary of 128256."""
    for batch in ground.pick([64, 256], [2]):
        logits = torch.randn(batch, ground.pick(128_256, 300), device=ground.device) * 3
        for name, sampling in (
            ("greedy", SamplingParams(max_tokens=1, temperature=0.0)),
            ("plain", SamplingParams(max_tokens=1, temperature=1.0)),
            ("top-k and top-p", SamplingParams(max_tokens=1, temperature=1.0, top_k=50, top_p=0.9)),
        ):
            draws = Draws.of([sampling] * batch, [7] * batch, logits.shape[1], logits.device)
            ours_s = ground.in_graph(lambda: draw_tokens(logits, draws))  # noqa: B023
            base, call = {
                "greedy": ("torch argmax", lambda: logits.argmax(-1)),  # noqa: B023
                "plain": ("torch softmax and running sum", lambda: logits.softmax(-1).cumsum(-1)),  # noqa: B023
                "top-k and top-p": ("torch sort", lambda: F.softmax(logits, -1).sort(-1)),  # noqa: B023
            }[name]
            theirs_s = ground.seconds(call)  # which may wait for the device, as no graph may
            yield Row(f"draws, {name}, batch {batch}", ours_s * 1e6, "us", base, theirs_s * 1e6)


def quantized_rows(ground: Ground) -> Iterator[Row]:
    """A product of Llama-3.1-8B's feed-forward with quantized weights against bf16 ones."""
    outputs, inputs = ground.pick((14336, 4096), (64, 64))
    weight_OI = torch.randn(outputs, inputs, device=ground.device) / 64
    plain_OI = weight_OI.bfloat16()
    kinds: tuple[Kind, ...] = ("int4", "int8", "fp8")
    for kind in kinds:
        product = make_product(quantize_weight(weight_OI, kind), None)
        for num_rows in ground.pick([1, 16, 256, 4096], [1, 3]):
            x_TI = ground.noise(num_rows, inputs)
            ours_s = ground.seconds(lambda: product(x_TI))  # noqa: B023
            plain_s = ground.seconds(lambda: F.linear(x_TI, plain_OI))  # noqa: B023
            yield Row(f"{kind} product of {num_rows} rows", ours_s * 1e6, "us", "bf16", plain_s * 1e6)
