"""Compares each Triton kernel with the device's limits, or with torch's own way to the same result.

Paged attention is compared with the copy bandwidth (decode), with the rate of a large matrix product (prefill), with
SDPA over contiguous tensors, and with the installed attention libraries; kernels that only move memory with the copy
bandwidth; sampling with torch's operations. Small kernels are timed inside a CUDA graph, as they run in a step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.common.report import Row
from benchmarks.gpu.bench_device import BenchDevice
from engine.kernels.attention_interface import AttentionBackend, AttentionMetadata, KvLayer, Lengths, QkNorms
from engine.kernels.backends import select_backend
from engine.kernels.expert_routing import RoutingRule
from engine.kernels.kv_quantization import quantize
from engine.kernels.layer_ops import LayerOps, TorchOps
from engine.kernels.libraries.attention import LibraryAttention
from engine.kernels.libraries.capabilities import LIBRARIES
from engine.kernels.triton import common
from engine.kernels.triton.copy_pages import copy_pages
from engine.kernels.triton.products.quantized_gemm import make_product
from engine.kernels.triton.sample import sample_tokens
from engine.sampling.row_params import SamplingRows, SamplingTensors
from engine.sampling.sampler import sample_step
from engine.sampling.step_sampling import StepSampling
from engine.step.sequence import Sequence
from engine.weights.quantized_weight import Kind, quantize_weight
from penstock.errors import ConfigError
from penstock.types import RequestId, SamplingParams

TOY_HEADS = (2, 1)
_LIBRARY_STEPS = {
    "64 decodes of 2048": ([1] * 64, [2048] * 64),
    "chunk of 2048": ([2048], [2048]),
    "chunk of 512 after 7680": ([512], [8192]),
    "the same with 32 decodes": ([1] * 32 + [512], [2048] * 32 + [8192]),
}
_TOY_LIBRARY_STEPS = {"a chunk": ([3], [20]), "decodes": ([1, 1], [20, 5])}


def paged(
    query_lens: list[int], context_lens: list[int], page_size: int, device: torch.device
) -> tuple[AttentionMetadata, int]:
    """Returns the metadata of sequences on shuffled pages, and the number of these pages."""
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
    bench: BenchDevice,
    backend: AttentionBackend,
    batch: int,
    context: int,
    heads: tuple[int, int],
    dim: int,
    page_size: int,
    stored: torch.dtype | None = None,
) -> tuple[float, int]:
    """Returns the seconds of one layer's decode attention, and the bytes of its KV in bf16."""
    meta, num_pages = paged([1] * batch, [context] * batch, page_size, bench.device)
    q, pool, scales = bench.noise(batch, heads[0], dim), bench.noise(num_pages, 2, heads[1], page_size, dim), None
    if stored is not None:
        pool, scales = quantize(pool, stored)
    found = bench.seconds(lambda: backend.paged_attention(q, pool, meta, dim**-0.5, None, None, scales))
    return found, 2 * batch * context * heads[1] * dim * 2


def decode_rows(bench: BenchDevice, backend: AttentionBackend, bytes_per_s: float) -> Iterator[Row]:
    """Yields one long sequence, every head dim, 8-bit pages, and SDPA over the same KV in one piece."""
    for batch, context, heads, dim, page_size in bench.pick(
        [
            (1, 131072, (32, 8), 128, 32),
            (64, 16384, (16, 8), 128, 16),
            (64, 16384, (16, 8), 64, 16),
            (32, 16384, (32, 8), 96, 16),
            (32, 16384, (16, 8), 256, 16),
        ],
        [(2, 40, TOY_HEADS, 16, 16)],
    ):
        found, kv_bytes = decode_s(bench, backend, batch, context, heads, dim, page_size)
        at = f"{batch} x {context}, {heads[0]}/{heads[1]} heads of {dim}, page {page_size}"
        yield Row(f"paged decode, {at}", kv_bytes / found / 1e9, "GB/s", "device copy", bytes_per_s / 1e9)
    yield _ragged_row(bench, backend)
    heads, dim = bench.pick((32, 8), TOY_HEADS), bench.pick(128, 16)
    for batch, context in bench.pick([(16, 2048), (64, 2048), (256, 1024)], [(2, 40)]):
        found, _ = decode_s(bench, backend, batch, context, heads, dim, 16)
        kv = bench.noise(2, batch, heads[1], context, dim)
        query = bench.noise(batch, heads[0], 1, dim)
        whole_s = bench.seconds(lambda: F.scaled_dot_product_attention(query, kv[0], kv[1], enable_gqa=True))  # noqa: B023
        yield Row(f"paged decode, {batch} x {context}", found * 1e6, "us", "contiguous SDPA", whole_s * 1e6)
    for stored in (torch.float8_e4m3fn, torch.int8):
        for batch, context in bench.pick([(16, 8192), (64, 8192)], [(2, 40)]):
            plain_s, _ = decode_s(bench, backend, batch, context, heads, dim, 16)
            codes_s, _ = decode_s(bench, backend, batch, context, heads, dim, 16, stored)
            at = f"{str(stored).removeprefix('torch.')}, {batch} x {context}"
            yield Row(f"paged decode, {at}", codes_s * 1e6, "us", "bf16 pages", plain_s * 1e6)


def _ragged_row(bench: BenchDevice, backend: AttentionBackend) -> Row:
    """Measures one long context among short ones, with as many tokens of KV in equal contexts as baseline."""
    heads, dim = bench.pick((32, 8), TOY_HEADS), bench.pick(128, 16)
    batch, longest, shortest = bench.pick((64, 32768, 512), (3, 40, 8))
    contexts = [longest, *[shortest] * (batch - 1)]
    equal = [sum(contexts) // batch] * batch
    took_s = []
    for lengths in (contexts, equal):
        meta, num_pages = paged([1] * batch, lengths, 16, bench.device)
        q, pool = bench.noise(batch, heads[0], dim), bench.noise(num_pages, 2, heads[1], 16, dim)
        took_s.append(bench.seconds(lambda: backend.paged_attention(q, pool, meta, dim**-0.5, None)))  # noqa: B023
    ragged_s, equal_s = took_s
    at = f"{longest} among {batch - 1} x {shortest}"
    return Row(f"paged decode, ragged, {at}", ragged_s * 1e6, "us", "as much KV in equal contexts", equal_s * 1e6)


def prefill_rows(bench: BenchDevice, backend: AttentionBackend, products_per_s: float) -> Iterator[Row]:
    """Yields chunks after cached context, and attention over latents."""
    from torch.nn.attention.bias import causal_lower_right  # imports torch's compiler, which takes seconds

    for queries, context, dim in bench.pick(
        [(8192, 8192, 128), (2048, 2048, 128), (512, 8192, 128), (32, 32768, 128), (8192, 8192, 64)], [(5, 20, 16)]
    ):
        heads, kv_heads = bench.pick((32, 8), TOY_HEADS)
        meta, num_pages = paged([queries], [context], 16, bench.device)
        q, pool = bench.noise(queries, heads, dim), bench.noise(num_pages, 2, kv_heads, 16, dim)
        found = bench.seconds(lambda: backend.paged_attention(q, pool, meta, 0.1, None))  # noqa: B023
        products = 4 * heads * dim * queries * (context - queries / 2)  # half of the square at the diagonal is masked
        at = f"{queries} of {context}, heads of {dim}"
        yield Row(f"paged prefill, {at}", products / found / 1e12, "TFLOP/s", "matrix product", products_per_s / 1e12)
        kv = bench.noise(2, 1, kv_heads, context, dim)
        query, mask = bench.noise(1, heads, queries, dim), causal_lower_right(queries, context)
        whole_s = bench.seconds(
            lambda: F.scaled_dot_product_attention(query, kv[0], kv[1], attn_mask=mask, enable_gqa=True)  # noqa: B023
        )
        yield Row(f"paged prefill, {at}", found * 1e6, "us", "contiguous SDPA", whole_s * 1e6)
    for heads, queries in bench.pick([(16, 1), (128, 1), (128, 2048)], [(4, 1), (4, 5)]):
        batch, context, half, rank = bench.pick((64 if queries == 1 else 1, 8192, 288, 512), (2, 20, 16, 24))
        meta, num_pages = paged([queries] * batch, [context] * batch, 16, bench.device)
        q, pool = bench.noise(batch * queries, heads, 2 * half), bench.noise(num_pages, 2, 1, 16, half)
        found = bench.seconds(lambda: backend.latent_attention(q, pool, meta, 0.1, rank))  # noqa: B023
        products = 2 * heads * (2 * half + rank) * batch * queries * (context - queries / 2)
        at = f"{batch} x {queries} of {context}, {heads} heads"
        yield Row(f"latents, {at}", products / found / 1e12, "TFLOP/s", "matrix product", products_per_s / 1e12)


def memory_rows(bench: BenchDevice, backend: AttentionBackend, ops: LayerOps, bytes_per_s: float) -> Iterator[Row]:
    """Yields kernels that read and write memory once, with the copy bandwidth as baseline."""
    tokens, hidden, inner, dim = bench.pick((16384, 4096, 14336, 128), (3, 32, 48, 16))
    heads, kv_heads = bench.pick((32, 8), TOY_HEADS)
    noise = bench.noise
    x, residual, weight, gate_up = noise(tokens, hidden), noise(tokens, hidden), noise(hidden), noise(tokens, 2 * inner)
    qkv = noise(tokens, heads + 2 * kv_heads, dim)
    cos_sin = torch.randn(tokens, 2, dim // 2, device=bench.device)
    norms = QkNorms(noise(dim), noise(dim), 1e-6)
    meta, num_pages = paged([tokens], [tokens], 16, bench.device)
    layer = KvLayer(noise(num_pages, 2, kv_heads, 16, dim))
    moves: dict[str, tuple[int, Callable[[], object]]] = {
        "norm with residual": (4 * x.nbytes, lambda: ops.add_rms_norm(x, residual, weight, 1e-5)),
        "gates": (gate_up.nbytes * 3 // 2, lambda: ops.silu_and_mul(gate_up)),
        "rotation and pages": (2 * qkv.nbytes, lambda: backend.store_qkv(qkv, cos_sin, None, layer, meta, ops)),
        "norms, rotation and pages": (2 * qkv.nbytes, lambda: backend.store_qkv(qkv, cos_sin, norms, layer, meta, ops)),
    }
    for name, (num_bytes, call) in moves.items():
        rate = num_bytes / bench.in_graph(call)
        yield Row(f"{name}, {tokens} tokens", rate / 1e9, "GB/s", "device copy", bytes_per_s / 1e9)
    num_migrated, page_bytes = bench.pick((1024, 1 << 21), (2, 64))
    words = torch.randint(0, 255, (2 * num_migrated, page_bytes), dtype=torch.uint8, device=bench.device)
    words, order = words.view(torch.int64), torch.randperm(num_migrated).tolist()
    to = [num_migrated + page for page in order]
    on_device = (torch.tensor(to, device=bench.device), torch.tensor(order, device=bench.device))
    for name, numbers in (("", (to, order)), (", numbers on the device", on_device)):
        rate = 2 * num_migrated * page_bytes / bench.seconds(lambda: copy_pages(words, words, *numbers))  # noqa: B023
        at = f"gather of {num_migrated} pages of {page_bytes} bytes{name}"
        yield Row(at, rate / 1e9, "GB/s", "device copy", bytes_per_s / 1e9)


def early_launch_rows(bench: BenchDevice, ops: LayerOps) -> Iterator[Row]:
    """Yields a small product and the norm after it in a graph, with a norm that starts after the product's end as
    baseline."""
    batch, hidden = bench.pick((16, 4096), (2, 16))
    x, weight_OI, residual = bench.noise(batch, hidden), bench.noise(hidden, hidden), bench.noise(batch, hidden)
    weight = torch.ones_like(x[0])

    def call() -> None:
        ops.add_rms_norm(F.linear(x, weight_OI), residual, weight, 1e-5)

    early_s = bench.in_graph(call)
    with mock.patch.object(common, "launches_early", return_value=False):
        late_s = bench.in_graph(call)
    yield Row(f"product and norm launched early, {batch} rows", early_s * 1e6, "us", "launched in turn", late_s * 1e6)


def sampling_rows(bench: BenchDevice) -> Iterator[Row]:
    """Yields sampling over a vocabulary of 128256, after a check of rows that are not finite."""
    yield _nan_row(bench)
    yield from _edited_rows(bench)
    for batch in bench.pick([64, 256], [2]):
        logits = torch.randn(batch, bench.pick(128_256, 300), device=bench.device) * 3
        for name, sampling in (
            ("greedy", SamplingParams(max_tokens=1, temperature=0.0)),
            ("plain", SamplingParams(max_tokens=1, temperature=1.0)),
            ("top-k and top-p", SamplingParams(max_tokens=1, temperature=1.0, top_k=50, top_p=0.9)),
        ):
            params = SamplingTensors.of([sampling] * batch, [7] * batch, logits.shape[1], logits.device)
            ours_s = bench.in_graph(lambda: sample_tokens(logits, params))  # noqa: B023
            base, call = {
                "greedy": ("torch argmax", lambda: logits.argmax(-1)),  # noqa: B023
                "plain": ("torch softmax and running sum", lambda: logits.softmax(-1).cumsum(-1)),  # noqa: B023
                "top-k and top-p": ("torch sort", lambda: F.softmax(logits, -1).sort(-1)),  # noqa: B023
            }[name]
            theirs_s = bench.seconds(call)  # it may synchronize, which a graph may not
            yield Row(f"sampling, {name}, batch {batch}", ours_s * 1e6, "us", base, theirs_s * 1e6)


def _edited_rows(bench: BenchDevice) -> Iterator[Row]:
    """Yields sampling of greedy rows of 2000 tokens with penalties, a bias and log-probabilities, whose last token is
    awaited: the layout on the host, and the whole, with plain greedy rows as baseline.
    """
    batch, length, vocab_size = bench.pick((64, 2000, 128_256), (2, 20, 300))
    logits = torch.randn(batch, vocab_size, device=bench.device).bfloat16()
    awaited = torch.arange(batch, device=bench.device)

    def lay_out(sequences: list[Sequence]) -> StepSampling:
        rows = SamplingRows.of(sequences)
        rows = SamplingRows(rows.records, rows.positions + 1)
        return StepSampling.at(rows, dict(enumerate(sequences)), vocab_size, (2,), np.arange(batch))

    def sequences_of(**sampling: Any) -> list[Sequence]:
        params = SamplingParams(max_tokens=9, temperature=0.0, **sampling)
        texts = [[(7919 * row + 31 * place) % vocab_size for place in range(length)] for row in range(batch)]
        return [Sequence(RequestId("r"), text, length // 2, params, b"") for text in texts]

    plain = sequences_of()
    plain_s = bench.seconds(lambda: sample_step(logits, lay_out(plain)))
    kinds: dict[str, dict[str, Any]] = {
        "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.5},
        "a bias and a bad word": {"logit_bias": {5: 1.0}, "bad_sequences": ((3, 4),)},
        "20 log-probabilities": {"logprobs": 20},
    }
    for name, sampling in kinds.items():
        edited = sequences_of(**sampling)
        took_s = bench.seconds(lambda: sample_step(logits, lay_out(edited), None, awaited))  # noqa: B023
        yield Row(f"sampling, {name}, batch {batch}", took_s * 1e6, "us", "greedy rows alone", plain_s * 1e6)
        started_s = time.perf_counter()
        lay_out(edited)
        host_s = time.perf_counter() - started_s
        yield Row(f"sampling, {name}, batch {batch}, laid out on the host", host_s * 1e6, "us")


def _nan_row(bench: BenchDevice) -> Row:
    """Counts the rows that are sampled correctly when some are NaN: only those fail, and no token is outside the
    vocabulary. Raises RuntimeError if any row is wrong.
    """
    batch, vocab_size = bench.pick(64, 4), bench.pick(128_256, 300)
    logits = torch.randn(batch, vocab_size, device=bench.device)
    broken = torch.arange(batch, device=bench.device) % 2 == 1
    logits[broken] = float("nan")
    greedy = [SamplingParams(max_tokens=1, temperature=0.0)] * batch
    params = SamplingTensors.of(greedy, [7] * batch, vocab_size, logits.device)
    tokens, totals = sample_tokens(logits, params)
    valid = totals.isfinite() & (totals > 0)
    right = (valid != broken) & (tokens >= 0) & (tokens < vocab_size)
    right &= broken | (tokens == logits.argmax(-1))
    if not right.all():
        raise RuntimeError(f"sampling of NaN rows: rows {(~right).nonzero().flatten().tolist()} are wrong")
    return Row("sampling, NaN rows, rows sampled as they should be", float(right.sum()), "rows", "rows", float(batch))


def quantized_rows(bench: BenchDevice) -> Iterator[Row]:
    """Yields products of Llama-3.1-8B's feed-forward with quantized weights, with bf16 weights as baseline. Those of
    few rows share their inputs among programs.
    """
    kinds: tuple[Kind, ...] = ("int4", "int8", "fp8")
    for outputs, inputs in bench.pick([(14336, 4096), (4096, 14336)], [(64, 64)]):
        weight_OI = torch.randn(outputs, inputs, device=bench.device) / 64
        plain_OI = weight_OI.bfloat16()
        for kind in kinds:
            product = make_product(quantize_weight(weight_OI, kind), None)
            for num_rows in bench.pick([1, 16, 64, 256, 4096], [1, 3]):
                x_TI = bench.noise(num_rows, inputs)
                ours_s = bench.seconds(lambda: product(x_TI))  # noqa: B023
                plain_s = bench.seconds(lambda: F.linear(x_TI, plain_OI))  # noqa: B023
                at = f"{kind} product of {num_rows} rows, {inputs} to {outputs}"
                yield Row(at, ours_s * 1e6, "us", "bf16", plain_s * 1e6)


def routing_rows(bench: BenchDevice, ops: LayerOps) -> Iterator[Row]:
    """Yields how long experts' routing takes, without their products, with torch's chain of launches as baseline."""
    rules = {
        "128 experts": (128, RoutingRule("softmax", 8, normalize=True)),
        "256 experts in 8 groups": (256, RoutingRule("sigmoid", 8, True, 8, 4, 2.5)),
    }
    for name, (num_experts, rule) in rules.items():
        bias_E = torch.rand(num_experts, device=bench.device) / 8 if rule.scoring == "sigmoid" else None
        for num_tokens in bench.pick([1, 64, 8192], [3]):
            logits_TE = torch.randn(num_tokens, num_experts, device=bench.device)
            out_XD = bench.noise(num_tokens * rule.num_chosen, bench.pick(2048, 16))

            def route(ops: LayerOps) -> torch.Tensor:
                routing = ops.route_experts(logits_TE, rule, bias_E)  # noqa: B023
                return ops.combine_experts(out_XD, routing, is_weighted=True)  # noqa: B023

            ours_s, torch_s = (bench.in_graph(partial(route, each)) for each in (ops, TorchOps()))
            yield Row(f"routing, {name}, {num_tokens} tokens", ours_s * 1e6, "us", "torch", torch_s * 1e6)


def library_rows(bench: BenchDevice, own: AttentionBackend) -> Iterator[Row]:
    """Yields the installed libraries of `engine.attention` compared with our kernels: decodes, chunks, and both at
    once.

    Each step is planned before it is timed; planning takes host time, which is a separate row. Decodes that are planned
    on the host are also compared inside a CUDA graph.
    """
    (heads, kv_heads), dim = bench.pick((32, 8), TOY_HEADS), bench.pick(128, 16)
    for name in bench.pick(tuple(LIBRARIES), ("flashinfer", "torch")):
        try:
            library = select_backend(name, bench.device)
        except ConfigError as error:
            print(f"skipped: {error}", file=sys.stderr)
            continue
        for at, (query_lens, context_lens) in bench.pick(_LIBRARY_STEPS, _TOY_LIBRARY_STEPS).items():
            meta, num_pages = paged(query_lens, context_lens, 16, bench.device)
            q, pool = bench.noise(sum(query_lens), heads, dim), bench.noise(num_pages, 2, kv_heads, 16, dim)
            library.paged_attention(q, pool, meta, 0.1, None)
            bench.cuda.synchronize()
            started_s = time.perf_counter()
            library.paged_attention(q, pool, replace(meta), 0.1, None)
            planning_s = time.perf_counter() - started_s
            theirs_s = bench.seconds(lambda: library.paged_attention(q, pool, meta, 0.1, None))  # noqa: B023
            ours_s = bench.seconds(lambda: own.paged_attention(q, pool, meta, 0.1, None))  # noqa: B023
            yield Row(f"{name}, {at}", theirs_s * 1e6, "us", "ours", ours_s * 1e6)
            yield Row(f"{name}, {at}, first call of a step on the host", planning_s * 1e6, "us")
            if isinstance(library, LibraryAttention) and library.planner and meta.num_decodes == meta.num_sequences:
                yield from _captured_rows(bench, own, library, (q, pool), meta, f"{name}, {at}, captured")


def _captured_rows(
    bench: BenchDevice,
    own: AttentionBackend,
    library: LibraryAttention,
    tensors: tuple[torch.Tensor, torch.Tensor],
    meta: AttentionMetadata,
    at: str,
) -> Iterator[Row]:
    """Yields decodes of a library in a CUDA graph compared with our kernels in one, and the plan before each replay."""
    assert library.planner is not None
    assert meta.lengths is not None
    plan = partial(library.planner.plan_decodes, meta.page_table_BP, meta.lengths.context_B, 16)
    captured = replace(meta, lengths=None)
    plan()
    theirs_s, ours_s = (
        bench.in_graph(lambda: each.paged_attention(*tensors, captured, 0.1, None))  # noqa: B023
        for each in (library, own)
    )
    planning_s = bench.wall_seconds(plan, bench.repeats)
    yield Row(at, theirs_s * 1e6, "us", "ours", ours_s * 1e6)
    yield Row(f"{at}, plan before a replay", planning_s * 1e6, "us")
