"""Tests page checksums: they depend on the bytes of one page alone, for every dtype."""

from __future__ import annotations

import pytest
import torch
import xxhash

from kv_transfer.layout.checksum import page_checksums


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_checksum_hashes_the_bytes_of_its_page(dtype: torch.dtype) -> None:
    pool = torch.randn(5, 2, 2, 3, 4, 8).to(dtype)
    raw = pool.view(torch.uint8).numpy().tobytes()
    size = len(raw) // 5
    assert page_checksums(pool, [3, 0]) == [
        xxhash.xxh3_64_intdigest(raw[page * size : (page + 1) * size]) for page in (3, 0)
    ]


def test_one_flipped_bit_changes_one_checksum() -> None:
    pool = torch.zeros(3, 64, dtype=torch.int32)
    before = page_checksums(pool, [0, 1, 2])
    pool[1, 40] ^= 1
    after = page_checksums(pool, [0, 1, 2])
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]
