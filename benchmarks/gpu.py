"""Kernels and the engine's step on a CUDA device, beside what the device can do.

Decode attention is held against the copy bandwidth measured in the same run and against one contiguous SDPA call over
the same KV; chunked prefill against SDPA over contiguous tensors; each kernel by itself (gpu_kernels.py); the engine's
step against its bare-torch floor; transfers between two processes on the device (gpu_transfer.py) against the same copy
bandwidth.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch
import torch.nn.functional as F

from benchmarks.gpu_kernels import kernel_rows, paged
from benchmarks.gpu_steps import step_rows
from benchmarks.gpu_transfer import transfer_rows
from benchmarks.report import Row, publish
from benchmarks.shapes import random_llama
from engine.engine import Engine
from engine.kernels import AttentionBackend, select_backend, select_ops
from engine.kernels.quantized_gemm import make_product
from engine.layers.quantized import Kind, quantize_weight
from engine.sequence import ScheduledSequence, Sequence
from penstock.config import EngineConfig
from penstock.types import RequestId, SamplingParams

PAGE_SIZE = 16
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128  # one layer of Llama-3.1-8B
_REPEATS = 30


def seconds(call: Callable[[], object]) -> float:
    """Median of device time, after warm-up."""
    for _ in range(5):
        call()
    times = []
    for _ in range(_REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times)


def copy_bandwidth() -> float:
    """Bytes per second, read and written counted."""
    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source))


def attention_rows(backend: AttentionBackend, bytes_per_s: float) -> Iterator[Row]:
    scale = HEAD_DIM**-0.5
    for batch, context in ((1, 8192), (16, 2048), (64, 2048), (256, 1024)):
        meta, num_pages = paged([1] * batch, [context] * batch, PAGE_SIZE)
        # Three layers, so that a layer's view is strided as in a model.
        pool = torch.randn(num_pages, 3, 2, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        q_TNH = torch.randn(batch, NUM_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        paged_s = seconds(lambda: backend.paged_attention(q_TNH, pool[:, 1], meta, scale, None))  # noqa: B023
        kv = torch.randn(2, batch, NUM_KV_HEADS, context, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        query = q_TNH.unsqueeze(2)
        sdpa_s = seconds(lambda: F.scaled_dot_product_attention(query, kv[0], kv[1], enable_gqa=True))  # noqa: B023
        kv_bytes = kv.numel() * 2
        at = f"batch {batch} x {context}"
        yield Row(f"paged decode, {at}", kv_bytes / paged_s / 1e9, "GB/s", "device copy", bytes_per_s / 1e9)
        yield Row(f"paged decode, {at}", paged_s * 1e6, "us", "contiguous SDPA", sdpa_s * 1e6)
    for queries, context in ((2048, 2048), (512, 8192)):
        meta, num_pages = paged([queries], [context], PAGE_SIZE)
        pool = torch.randn(num_pages, 3, 2, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        q_TNH = torch.randn(queries, NUM_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        paged_s = seconds(lambda: backend.paged_attention(q_TNH, pool[:, 1], meta, scale, None))  # noqa: B023
        kv = torch.randn(2, 1, NUM_KV_HEADS, context, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        query = q_TNH.transpose(0, 1).unsqueeze(0)
        if queries == context:
            sdpa_s = seconds(
                lambda: F.scaled_dot_product_attention(query, kv[0], kv[1], is_causal=True, enable_gqa=True)  # noqa: B023
            )
        else:
            mask = torch.ones(queries, context, dtype=torch.bool, device="cuda").tril(context - queries)
            sdpa_s = seconds(
                lambda: F.scaled_dot_product_attention(query, kv[0], kv[1], attn_mask=mask, enable_gqa=True)  # noqa: B023
            )
        yield Row(f"paged prefill, {queries} of {context}", paged_s * 1e6, "us", "contiguous SDPA", sdpa_s * 1e6)


def quantized_rows() -> Iterator[Row]:
    """A product of Llama-3.1-8B's feed-forward with quantized weights against bf16 ones."""
    weight_OI = torch.randn(14336, 4096, device="cuda") / 64
    plain_OI = weight_OI.bfloat16()
    kinds: tuple[Kind, ...] = ("int4", "int8", "fp8")
    for kind in kinds:
        product = make_product(quantize_weight(weight_OI, kind), None)
        for num_rows in (1, 16, 256):
            x_TI = torch.randn(num_rows, 4096, device="cuda", dtype=torch.bfloat16)
            ours_s, plain_s = seconds(lambda: product(x_TI)), seconds(lambda: F.linear(x_TI, plain_OI))  # noqa: B023
            yield Row(f"{kind} product of {num_rows} rows", ours_s * 1e6, "us", "bf16", plain_s * 1e6)


@contextmanager
def decoding(engine: Engine, batch: int, context: int) -> Iterator[list[ScheduledSequence]]:
    """Sequences in the middle of their decoding; their KV is whatever the pool holds."""
    pages_each = -(-(context + 1) // PAGE_SIZE)
    work = []
    for number in range(batch):
        tokens = [(number * 31 + i) % 30000 for i in range(context + 1)]
        sampling = SamplingParams(max_tokens=1000, temperature=0.0)
        sequence = Sequence(RequestId(str(number)), tokens, context, sampling, b"")
        sequence.pages, sequence.num_computed_tokens = engine.pool.allocate(pages_each), context
        work.append(ScheduledSequence(sequence, 1))
    yield work
    for scheduled in work:
        engine.pool.release(scheduled.sequence.pages)


def engine_rows(bytes_per_s: float) -> Iterator[Row]:
    """A decode step against one read of the weights and of the KV at copy bandwidth."""
    folder = random_llama()
    engine = Engine.load(EngineConfig(model=str(folder), device="cuda", num_pages=8192, page_size=PAGE_SIZE))
    weight_bytes = (folder / "model.safetensors").stat().st_size
    for batch in (1, 16, 64):
        context = 576
        with decoding(engine, batch, context) as work:
            step_s = seconds(lambda: engine.step(work))
        kv_bytes = batch * context * engine.layout.page_bytes / PAGE_SIZE
        floor_s = (weight_bytes + kv_bytes) / (bytes_per_s / 2)
        yield Row(f"engine step, 135M, batch {batch}", step_s * 1e3, "ms", "one read of weights and KV", floor_s * 1e3)


def main() -> int:
    if not torch.cuda.is_available():
        print("benchmarks.gpu needs a CUDA device; none was found", file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name()
    bytes_per_s = copy_bandwidth()
    backend = select_backend("triton", torch.device("cuda"))
    rows = [Row("device copy", bytes_per_s / 1e9, "GB/s"), *attention_rows(backend, bytes_per_s)]
    rows += kernel_rows(backend, select_ops(backend), bytes_per_s, seconds)
    rows += quantized_rows()
    rows += engine_rows(bytes_per_s)
    rows += step_rows(bytes_per_s)
    rows += transfer_rows(bytes_per_s, seconds)
    publish("gpu", f"{name}; one layer of the 8B shape, page {PAGE_SIZE}, bf16; engine on the 135M shape", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
