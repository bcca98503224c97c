"""KV transfers between two processes on one CUDA device, beside what the device copies and what a prefill takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.report import Row
from benchmarks.sending import SPARE, in_turns, sending
from benchmarks.shapes import random_llama
from benchmarks.transfer_peer import Process
from engine.engine import Engine
from engine.kernels.copy_pages import select_copy
from engine.sequence import ScheduledSequence, Sequence
from kv_transfer.links import LAYER_GROUPS
from penstock.config import EngineConfig
from penstock.types import RequestId, SamplingParams

PAGE_SIZE = 16
BYTES_A_TOKEN = 32 * 2 * 8 * 128 * 2  # 8B Llama, bf16
CHUNK_TOKENS = 2048
# A share of the 8B shape's layers, since prefill time is that of the layers; a small vocabulary, as nothing is drawn.
SHARE = 8
LAYERS_OF_8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32 // SHARE,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 32000,
}

Seconds = Callable[[Callable[[], object]], float]


def transfer_rows(bytes_per_s: float, seconds: Seconds) -> Iterator[Row]:
    """`bytes_per_s`: of a device copy, read and written counted; `seconds` times device work."""
    yield _kernel_row(bytes_per_s, seconds)
    page_bytes, last_part_s = BYTES_A_TOKEN * PAGE_SIZE, 0.0
    lengths = (CHUNK_TOKENS // LAYER_GROUPS, CHUNK_TOKENS, 8192, 32768)
    num_pages = int(SPARE * max(lengths)) // PAGE_SIZE
    memory = torch.ones(num_pages * page_bytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    peer = Process(1 << 12, "cuda")
    try:
        peer.expect_ready()
        with sending(peer, memory, "cuda_ipc", num_pages, page_bytes) as end:
            for length in lengths:
                num_bytes = BYTES_A_TOKEN * length
                took_s = in_turns({"paged": lambda: end.transfer_s(length // PAGE_SIZE)}, num_bytes)["paged"]  # noqa: B023
                last_part_s = last_part_s or took_s
                label = f"cuda_ipc 8B page {PAGE_SIZE}, {length} tokens, {num_bytes / 1e6:.3g} MB"
                yield Row(label, took_s * 1e6, "us")
                yield Row(label, num_bytes / took_s / 1e9, "GB/s", "device copy", bytes_per_s / 2e9)
    finally:
        peer.stop()
    del memory
    prefill_s = prefill_8b_s(seconds)
    label = f"exposed over cuda_ipc, 8B page {PAGE_SIZE}: the last of {LAYER_GROUPS} parts of {CHUNK_TOKENS} tokens"
    yield Row(
        label, last_part_s * 1e3, "ms", f"prefill of {CHUNK_TOKENS} tokens, from {32 // SHARE} layers", prefill_s * 1e3
    )


def _kernel_row(bytes_per_s: float, seconds: Seconds) -> Row:
    """The copy of pages alone, in this process."""
    num_pages, words = 1024, BYTES_A_TOKEN * PAGE_SIZE // 8
    source, target = (torch.ones(num_pages, words, dtype=torch.int64, device="cuda") for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    src, dst = (torch.randperm(num_pages, generator=generator).tolist() for _ in range(2))
    copy = select_copy("cuda")
    took_s = seconds(lambda: copy(target, source, dst, src))
    return Row(
        "page copy kernel, 8B page 16", 2 * source.nbytes / took_s / 1e9, "GB/s", "device copy", bytes_per_s / 1e9
    )


def prefill_8b_s(seconds: Seconds) -> float:
    """Of one chunk, reckoned from a share of the layers."""
    folder = random_llama(LAYERS_OF_8B)
    num_pages = CHUNK_TOKENS // PAGE_SIZE
    engine = Engine.load(EngineConfig(model=str(folder), device="cuda", num_pages=num_pages + 2, page_size=PAGE_SIZE))
    tokens = [number % 30000 for number in range(CHUNK_TOKENS + 1)]  # one more: nothing is drawn
    sequence = Sequence(RequestId("chunk"), tokens, len(tokens), SamplingParams(max_tokens=1, temperature=0.0), b"")
    sequence.pages = engine.pool.allocate(num_pages + 1)
    return seconds(lambda: engine.step([ScheduledSequence(sequence, CHUNK_TOKENS)])) * SHARE
