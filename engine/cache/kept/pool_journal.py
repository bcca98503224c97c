"""Writes the journal of this process's own pool to a memory file, which outlives the process if another one holds
it.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence

import torch

from engine.cache.kept.journal import ENTRY_BYTES, JournalWriter, new_pool_id
from engine.cache.pool_memory import create_memory_file, shared_file
from engine.kernels.page_checksum import select_checksum
from penstock.errors import ConfigError
from penstock.types import PageHash, PageId

JOURNAL_NAME = "penstock-journal"


class PoolJournal:
    """Owns the journal's file until this object is collected. The step loop writes it, through the prefix cache."""

    def __init__(self, kv_pages: torch.Tensor) -> None:
        """`kv_pages` is the pool, [P, ...], contiguous. Raises ConfigError if its memory cannot outlive the process."""
        pool_fd = shared_file(kv_pages)
        if pool_fd is None:
            where = "CUDA memory" if kv_pages.is_cuda else "memory of this process alone"
            raise ConfigError(
                f"keeper: the page pool is in {where}, which ends with the process; leave keeper out, or serve on a "
                "CPU of a Linux machine"
            )
        num_pages = kv_pages.shape[0]
        words_PW = kv_pages.view(num_pages, -1).view(torch.uint8)
        if words_PW.shape[1] % 4:
            raise ConfigError(
                f"keeper: pages of {words_PW.shape[1]} bytes have no checksum, which needs a multiple of 4; set "
                "engine.page_size to a multiple of 4"
            )
        self.pool_id = new_pool_id()
        self.num_pages = num_pages
        self.page_bytes = words_PW.shape[1]
        self.pool_fd = pool_fd
        self.fd = create_memory_file(JOURNAL_NAME, num_pages * ENTRY_BYTES)
        weakref.finalize(self, os.close, self.fd)
        self._table = mmap.mmap(self.fd, num_pages * ENTRY_BYTES)
        self._writer = JournalWriter(memoryview(self._table), self.pool_id)
        self._words_PW = words_PW.view(torch.int32)
        self._checksum = select_checksum()

    def seal(self, run: Sequence[PageHash], pages: Sequence[PageId], parent: PageHash | None) -> None:
        """Records a run of complete pages, each the child of the previous one."""
        for page_hash, page, checksum in zip(run, pages, self._checksum(self._words_PW, pages), strict=True):
            self._writer.seal(page, page_hash, parent, checksum)
            parent = page_hash

    def unseal(self, pages: Sequence[PageId]) -> None:
        """Removes pages that may be written from now on."""
        for page in pages:
            self._writer.clear(page)
