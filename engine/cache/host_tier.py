"""Keeps pages that are evicted from the pool in host memory.

The memory is one tensor, allocated once, with pages of the pool's shape; `engine.cache.page_slots` maps pages to its
slots. Only `engine.cache.tiers` calls this module, for many pages at once.

On a CPU a copy is complete when the call returns. On a GPU the memory is pinned (`pinned_memory`), and copies run on
a separate stream:
* out: the step's stream gathers the pages into a scratch buffer, which takes microseconds and is waited for, so that a
  step or a peer, which knows nothing of streams, may overwrite the pages as soon as the call returns. The copy over the
  bus overlaps with the next step; only evictions faster than the bus wait for it.
* in: the step's stream waits for the copies on the device; the host does not wait. A page evicted before they are done
  is still safe: every eviction passes through `write`, which waits for them even if it copies nothing.
All copies use one stream, so that a slot is never read before it is written, nor overwritten before it is read.

Shape suffixes: P pages, W bytes of a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from engine.cache.page_slots import PageSlots
from engine.cache.pinned_memory import allocate_pinned
from engine.kernels.page_copy import select_copy
from engine.kernels.upload import upload_pages
from penstock.types import PageId

_SCRATCH_BYTES = 64 << 20  # on a GPU: takes a PCIe 4 bus about 3 ms


class HostTier:
    """Owns the memory and its slots."""

    def __init__(self, kv_pages: torch.Tensor, num_pages: int) -> None:
        """`kv_pages` is the pool, [P, ...], contiguous."""
        if not kv_pages.is_contiguous():
            raise ValueError(f"pool: shape {tuple(kv_pages.shape)} is not contiguous")
        self._kv_pages = kv_pages
        shape = (num_pages, *kv_pages.shape[1:])
        # Not zeroed: a slot is read only after it was written, and untouched memory costs nothing.
        self._host_pages = (allocate_pinned if kv_pages.is_cuda else torch.empty)(shape, dtype=kv_pages.dtype)
        self._bytes_PW = self._host_pages.view(num_pages, -1).view(torch.uint8)
        self._kv_bytes_PW = kv_pages.view(kv_pages.shape[0], -1).view(torch.uint8)
        if not kv_pages.is_cuda:
            select_copy()  # compiles the kernel now rather than with the first page
        self._stream = torch.cuda.Stream(kv_pages.device) if kv_pages.is_cuda else None
        num_scratch = max(1, _SCRATCH_BYTES // self._bytes_PW.shape[1]) if kv_pages.is_cuda else 0
        self._scratch = torch.empty(num_scratch, *kv_pages.shape[1:], dtype=kv_pages.dtype, device=kv_pages.device)
        self._bounce = torch.empty(kv_pages.shape[1:], dtype=kv_pages.dtype, pin_memory=kv_pages.is_cuda)
        self.bounce = self._bounce.view(-1).view(torch.uint8).numpy().data  # holds a page read from disk
        self.slots = PageSlots(num_pages)

    def write(self, slots: Sequence[int], pages: Sequence[PageId]) -> None:
        """Copies pages from the pool to the host. When it returns, `pages` may be overwritten."""
        if self._stream is None:
            select_copy()(self._bytes_PW, self._kv_bytes_PW, slots, pages)
            return
        step_stream = torch.cuda.current_stream(self._kv_pages.device)
        step_stream.wait_stream(self._stream)  # copies into pages that are about to be reused, and out of the scratch
        pages_P = upload_pages(pages, self._kv_pages.device)
        for first in range(0, len(pages), len(self._scratch)):
            self._write_through_scratch(self._stream, slots[first:], pages_P[first : first + len(self._scratch)])
        step_stream.synchronize()

    def _write_through_scratch(self, stream: torch.cuda.Stream, slots: Sequence[int], pages_P: torch.Tensor) -> None:
        """Copies at most as many pages as the scratch buffer holds; `slots` may be longer."""
        step_stream = torch.cuda.current_stream(self._kv_pages.device)
        step_stream.wait_stream(stream)
        torch.index_select(self._kv_pages, 0, pages_P, out=self._scratch[: len(pages_P)])
        stream.wait_stream(step_stream)
        with torch.cuda.stream(stream):
            for index, slot in enumerate(slots[: len(pages_P)]):
                self._host_pages[slot].copy_(self._scratch[index], non_blocking=True)

    def read(self, slots: Sequence[int], pages: Sequence[PageId]) -> None:
        """Copies slots to the pool, ahead of anything that the step's stream does next. The caller holds `pages`."""
        if self._stream is None:
            select_copy()(self._kv_bytes_PW, self._bytes_PW, pages, slots)
            return
        step_stream = torch.cuda.current_stream(self._kv_pages.device)
        self._stream.wait_stream(step_stream)
        with torch.cuda.stream(self._stream):
            for slot, page in zip(slots, pages, strict=True):
                self._kv_pages[page].copy_(self._host_pages[slot], non_blocking=True)
        step_stream.wait_stream(self._stream)

    def read_bounce(self, page: PageId) -> None:
        """Copies the bounce buffer to the pool. Blocks: the buffer is free again when it returns."""
        self._kv_pages[page].copy_(self._bounce)

    def settle(self) -> None:
        """Blocks until all written pages are in their slots. On a CPU they already are."""
        if self._stream is not None:
            self._stream.synchronize()

    def content(self, slot: int) -> memoryview:
        """Returns the bytes of a slot; call `settle` first."""
        return self._bytes_PW[slot].numpy().data

    def wipe(self, slots: Iterable[int]) -> None:
        """Zeroes slots whose pages were forgotten."""
        self.settle()
        for slot in slots:
            self._host_pages[slot].zero_()
