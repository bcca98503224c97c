"""Views a pool or a staging buffer as plain rows of bytes, one row per page.

This module sits between the transports and the pool's tensor, which the engine owns: it views the tensor and copies
rows in and out. It ignores the dtype and geometry of pages, which the handshake has compared.

Shape suffixes: P pages, W 8-byte words of a page (bytes where a page is not a multiple of 8).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.kernels.page_copy import select_copy
from engine.kernels.upload import upload_pages
from kv_transfer.layout.reshard import WHOLE_PAGE, PageRows
from penstock.types import PageId


class PageBuffer:
    """Views a contiguous tensor [P, ...] as rows of one page each. Keeps the tensor alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        if tensor.dim() < 2 or tensor.shape[0] == 0 or not tensor.is_contiguous():
            raise ValueError(f"pool: shape {tuple(tensor.shape)}, contiguous={tensor.is_contiguous()}; want [P, ...]")
        self.tensor = tensor
        self.num_pages = tensor.shape[0]
        bytes_P = tensor.view(self.num_pages, -1).view(torch.uint8)
        self.page_bytes = bytes_P.shape[1]
        self.rows_PW = bytes_P.view(torch.int64) if self.page_bytes % 8 == 0 else bytes_P
        self._copy = select_copy(tensor.device.type)  # chosen here so that the first page does not wait for a compiler

    @classmethod
    def staging(cls, num_pages: int, page_bytes: int, device: torch.device) -> PageBuffer:
        pinned = device.type == "cpu" and torch.cuda.is_available()
        return cls(torch.empty(num_pages, page_bytes, dtype=torch.uint8, device=device, pin_memory=pinned))

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    @property
    def is_cuda(self) -> bool:
        return self.tensor.is_cuda

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    def split(self, count: int) -> PageBuffer:
        """Returns the same bytes as `count` rows for each page, without a copy. `count` divides a page's words."""
        return PageBuffer(self.rows_PW.view(self.num_pages * count, -1)) if count > 1 else self

    def in_rows(self, count: int) -> PageBuffer:
        """Splits like `split`, for any `count` that divides a page's bytes."""
        if count == 1:
            return self
        return PageBuffer(self.rows_PW.view(torch.uint8).view(self.num_pages * count, -1))

    def head(self, num_pages: int) -> PageBuffer:
        """Returns the first pages of this buffer, without a copy."""
        return PageBuffer(self.tensor[:num_pages])

    def gather(self, pages: Sequence[PageId], out: PageBuffer) -> None:
        """Copies `pages`, in order, into the first rows of `out`."""
        if self.is_cuda:
            out.copy_from(self, pages, [PageId(index) for index in range(len(pages))])
            return
        index_P = upload_pages(pages, self.device)
        torch.index_select(self.rows_PW, 0, index_P, out=out.rows_PW[: len(pages)])

    def copy_from(self, source: PageBuffer, src_pages: Sequence[PageId], dst_pages: Sequence[PageId]) -> None:
        """Copies src_pages[i] of `source` into dst_pages[i] of this buffer; both are on the same kind of device. On a
        GPU, queues the copy on the current stream and does not wait for it.
        """
        self._copy(self.rows_PW, source.rows_PW, dst_pages, src_pages)

    def copy_part(
        self, source: PageBuffer, src_pages: Sequence[PageId], dst_pages: Sequence[PageId], part: tuple[int, int]
    ) -> None:
        """Copies like `copy_from`, but only the `part[0]`-th of `part[1]` equal runs of each page's bytes."""
        index, count = part
        src_rows, dst_rows = ([PageId(page * count + index) for page in pages] for pages in (src_pages, dst_pages))
        self.split(count).copy_from(source.split(count), src_rows, dst_rows)

    def settle(self) -> None:
        """Blocks until the current stream has finished; returns at once on a CPU."""
        if self.is_cuda:
            torch.cuda.current_stream(self.device).synchronize()

    def scatter(
        self, pages: Sequence[PageId], staged: PageBuffer, staged_pages: Sequence[PageId], part: PageRows
    ) -> None:
        """Copies staged_pages[i] of `staged`, which hold only `part` of each page, into pages[i]."""
        if part == WHOLE_PAGE:
            self.copy_from(staged, staged_pages, pages)
            return
        source = rows_of_pages(staged_pages, part.num_in_part, range(part.num_in_part))
        target = rows_of_pages(pages, part.num_in_page, part.places)
        self.in_rows(part.num_in_page).copy_from(staged.in_rows(part.num_in_part), source, target)


def rows_of_pages(pages: Sequence[PageId], num_rows: int, places: Sequence[int]) -> list[PageId]:
    """Returns the rows at `places` of each page, in order, where a page has `num_rows` rows."""
    return [PageId(page * num_rows + place) for page in pages for place in places]
