"""Tests checksums of pages: every variant computes the number that the module defines, and damage changes it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.checksum_words import BLOCK_WORDS, checksum_rows, factors, multipliers
from engine.kernels.page_checksum import ChecksumPages, checksum_by_index, select_checksum
from engine.kernels.triton.page_checksum import checksum_pages

GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # without a GPU the Triton kernel is interpreted
CPU = torch.device("cpu")
CHECKSUMS = [(select_checksum(), CPU), (checksum_rows, CPU), (checksum_by_index, GPU), (checksum_pages, GPU)]


def random_pool(num_pages: int, num_words: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_words)
    return torch.randint(-(2**31), 2**31, (num_pages, num_words), generator=generator).to(torch.int32)


def defined(words: list[int]) -> int:
    """Returns the checksum as `checksum_words` defines it."""
    multiplier_W, factor_B = multipliers().tolist(), factors(len(words)).tolist()
    terms = (
        (word & 0xFFFFFFFF) * multiplier_W[place % BLOCK_WORDS] * factor_B[place // BLOCK_WORDS]
        for place, word in enumerate(words)
    )
    return sum(terms) % 2**64


@pytest.mark.parametrize(("checksum", "device"), CHECKSUMS)
@pytest.mark.parametrize("num_words", [1, 5, 1023, 1024, 1025, 5000])
def test_every_variant_computes_the_defined_number(
    checksum: ChecksumPages, device: torch.device, num_words: int
) -> None:
    pool = random_pool(5, num_words)
    wanted = [defined(pool[page].tolist()) for page in (3, 0, 4)]
    assert checksum(pool.to(device), [3, 0, 4]) == wanted
    assert checksum(pool.to(device), []) == []


@given(place=st.integers(0, 2999), bit=st.integers(0, 31))
def test_any_flipped_bit_changes_the_checksum(place: int, bit: int) -> None:
    pool = random_pool(1, 3000)
    before = select_checksum()(pool, [0])
    pool.view(torch.uint8)[0, 4 * place + bit // 8] ^= 1 << bit % 8
    assert select_checksum()(pool, [0]) != before


@given(first=st.integers(0, 2999), second=st.integers(0, 2999))
def test_swapped_words_change_the_checksum(first: int, second: int) -> None:
    pool = random_pool(1, 3000)
    before = select_checksum()(pool, [0])
    pool[0, [first, second]] = pool[0, [second, first]]
    assert (select_checksum()(pool, [0]) == before) == (first == second)


@pytest.mark.parametrize(("checksum", "device"), CHECKSUMS)
def test_pages_outside_the_pool_and_other_word_sizes_are_refused(checksum: ChecksumPages, device: torch.device) -> None:
    pool = random_pool(4, 64).to(device)
    for pages in ([4], [-1], [0, 9]):
        with pytest.raises(ValueError, match="of a pool of 4"):
            checksum(pool, pages)
    with pytest.raises(ValueError, match="expected contiguous int32"):
        checksum(pool.to(torch.int64), [0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_pool_on_a_gpu_has_the_checksums_of_its_copy_on_the_host() -> None:
    pool = random_pool(300, 1 << 19)  # pages of 2 MiB, as of an 8B Llama
    pages = list(range(0, 300, 7))
    assert checksum_pages(pool.to("cuda"), pages) == select_checksum()(pool, pages)
