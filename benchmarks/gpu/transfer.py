"""Compares KV transfers between two processes on one device with a device copy and the time of a prefill."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.common.report import Row
from benchmarks.common.shapes import LLAMA_8B, TOY, hollow_model
from benchmarks.gpu.bench_device import BenchDevice
from benchmarks.gpu.steps import fill_weights, prompt_step_s
from benchmarks.transfer.peer import PeerProcess
from benchmarks.transfer.sending import SPARE, alternate, sending
from engine.cache.pool_memory import allocate_pool
from engine.engine import Engine
from engine.kernels.page_copy import select_copy
from kv_transfer.send.receiver_links import LAYER_GROUPS
from penstock.config import EngineConfig

PAGE_SIZE = 16
BYTES_A_TOKEN = 32 * 2 * 8 * 128 * 2  # 8B Llama, bf16
CHUNK_TOKENS = 2048
# An eighth of the 8B shape's layers, since a prefill spends its time in layers, and a small vocabulary.
LAYER_SHARE = 8
LAYERS_OF_8B = {**LLAMA_8B, "num_hidden_layers": 32 // LAYER_SHARE, "vocab_size": 32000}


def smoke_rows(bench: BenchDevice) -> Iterator[Row]:
    """Yields the first transfer between two processes, a few small pages: what everything else between them needs."""
    transport, num_pages, page_bytes = bench.pick("cuda_ipc", "shm"), 8, 4096
    memory = allocate_pool((num_pages * page_bytes,), torch.uint8, bench.device).fill_(1)
    bench.cuda.synchronize()
    peer = PeerProcess(max(1 << 12, 0 if transport == "cuda_ipc" else num_pages * page_bytes), str(bench.device))
    try:
        peer.expect_ready()
        with sending(peer, memory, transport, num_pages, page_bytes) as end:
            yield Row(f"first transfer over {transport}, 4 pages of {page_bytes} bytes", end.transfer_s(4) * 1e6, "us")
    finally:
        peer.stop()


def transfer_rows(bench: BenchDevice, bytes_per_s: float) -> Iterator[Row]:
    """Yields transfers with `bytes_per_s`, the read and written bytes of a copy, as baseline; a rehearsal uses shared
    memory.
    """
    yield _kernel_row(bench, bytes_per_s)
    bytes_a_token, last_part_s = bench.pick(BYTES_A_TOKEN, 64), 0.0
    transport, page_bytes = bench.pick("cuda_ipc", "shm"), bytes_a_token * PAGE_SIZE
    lengths = bench.pick((CHUNK_TOKENS // LAYER_GROUPS, CHUNK_TOKENS, 8192, 32768), (32, 64))
    num_pages = int(SPARE * max(lengths)) // PAGE_SIZE
    memory = allocate_pool((num_pages * page_bytes,), torch.uint8, bench.device).fill_(1)
    bench.cuda.synchronize()
    peer = PeerProcess(max(1 << 12, 0 if transport == "cuda_ipc" else num_pages * page_bytes), str(bench.device))
    try:
        peer.expect_ready()
        with sending(peer, memory, transport, num_pages, page_bytes) as end:
            for length in lengths:
                num_bytes = bytes_a_token * length
                took_s = alternate({"paged": lambda: end.transfer_s(length // PAGE_SIZE)}, num_bytes)["paged"]  # noqa: B023
                last_part_s = last_part_s or took_s
                label = f"{transport} 8B page {PAGE_SIZE}, {length} tokens, {num_bytes / 1e6:.3g} MB"
                yield Row(label, took_s * 1e6, "us")
                yield Row(label, num_bytes / took_s / 1e9, "GB/s", "device copy", bytes_per_s / 2e9)
    finally:
        peer.stop()
    del memory
    prefill_s = prefill_8b_s(bench)
    label = f"exposed over {transport}, 8B page {PAGE_SIZE}: the last of {LAYER_GROUPS} parts of {CHUNK_TOKENS} tokens"
    yield Row(
        label,
        last_part_s * 1e3,
        "ms",
        f"prefill of {CHUNK_TOKENS} tokens, from {32 // LAYER_SHARE} layers",
        prefill_s * 1e3,
    )


def _kernel_row(bench: BenchDevice, bytes_per_s: float) -> Row:
    """Measures only the page copy kernel, in this process."""
    num_pages, words = bench.pick((1024, BYTES_A_TOKEN * PAGE_SIZE // 8), (4, 16))
    source, target = (torch.ones(num_pages, words, dtype=torch.int64, device=bench.device) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    src, dst = (torch.randperm(num_pages, generator=generator).tolist() for _ in range(2))
    copy = select_copy(bench.device.type)
    took_s = bench.seconds(lambda: copy(target, source, dst, src))
    return Row(
        "page copy kernel, 8B page 16", 2 * source.nbytes / took_s / 1e9, "GB/s", "device copy", bytes_per_s / 1e9
    )


def prefill_8b_s(bench: BenchDevice) -> float:
    """Returns the seconds of one chunk, extrapolated from a share of the layers."""
    num_tokens = bench.pick(CHUNK_TOKENS, 32)
    folder = hollow_model(bench.pick(LAYERS_OF_8B, TOY), 4096, "llama", is_filled=bench.is_rehearsal)
    num_pages = num_tokens // PAGE_SIZE
    settings = bench.engine_settings() | {"num_pages": num_pages + 2, "page_size": PAGE_SIZE}
    engine = Engine.load(EngineConfig.model_validate({"model": str(folder), **settings}))
    fill_weights(bench, engine)
    return prompt_step_s(bench, engine, num_tokens) * LAYER_SHARE
