"""Gives access to the pool of a dead worker, whose pages a cache on the same host may copy instead of recomputing them.

The memory is mapped copy-on-write and only read, so several workers may use one pool at once. A peer may still write
into it through its own mapping, but only into pages that were fenced and therefore never in the journal. The checksum
is computed over the copy, after the original was read for the last time, so a page that does not match it never reaches
the cache.
"""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Sequence

import torch

from engine.cache.kept.journal import ENTRY_BYTES, POOL_ID_BYTES, SealedPage, read_journal
from engine.cache.kept.pool_journal import JOURNAL_NAME
from engine.cache.pool_memory import FILE_NAME, SEALS, file_bytes
from engine.kernels.page_checksum import select_checksum
from engine.kernels.page_copy import select_copy
from penstock.errors import InvalidInput
from penstock.types import PageHash, PageId


class KeptPool:
    """Implements `engine.cache.tiers.CacheSource`. The step loop is the only caller after the constructor."""

    def __init__(self, pool_fd: int, journal_fd: int, pool_id: bytes, num_pages: int, kv_pages: torch.Tensor) -> None:
        """Maps the memory and reads its journal, which takes about a microsecond per page; the caller keeps the file
        descriptors. Pages are copied into the pool `kv_pages`, which has the same layout. Raises InvalidInput for files
        that are not a pool of `num_pages` such pages and its journal, and OSError if they cannot be mapped.
        """
        self._own_PW = _words(kv_pages)
        page_bytes = self._own_PW.shape[1] * self._own_PW.element_size()
        if len(pool_id) != POOL_ID_BYTES:
            raise InvalidInput("pool_id", f"has {len(pool_id)} bytes, want {POOL_ID_BYTES}")
        _check_file("pool", pool_fd, FILE_NAME, file_bytes(num_pages * page_bytes))
        _check_file("journal", journal_fd, JOURNAL_NAME, num_pages * ENTRY_BYTES)
        table = os.pread(journal_fd, num_pages * ENTRY_BYTES, 0)
        mapped = torch.from_file(
            f"/proc/self/fd/{pool_fd}", shared=False, size=num_pages * page_bytes, dtype=torch.uint8
        )
        self._kept_PW = mapped.view(num_pages, page_bytes).view(torch.int32)
        self.pages: dict[PageHash, SealedPage] = {}
        for sealed in read_journal(table, pool_id):
            known = self.pages.get(sealed.page_hash)
            if known is None or known.number < sealed.number:
                self.pages[sealed.page_hash] = sealed
        self.num_damaged = 0  # pages that did not match their checksum in the journal

    def holds(self, page_hash: PageHash) -> bool:
        return page_hash in self.pages

    def leading(self, hashes: Sequence[PageHash]) -> list[PageHash]:
        """Returns the hashes before the first one that this pool does not hold."""
        return list(itertools.takewhile(self.pages.__contains__, hashes))

    def load(self, hashes: Sequence[PageHash], pages: Sequence[PageId]) -> int:
        """Copies these pages to `pages`, which only the caller holds, and checks the copies. Returns how many leading
        copies are right, and forgets pages that are damaged.
        """
        sealed = [self.pages[page_hash] for page_hash in hashes]
        select_copy()(self._own_PW, self._kept_PW, pages, [each.page for each in sealed])
        found = select_checksum()(self._own_PW, pages)
        wrong = [each for each, checksum in zip(sealed, found, strict=True) if each.checksum != checksum]
        for each in wrong:
            del self.pages[each.page_hash]
        self.num_damaged += len(wrong)
        return next((index for index, each in enumerate(sealed) if each.page_hash not in self.pages), len(sealed))


def _words(kv_pages: torch.Tensor) -> torch.Tensor:
    return kv_pages.view(kv_pages.shape[0], -1).view(torch.uint8).view(torch.int32)


def _check_file(field: str, fd: int, name: str, num_bytes: int) -> None:
    """Raises InvalidInput unless the descriptor is a memory file of this user with this name and size that cannot
    shrink while it is mapped.
    """
    kind, status = os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd)
    if not kind.startswith(f"/memfd:{name} ") or status.st_uid != os.getuid():
        raise InvalidInput(field, f"is {kind!r} of user {status.st_uid}; want a memory file {name} of this user")
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise InvalidInput(field, "could shrink while it is mapped; seal it")
    if status.st_size != num_bytes:
        raise InvalidInput(field, f"has {status.st_size} bytes, want {num_bytes}")
