"""Compares page copies between pools, in C++ and Triton, with their references at many sizes and alignments."""

from __future__ import annotations

import random

import pytest
import torch

from engine.kernels.page_copy import CopyPages, copy_by_index, copy_rows, select_copy
from engine.kernels.triton.copy_pages import copy_pages

GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # without a GPU the Triton kernel is interpreted
CPU = torch.device("cpu")
COPIES = [(select_copy(), CPU), (copy_rows, CPU), (copy_by_index, GPU), (copy_pages, GPU)]


@pytest.mark.parametrize(("copy", "device"), COPIES)
@pytest.mark.parametrize("page_bytes", [1, 8, 63, 64, 65, 4096, 5000])
@pytest.mark.parametrize("offset", [0, 1, 16])
def test_pages_are_copied_and_nothing_else_is_touched(
    copy: CopyPages, device: torch.device, page_bytes: int, offset: int
) -> None:
    draw = random.Random(page_bytes)
    generator = torch.Generator().manual_seed(page_bytes)
    num_pages = 9
    source = torch.randint(0, 256, (num_pages * page_bytes + offset,), dtype=torch.uint8, generator=generator)
    source = source.to(device)
    memory = torch.zeros(num_pages * page_bytes + 2 * offset, dtype=torch.uint8, device=device)
    from_pool = source[offset:].view(num_pages, page_bytes)
    to_pool = memory[offset : offset + num_pages * page_bytes].view(num_pages, page_bytes)
    src, dst = draw.sample(range(num_pages), 5), draw.sample(range(num_pages), 5)
    copy(to_pool, from_pool, dst, src)
    assert torch.equal(to_pool[dst], from_pool[src])
    untouched = sorted(set(range(num_pages)) - set(dst))
    assert not to_pool[untouched].any()
    assert not memory[:offset].any()
    assert not memory[offset + num_pages * page_bytes :].any()


@pytest.mark.parametrize("copy", [copy_by_index, copy_pages])
def test_page_numbers_on_the_device_are_not_copied_to_the_host(
    copy: CopyPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = torch.arange(5 * 70, dtype=torch.int64, device=GPU).view(5, 70)
    to, wanted = torch.zeros_like(source), torch.zeros_like(source)
    dst, src = torch.tensor([4, 0], device=GPU), torch.tensor([1, 2], device=GPU)
    wanted[[4, 0]] = source[[1, 2]]
    with monkeypatch.context() as patch:
        patch.setattr("engine.kernels.upload.upload", None)
        copy(to, source, dst, src)
    assert torch.equal(to, wanted)
    with pytest.raises(AssertionError, match="int32"):
        copy(to, source, dst.int(), src)


def test_a_kernel_skips_unchecked_pages_outside_a_pool() -> None:
    source = torch.ones(4, 9, dtype=torch.int64, device=GPU)
    memory = torch.zeros(8, 9, dtype=torch.int64, device=GPU)
    to_pages = torch.tensor([4, -1, 2, 1, 0], device=GPU)
    copy_pages(memory[2:6], source, to_pages, torch.tensor([0, 1, 2, 4, -1], device=GPU))
    assert memory.sum(1).tolist() == [0, 0, 0, 0, 9, 0, 0, 0]


@pytest.mark.parametrize(("copy", "device"), COPIES)
def test_pages_outside_a_pool_are_refused(copy: CopyPages, device: torch.device) -> None:
    pool, other = (torch.zeros(4, width, dtype=torch.uint8, device=device) for width in (64, 65))
    for to, src, dst in ((pool, [0], [4]), (pool, [-1], [0]), (pool, [0, 1], [0]), (other, [0], [0])):
        with pytest.raises(AssertionError):
            copy(to, pool, dst, src)
