"""Manages the tiers below the device's prefix cache: pages in host memory, and below them pages on disk.

Only `engine.cache.prefix_cache` calls it: a page evicted from the pool is offered here before it is reused (`store`),
and a prompt that continues where the device's cache ends looks here for more (`load`). A loaded page is copied into a
page that the sequence was given anyway, so a hit costs a copy instead of a computation, and schedulers need to know
only how many leading pages are filled.

Tiers hold copies under hashes, never references to the pool. A loaded page stays in its tier as well: it is likely to
be evicted again, and then nothing needs copying. Each tier evicts its least recently used page, to the next tier or for
good. A page whose parent is gone stays until its turn comes, since the parent may be recomputed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol

from engine.cache.disk_tier import DiskTier
from engine.cache.page_slots import PageSlots
from penstock.kv.events import KvEventKind
from penstock.types import CacheStats, PageHash, PageId


class HostPages(Protocol):
    """Implemented by `engine.cache.host_tier.HostTier`."""

    slots: PageSlots

    def write(self, slots: Sequence[int], pages: Sequence[PageId]) -> None: ...

    def read(self, slots: Sequence[int], pages: Sequence[PageId]) -> None: ...

    def read_bounce(self, page: PageId) -> None: ...

    def wipe(self, slots: Iterable[int]) -> None: ...


class CacheSource(Protocol):
    """Holds pages outside the pool that can be copied into it: lower tiers, or the pool of a dead worker."""

    def holds(self, page_hash: PageHash) -> bool: ...

    def leading(self, hashes: Sequence[PageHash]) -> list[PageHash]: ...

    def load(self, hashes: Sequence[PageHash], pages: Sequence[PageId]) -> int:
        """Fills `pages`, which only the caller holds, in order; returns how many were loaded."""


class CacheJournal(Protocol):
    """Implemented by `engine.cache.kept.pool_journal.PoolJournal`."""

    def seal(self, run: Sequence[PageHash], pages: Sequence[PageId], parent: PageHash | None) -> None: ...

    def unseal(self, pages: Sequence[PageId]) -> None: ...


class CacheTiers:
    """Host memory and optionally a disk. Not thread-safe: the worker's step loop is the only caller."""

    def __init__(self, host: HostPages, disk: DiskTier | None = None) -> None:
        self.host = host
        self.disk = disk
        self.num_host_hits = 0  # pages loaded
        self.num_disk_hits = 0
        self._left: list[PageHash] = []  # pages that have left a tier since the last `take_left`

    @property
    def stats(self) -> CacheStats:
        """Returns the tiers' part of the counts."""
        host, disk = self.host.slots, self.disk
        return CacheStats(
            host_hits=self.num_host_hits,
            disk_hits=self.num_disk_hits,
            spoiled_pages=disk.num_spoiled if disk else 0,
            host_pages=len(host),
            total_host_pages=host.num_slots,
            disk_pages=len(disk.slots) if disk else 0,
            total_disk_pages=disk.slots.num_slots if disk else 0,
        )

    def holds(self, page_hash: PageHash) -> bool:
        return self.place(page_hash) is not KvEventKind.REMOVED

    def place(self, page_hash: PageHash) -> KvEventKind:
        """Returns the fastest tier that holds the page, or REMOVED."""
        if page_hash in self.host.slots:
            return KvEventKind.ON_HOST
        return KvEventKind.ON_DISK if self.disk is not None and page_hash in self.disk.slots else KvEventKind.REMOVED

    def leading(self, hashes: Sequence[PageHash]) -> list[PageHash]:
        """Returns the hashes before the first one that no tier holds."""
        return list(itertools.takewhile(self.holds, hashes))

    def touch(self, hashes: Sequence[PageHash]) -> None:
        """Marks a prompt's pages, given in order, as about to be loaded; the last one is evicted first."""
        self.host.slots.touch(reversed(hashes))
        if self.disk is not None:
            self.disk.slots.touch(reversed(hashes))

    def store(self, hashes: Sequence[PageHash], pages: Sequence[PageId]) -> None:
        """Copies `pages`, oldest first; when it returns, they may be overwritten."""
        size = self.host.slots.num_slots
        for first in range(0, len(hashes), size):
            self._store_group(hashes[first : first + size], pages[first : first + size])

    def _store_group(self, hashes: Sequence[PageHash], pages: Sequence[PageId]) -> None:
        """Stores at most as many pages as host memory holds, so that none of them evicts another."""
        slots = self.host.slots
        slots.touch(hashes)
        new_slots: list[int] = []
        new_pages: list[PageId] = []
        for page_hash, page in zip(hashes, pages, strict=True):
            if page_hash in slots:
                continue
            slot, evicted = slots.add(page_hash)
            if evicted is not None:
                self._evict_from_host(evicted, slot)
            new_slots.append(slot)
            new_pages.append(page)
        self.host.write(new_slots, new_pages)

    def _evict_from_host(self, page_hash: PageHash, slot: int) -> None:
        """Moves a page to the disk, if there is one; its content is still in the slot."""
        self._left.append(page_hash)
        if self.disk is None:
            return
        if page_hash in self.disk.slots:
            self.disk.slots.touch([page_hash])
        else:
            self._left += self.disk.store(page_hash, slot)

    def load(self, hashes: Sequence[PageHash], pages: Sequence[PageId]) -> int:
        """Fills `pages`, which only the caller holds, in order; returns how many were loaded."""
        slots: list[int] = []
        host_pages: list[PageId] = []
        num_loaded = 0
        for page_hash, page in zip(hashes, pages, strict=True):
            if page_hash in self.host.slots:
                slots.append(self.host.slots.slot(page_hash))
                host_pages.append(page)
            elif not self._load_from_disk(page_hash, page):
                break
            num_loaded += 1
        self.host.read(slots, host_pages)
        self.num_host_hits += len(slots)
        return num_loaded

    def _load_from_disk(self, page_hash: PageHash, page: PageId) -> bool:
        """Loads a page through a buffer, since a corrupt one must not reach the pool: NaN outlives masking."""
        if self.disk is None or page_hash not in self.disk.slots:
            return False
        if not self.disk.load(page_hash):
            self._left.append(page_hash)
            return False
        self.host.read_bounce(page)
        self.num_disk_hits += 1
        return True

    def clear(self) -> None:
        """Forgets and erases every page."""
        self.host.wipe([self.host.slots.slot(page_hash) for page_hash in self.host.slots])
        self._left += self.host.slots.clear()
        if self.disk is not None:
            self._left += self.disk.clear()

    def take_left(self) -> list[PageHash]:
        """Returns the pages that have left a tier since the last call, for another tier or for good; some may have
        returned.
        """
        left, self._left = self._left, []
        return left
