"""Tests page checksums: they depend only on the bytes of one page, for every dtype."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.checksum_words import checksum_rows
from kv_transfer.layout.checksum import page_checksums
from penstock.types import PageId


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_checksum_covers_the_bytes_of_its_page(dtype: torch.dtype) -> None:
    pool = torch.randn(5, 2, 2, 3, 4, 8).to(dtype)
    words = torch.frombuffer(bytearray(pool.view(torch.uint8).numpy().tobytes()), dtype=torch.int32)
    assert page_checksums(pool, [PageId(3), PageId(0)]) == checksum_rows(words.view(5, -1), [3, 0])


def test_one_flipped_bit_changes_one_checksum() -> None:
    pool = torch.zeros(3, 64, dtype=torch.int32)
    before = page_checksums(pool, [0, 1, 2])
    pool[1, 40] ^= 1
    after = page_checksums(pool, [0, 1, 2])
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]


def test_pages_of_odd_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="pages of 6 bytes; a page must be a multiple of 4 bytes"):
        page_checksums(torch.zeros(3, 6, dtype=torch.uint8), [PageId(0)])
