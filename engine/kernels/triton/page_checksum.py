"""Computes checksums of pages on a CUDA device (Triton): each page is read once and 8 bytes of it leave the device.

One program sums one block of 1,024 words of one page; the sums of a page's blocks are then added. The plain version,
with the definition of the checksum, is `checksum_rows` in `engine.kernels.checksum_words`.

Shapes: `P` pages, `W` 32-bit words of a page, `B` blocks of a page.
"""

# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers, described next to them)

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from engine.kernels.checksum_words import BLOCK_WORDS, check_words, factors, multipliers
from engine.kernels.triton.common import cdiv
from engine.kernels.upload import upload_pages

_MASK = (1 << 64) - 1


def checksum_pages(pool_PW: torch.Tensor, pages: Sequence[int]) -> list[int]:
    """Returns a number below 2^64 for each of `pages`. `pool_PW` is int32, contiguous. Runs on the current stream of
    the pool's device and waits for it."""
    check_words(pool_PW, pages)
    if not len(pages):
        return []
    device, num_words = pool_PW.device, pool_PW.shape[1]
    num_blocks = cdiv(num_words, BLOCK_WORDS)
    sums_PB = torch.empty((len(pages), num_blocks), dtype=torch.int64, device=device)
    with torch.cuda.device_of(pool_PW):
        _sum_kernel[(len(pages), num_blocks)](
            pool_PW, upload_pages(list(pages), device), _multipliers(device), sums_PB, num_words, num_blocks,
            BLOCK=BLOCK_WORDS, num_warps=4,
        )  # fmt: skip
    return [total & _MASK for total in (sums_PB * _factors(device, num_words)).sum(1).tolist()]


@functools.cache
def _multipliers(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(multipliers().astype(np.uint32).view(np.int32)).to(device)


@functools.lru_cache(maxsize=64)
def _factors(device: torch.device, num_words: int) -> torch.Tensor:
    return torch.from_numpy(factors(num_words).view(np.int64).copy()).to(device)


@triton.jit(do_not_specialize=["num_words", "num_blocks"], do_not_specialize_on_alignment=["page_ptr"])
def _sum_kernel(
    pool_ptr,  # int32 [P, W], contiguous
    page_ptr,  # int64, one for each page that is summed
    multiplier_ptr,  # int32 [BLOCK], of unsigned numbers
    sum_ptr,  # int64 [pages, B], contiguous
    num_words,  # W
    num_blocks,  # B
    BLOCK: tl.constexpr,
):  # grid: (pages that are summed, blocks of a page)
    page = tl.load(page_ptr + tl.program_id(0))
    place = tl.arange(0, BLOCK)
    word = tl.program_id(1) * BLOCK + place
    words = tl.load(pool_ptr + page * num_words + word, mask=word < num_words, other=0)
    multiplier = tl.load(multiplier_ptr + place)
    products = words.to(tl.uint32, bitcast=True).to(tl.int64) * multiplier.to(tl.uint32, bitcast=True).to(tl.int64)
    tl.store(sum_ptr + tl.program_id(0).to(tl.int64) * num_blocks + tl.program_id(1), tl.sum(products, 0))
