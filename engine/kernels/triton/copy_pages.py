"""Copies pages between pools on CUDA devices in one kernel (Triton): each byte is read once and written once.

One program copies one block of one page. The plain-torch version is `copy_by_index` in `engine.kernels.page_copy`,
which reads and writes everything twice. `to` may be memory of another device or process that `source`'s device can
access: the kernel takes addresses, because Triton refuses tensors of another device than the one it launches on.

Shapes: `P` pages, `W` words of a page.
"""

# mypy: allow-untyped-defs
# (kernel arguments are Triton's own pointers and numbers, described next to them)

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.checks import check_page_rows
from engine.kernels.triton.common import cdiv
from engine.kernels.upload import PageList, upload_pages

_WORDS = {torch.int64: tl.int64, torch.uint8: tl.uint8}
_BLOCK_WORDS = 2048  # 16 KiB of 8-byte words for 128 threads: eight loads of 16 bytes each; not tuned


def copy_pages(to: torch.Tensor, source: torch.Tensor, to_pages: PageList, source_pages: PageList) -> None:
    """Sets to[to_pages[i]] = source[source_pages[i]]; both are [P, W], contiguous, of int64 or both uint8.

    Runs on the current stream of `source`'s device without waiting. Page numbers that are on the device already are
    read only by the kernel, which skips those outside a pool."""
    check_page_rows(to, source, to_pages, source_pages)
    if not len(to_pages):
        return
    num_words = source.shape[1]
    to_P, source_P = (upload_pages(pages, source.device) for pages in (to_pages, source_pages))
    with torch.cuda.device_of(source):
        _copy_kernel[(len(to_pages), cdiv(num_words, _BLOCK_WORDS))](
            to.data_ptr(), source.data_ptr(), to_P, source_P, to.shape[0], source.shape[0], num_words,
            IS_ALIGNED=(to.data_ptr() | source.data_ptr() | num_words * source.element_size()) % 16 == 0,
            WORD=_WORDS[source.dtype], BLOCK=_BLOCK_WORDS, num_warps=4,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["to_address", "source_address", "num_to_pages", "num_source_pages"],
    do_not_specialize_on_alignment=["to_page_ptr", "source_page_ptr"],
)
def _copy_kernel(
    to_address,  # int64: of [P, W], contiguous
    source_address,  # int64: of [P, W], contiguous
    to_page_ptr,  # int64, one for each page that is copied
    source_page_ptr,  # the same
    num_to_pages,  # of the pools
    num_source_pages,
    num_words,  # W
    IS_ALIGNED: tl.constexpr,  # every page begins at a multiple of 16 bytes
    WORD: tl.constexpr,  # type of a word
    BLOCK: tl.constexpr,
):  # grid: (pages that are copied, blocks of a page)
    to_page = tl.load(to_page_ptr + tl.program_id(0))
    source_page = tl.load(source_page_ptr + tl.program_id(0))
    if to_page < 0 or to_page >= num_to_pages or source_page < 0 or source_page >= num_source_pages:
        return
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = word < num_words
    source_ptr = source_address.to(tl.pointer_type(WORD)) + source_page * num_words
    to_ptr = to_address.to(tl.pointer_type(WORD)) + to_page * num_words
    if IS_ALIGNED:  # Triton knows this of tensors but not of addresses; without it, it copies word by word
        source_ptr = tl.multiple_of(source_ptr, 16)
        to_ptr = tl.multiple_of(to_ptr, 16)
    words = tl.load(source_ptr + word, mask=mask)
    tl.store(to_ptr + word, words, mask=mask)
