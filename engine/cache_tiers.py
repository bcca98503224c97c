"""What stands below the device's prefix cache: pages in host memory, and below those pages on disk.

`engine.prefix_cache` alone calls it: a page that is evicted from the pool is offered here before it is reused
(`store`), and a prompt that goes on where the device's cache ends looks here for more (`load`). A page comes back as a
copy, into a page that the sequence was given anyway: a hit costs a copy in place of a computation, and schedulers need
to know no more than how many leading pages are filled.

Tiers hold copies under hashes, never references to the pool. A page that came back stays below as well: it is likely to
be evicted again, and then nothing needs copying. Each tier lets its least recently used page go, to the next tier or
for good; a page whose parent has gone stays until its own turn, since the parent may be computed again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol

from engine.page_slots import PageSlots
from penstock.kv_events import KvEventKind
from penstock.types import PageHash, PageId


class HostPages(Protocol):
    """`engine.host_tier.HostTier`."""

    slots: PageSlots

    def write(self, slots: Sequence[int], pages: Sequence[PageId]) -> None: ...

    def read(self, slots: Sequence[int], pages: Sequence[PageId]) -> None: ...

    def read_bounce(self, page: PageId) -> None: ...

    def wipe(self, slots: Iterable[int]) -> None: ...


class DiskPages(Protocol):
    """`engine.disk_tier.DiskTier`."""

    slots: PageSlots
    num_spoiled: int

    def store(self, page_hash: PageHash, host_slot: int) -> list[PageHash]: ...

    def load(self, page_hash: PageHash) -> bool: ...

    def clear(self) -> list[PageHash]: ...


class CacheTiers:
    """Host memory, and where there is one a disk. Not thread-safe: the worker's step loop is the only caller."""

    def __init__(self, host: HostPages, disk: DiskPages | None = None) -> None:
        self.host = host
        self.disk = disk
        self.num_host_hits = 0  # pages that came back
        self.num_disk_hits = 0
        self._left: list[PageHash] = []  # left a tier since `take_left`

    def holds(self, page_hash: PageHash) -> bool:
        return self.place(page_hash) is not KvEventKind.REMOVED

    def place(self, page_hash: PageHash) -> KvEventKind:
        """The better of the tiers that hold the page."""
        if page_hash in self.host.slots:
            return KvEventKind.ON_HOST
        return KvEventKind.ON_DISK if self.disk is not None and page_hash in self.disk.slots else KvEventKind.REMOVED

    def leading(self, hashes: Sequence[PageHash]) -> list[PageHash]:
        """Those before the first one that no tier holds."""
        return list(itertools.takewhile(self.holds, hashes))

    def touch(self, hashes: Sequence[PageHash]) -> None:
        """Somebody waits for these pages, a prompt's in their order: the last one shall go first."""
        self.host.slots.touch(reversed(hashes))
        if self.disk is not None:
            self.disk.slots.touch(reversed(hashes))

    def store(self, hashes: Sequence[PageHash], pages: Sequence[PageId]) -> None:
        """Keeps what is in `pages`, the oldest first; when it returns, they may be overwritten."""
        size = self.host.slots.num_slots
        for first in range(0, len(hashes), size):
            self._store_group(hashes[first : first + size], pages[first : first + size])

    def _store_group(self, hashes: Sequence[PageHash], pages: Sequence[PageId]) -> None:
        """No more pages than host memory holds, so that none of them makes another one leave."""
        slots = self.host.slots
        slots.touch(hashes)
        new_slots: list[int] = []
        new_pages: list[PageId] = []
        for page_hash, page in zip(hashes, pages, strict=True):
            if page_hash in slots:
                continue
            slot, left = slots.add(page_hash)
            if left is not None:
                self._leave_host(left, slot)
            new_slots.append(slot)
            new_pages.append(page)
        self.host.write(new_slots, new_pages)

    def _leave_host(self, page_hash: PageHash, slot: int) -> None:
        """The page's content is still in the slot."""
        self._left.append(page_hash)
        if self.disk is None:
            return
        if page_hash in self.disk.slots:
            self.disk.slots.touch([page_hash])
        else:
            self._left += self.disk.store(page_hash, slot)

    def load(self, hashes: Sequence[PageHash], pages: Sequence[PageId]) -> int:
        """Fills `pages`, which the caller holds and nobody else knows, in order; returns how many came back."""
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
        """By way of a buffer, since what turns out to be spoiled must not reach the pool: NaN outlives masking."""
        if self.disk is None or page_hash not in self.disk.slots:
            return False
        if not self.disk.load(page_hash):
            self._left.append(page_hash)
            return False
        self.host.read_bounce(page)
        self.num_disk_hits += 1
        return True

    def clear(self) -> None:
        """Forgets every page, and erases it."""
        self.host.wipe([self.host.slots.slot(page_hash) for page_hash in self.host.slots])
        self._left += self.host.slots.clear()
        if self.disk is not None:
            self._left += self.disk.clear()

    def take_left(self) -> list[PageHash]:
        """Pages that left a tier since the last call, for another one or for good; some may be back."""
        left, self._left = self._left, []
        return left
