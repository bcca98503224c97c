"""KV transfers between two processes on one device, beside what it copies and what a prefill takes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.ground import Ground
from benchmarks.report import Row
from benchmarks.sending import SPARE, in_turns, sending
from benchmarks.shapes import TOY, random_llama
from benchmarks.transfer_peer import Process
from engine.engine import Engine
from engine.kernels.copy_pages import select_copy
from engine.sequence import ScheduledSequence, Sequence
from engine.shared_pool import allocate_pool
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


def transfer_rows(ground: Ground, bytes_per_s: float) -> Iterator[Row]:
    """`bytes_per_s`: of a device copy, read and written counted. A rehearsal goes over shared memory."""
    yield _kernel_row(ground, bytes_per_s)
    bytes_a_token, last_part_s = ground.pick(BYTES_A_TOKEN, 64), 0.0
    wire, page_bytes = ground.pick("cuda_ipc", "shm"), bytes_a_token * PAGE_SIZE
    lengths = ground.pick((CHUNK_TOKENS // LAYER_GROUPS, CHUNK_TOKENS, 8192, 32768), (32, 64))
    num_pages = int(SPARE * max(lengths)) // PAGE_SIZE
    memory = allocate_pool((num_pages * page_bytes,), torch.uint8, ground.device).fill_(1)
    ground.cuda.synchronize()
    peer = Process(max(1 << 12, 0 if wire == "cuda_ipc" else num_pages * page_bytes), str(ground.device))
    try:
        peer.expect_ready()
        with sending(peer, memory, wire, num_pages, page_bytes) as end:
            for length in lengths:
                num_bytes = bytes_a_token * length
                took_s = in_turns({"paged": lambda: end.transfer_s(length // PAGE_SIZE)}, num_bytes)["paged"]  # noqa: B023
                last_part_s = last_part_s or took_s
                label = f"{wire} 8B page {PAGE_SIZE}, {length} tokens, {num_bytes / 1e6:.3g} MB"
                yield Row(label, took_s * 1e6, "us")
                yield Row(label, num_bytes / took_s / 1e9, "GB/s", "device copy", bytes_per_s / 2e9)
    finally:
        peer.stop()
    del memory
    prefill_s = prefill_8b_s(ground)
    label = f"exposed over {wire}, 8B page {PAGE_SIZE}: the last of {LAYER_GROUPS} parts of {CHUNK_TOKENS} tokens"
    yield Row(
        label, last_part_s * 1e3, "ms", f"prefill of {CHUNK_TOKENS} tokens, from {32 // SHARE} layers", prefill_s * 1e3
    )


def _kernel_row(ground: Ground, bytes_per_s: float) -> Row:
    """The copy of pages alone, in this process."""
    num_pages, words = ground.pick((1024, BYTES_A_TOKEN * PAGE_SIZE // 8), (4, 16))
    source, target = (torch.ones(num_pages, words, dtype=torch.int64, device=ground.device) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    src, dst = (torch.randperm(num_pages, generator=generator).tolist() for _ in range(2))
    copy = select_copy(ground.device.type)
    took_s = ground.seconds(lambda: copy(target, source, dst, src))
    return Row(
        "page copy kernel, 8B page 16", 2 * source.nbytes / took_s / 1e9, "GB/s", "device copy", bytes_per_s / 1e9
    )


def prefill_8b_s(ground: Ground) -> float:
    """Of one chunk, reckoned from a share of the layers."""
    num_tokens = ground.pick(CHUNK_TOKENS, 32)
    folder = random_llama(ground.pick(LAYERS_OF_8B, TOY))
    num_pages = num_tokens // PAGE_SIZE
    settings = ground.engine_settings() | {"num_pages": num_pages + 2, "page_size": PAGE_SIZE}
    engine = Engine.load(EngineConfig.model_validate({"model": str(folder), **settings}))
    tokens = [number % engine.model.vocab_size for number in range(num_tokens + 1)]  # one more: nothing is drawn
    sequence = Sequence(RequestId("chunk"), tokens, len(tokens), SamplingParams(max_tokens=1, temperature=0.0), b"")
    sequence.pages = engine.pool.allocate(num_pages + 1)
    return ground.wall_seconds(lambda: engine.step([ScheduledSequence(sequence, num_tokens)]), 10) * SHARE
