"""Copies pages between the page pool and the bytes of objects. On a GPU only the step loop touches the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.kernels.page_copy import select_copy
from engine.kernels.upload import upload_pages
from penstock.types import PageId


class PoolBytes:
    """The pool as rows of bytes, [P, W]."""

    def __init__(self, kv_pages: torch.Tensor) -> None:
        """`kv_pages` is the pool, [P, ...], contiguous."""
        self._pool_PW = kv_pages.view(kv_pages.shape[0], -1).view(torch.uint8)
        if not kv_pages.is_cuda:
            select_copy()  # compiles it now rather than with the first page

    def copier(self, pages: Sequence[PageId]) -> Callable[[], memoryview]:
        """Returns a function that copies these pages to the host, for another thread to call. The caller holds the
        pages until it has returned, and nothing writes them meanwhile.
        """
        if not self._pool_PW.is_cuda:
            return lambda: self._copy_on_host(pages)
        gathered_RW = self._pool_PW.index_select(0, upload_pages(pages, self._pool_PW.device))
        gathered = torch.cuda.Event()
        gathered.record()

        def copy() -> memoryview:
            gathered.synchronize()
            with torch.cuda.stream(torch.cuda.Stream(gathered_RW.device)):
                return _bytes_of(gathered_RW.cpu())

        return copy

    def _copy_on_host(self, pages: Sequence[PageId]) -> memoryview:
        copied_RW = torch.empty(len(pages), self._pool_PW.shape[1], dtype=torch.uint8)
        select_copy()(copied_RW, self._pool_PW, range(len(pages)), pages)
        return _bytes_of(copied_RW)

    def fill(self, pages: Sequence[PageId], run: memoryview, rows: Sequence[int]) -> None:
        """Copies rows of an object's pages into pages that only the caller holds. Blocks."""
        run_RW = torch.frombuffer(run, dtype=torch.uint8).view(-1, self._pool_PW.shape[1])
        if not self._pool_PW.is_cuda:
            select_copy()(self._pool_PW, run_RW, pages, rows)
            return
        pages_R = upload_pages(pages, self._pool_PW.device)
        self._pool_PW.index_copy_(0, pages_R, run_RW[list(rows)].to(self._pool_PW.device))


def _bytes_of(rows_RW: torch.Tensor) -> memoryview:
    return rows_RW.view(-1).numpy().data
