"""Models a worker's memory: the real page pool, prefix cache and bookkeeping of tiers, with pages without content."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.cache.page_slots import PageSlots
from engine.cache.prefix_cache import PrefixCache
from engine.cache.tiers import CacheTiers, HostPages
from penstock.kv.events import KvEventLog
from penstock.types import PageId


class HostMemoryModel(HostPages):
    """Implements the pages in host memory. Steps wait for copies back to the device, which take `copy_s` a page."""

    def __init__(self, num_pages: int, copy_s: float) -> None:
        self.slots = PageSlots(num_pages)
        self.num_bad_reads = 0  # reads of slots that were never written or have been erased; must stay 0
        self._copy_s = copy_s
        self._written: set[int] = set()
        self._waiting_s = 0.0

    def write(self, slots: Sequence[int], pages: Sequence[PageId]) -> None:
        self._written.update(slots)

    def read(self, slots: Sequence[int], pages: Sequence[PageId]) -> None:
        self.num_bad_reads += sum(slot not in self._written for slot in slots)
        self._waiting_s += self._copy_s * len(slots)

    def read_bounce(self, page: PageId) -> None:
        self._waiting_s += self._copy_s

    def wipe(self, slots: Iterable[int]) -> None:
        self._written.difference_update(slots)

    def take_waiting_s(self) -> float:
        """Returns how long the next step waits for copies since the last call."""
        waiting_s, self._waiting_s = self._waiting_s, 0.0
        return waiting_s


class WorkerMemory:
    """Owns a worker's page pool, its prefix cache and the log of their events. `host` is the tier below; None: none."""

    def __init__(self, page_size: int, num_pages: int, host: HostMemoryModel | None = None) -> None:
        self.page_size = page_size
        self.host = host
        self.events = KvEventLog()
        tiers = CacheTiers(host) if host is not None else None
        self.cache = PrefixCache(num_pages, page_size, self.events, tiers=tiers)
        self.pool = self.cache.pool
