"""Measures the lower cache tiers: copies out and back compared with memcpy, and restored pages with recomputed ones.

`python -m benchmarks.engine.tiers` runs on one thread without network. The disk is that of the temporary folder.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import torch

from benchmarks.common.report import Row, publish
from benchmarks.common.shapes import random_llama
from benchmarks.common.timing import best_s
from engine.cache.disk_tier import DiskFile, DiskTier
from engine.cache.host_tier import HostTier
from engine.engine import Engine
from engine.generate import generate
from penstock.config import EngineConfig
from penstock.types import PageHash, PageId, SamplingParams

NUM_PAGES = 256  # pages of one copy, more than any cache of the CPU holds
PROMPT_TOKENS = 1024
_FIRST_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.engine.tiers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    model = random_llama()
    folder = tempfile.mkdtemp(prefix="penstock-tiers-")
    try:
        rows = [*copies(model, folder), *prompts(model, folder)]
    finally:
        shutil.rmtree(folder)
    publish("tiers", f"135M shape, bf16, pages of 16 tokens, one thread; prompts of {PROMPT_TOKENS} tokens", rows)


def copies(model: Path, folder: str) -> list[Row]:
    """Returns GB/s of copies of many pages at once, scattered at both ends."""
    engine = load(model, num_pages=2 * NUM_PAGES)
    page_bytes, kv_pages = engine.layout.page_bytes, engine.kv_pages
    kv_pages.fill_(1)
    host = HostTier(kv_pages, 2 * NUM_PAGES)
    disk = DiskTier(DiskFile(folder, NUM_PAGES, host), NUM_PAGES)
    pages = [PageId(page) for page in torch.randperm(2 * NUM_PAGES)[:NUM_PAGES].tolist()]
    slots = torch.randperm(2 * NUM_PAGES)[:NUM_PAGES].tolist()
    other = torch.ones_like(kv_pages[:NUM_PAGES])
    hashes = [PageHash(index.to_bytes(16, "big")) for index in range(NUM_PAGES)]

    def to_disk() -> None:
        for page_hash, slot in zip(hashes, slots, strict=True):
            if page_hash in disk.slots:
                disk.slots.discard(page_hash)
            disk.store(page_hash, slot)

    def from_disk() -> None:
        for page_hash, page in zip(hashes, pages, strict=True):
            assert disk.load(page_hash)
            host.read_bounce(page)

    gigabytes = NUM_PAGES * page_bytes / 1e9
    memcpy = gigabytes / best_s(lambda: other.copy_(kv_pages[:NUM_PAGES]))
    found = {
        "device to host": lambda: host.write(slots, pages),
        "host to device": lambda: host.read(slots, pages),
        "host to disk, with checksums": to_disk,
        "disk to device, verified": from_disk,
    }
    return [Row(name, gigabytes / best_s(call), "GB/s", "memcpy", memcpy) for name, call in found.items()]


def prompts(model: Path, folder: str) -> list[Row]:
    """Returns the time to the first token when all but the prompt's last page come from one tier."""
    page_bytes = load(model, num_pages=2).layout.page_bytes
    num_pages = PROMPT_TOKENS // 16 + 8  # room for one prompt, not for two
    roomy = 4 * num_pages * page_bytes
    two = [[token] * PROMPT_TOKENS for token in (5, 6)]

    def first_token_ms(prompts: list[list[int]], **settings: object) -> float:
        engine = load(model, num_pages=num_pages, **settings)
        turn = iter(range(10**6))
        first_token = lambda: generate(engine, prompts[next(turn) % len(prompts)], _FIRST_TOKEN)  # noqa: E731
        first_token()
        first_token()
        return best_s(first_token) * 1e3

    computed = first_token_ms(two)
    small_host = {"host_memory_bytes": page_bytes, "disk_bytes": roomy, "disk_path": folder}
    found = {
        "device": first_token_ms(two[:1]),
        "host": first_token_ms(two, host_memory_bytes=roomy),
        "disk": first_token_ms(two, **small_host),
    }
    return [Row(f"first token, prefix on {name}", ms, "ms", "computed", computed) for name, ms in found.items()]


def load(model: Path, **settings: object) -> Engine:
    return Engine.load(
        EngineConfig.model_validate({"model": str(model), "device": "cpu", "num_threads": 1, **settings})
    )


if __name__ == "__main__":
    main()
