"""Defines the checksum of a page, with the numpy reference that every kernel is compared with.

A checksum is a sum over the page's 32-bit words, modulo 2^64: word j of block b, of 1,024 words each, counts
`multiplier[j] * factor[b]` times. Multipliers are odd and below 2^32, factors are odd, so changing a single word or
swapping two words always changes the sum; other damage goes unnoticed about once in 2^32 times or less. It finds damage
by accident, not by an adversary.

Shapes: `P` pages, `W` 32-bit words of a page, `B` blocks of a page.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from engine.sampling.counter_random import GOLDEN, mix

BLOCK_WORDS = 1024
_MASK = (1 << 64) - 1


def checksum_rows(pool_PW: torch.Tensor, pages: Sequence[int]) -> list[int]:
    """Computes on the CPU, page by page, in numpy. The reference of the kernels."""
    check_words(pool_PW, pages)
    words_PW = pool_PW.numpy().view(np.uint32)
    num_words = words_PW.shape[1]
    num_whole = num_words // BLOCK_WORDS
    multiplier_W, factor_B = multipliers(), factors(num_words)
    sums = []
    for page in pages:
        words_W = words_PW[page].astype(np.uint64)
        whole = words_W[: num_whole * BLOCK_WORDS].reshape(num_whole, BLOCK_WORDS) @ multiplier_W
        total = int(whole @ factor_B[:num_whole])
        rest = words_W[num_whole * BLOCK_WORDS :]
        if len(rest):
            total += int(rest @ multiplier_W[: len(rest)]) * int(factor_B[num_whole])
        sums.append(total & _MASK)
    return sums


@functools.cache
def multipliers() -> np.ndarray:
    """Returns the odd uint64 numbers below 2^32 by which the words of a block are multiplied."""
    numbers = np.array([_splitmix64(word) & 0xFFFFFFFF | 1 for word in range(BLOCK_WORDS)], np.uint64)
    numbers.flags.writeable = False
    return numbers


@functools.lru_cache(maxsize=64)
def factors(num_words: int) -> np.ndarray:
    """Returns the odd uint64 number of each block of a page of that many words."""
    numbers = np.array([_splitmix64(~block) | 1 for block in range(-(-num_words // BLOCK_WORDS))], np.uint64)
    numbers.flags.writeable = False
    return numbers


def _splitmix64(number: int) -> int:
    """Returns splitmix64 of a number (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    return mix((number + 1) * GOLDEN)


def check_words(pool_PW: torch.Tensor, pages: Sequence[int]) -> None:
    if pool_PW.dim() != 2 or pool_PW.dtype != torch.int32 or not pool_PW.is_contiguous():
        raise ValueError(f"pool: {pool_PW.dtype} of shape {tuple(pool_PW.shape)}; expected contiguous int32 [P, W]")
    if len(pages) and not 0 <= min(pages) <= max(pages) < pool_PW.shape[0]:
        raise ValueError(f"pages: {min(pages)} to {max(pages)} of a pool of {pool_PW.shape[0]}")
