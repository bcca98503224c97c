"""Keeps the reference counts, free list and fences of one worker's KV pages.

It sits between the schedulers, which allocate pages for sequences, and the pool's tensor, which this module never
touches. `engine.cache.retention` orders the eviction of unreferenced cached pages. This module must not know what is in
a page: hashes and chains belong to `engine.cache.prefix_cache`, which makes its pool and evicts pages when the pool
asks for room.

In models whose layers alternate between windowed and full attention, `parts` keeps where the windowed layers' part of
a page is (`engine.cache.windows.window_parts`); the pool says when such a part is of no more use.

A page is exactly one of: free, owned (one reference), shared (several), evictable (no reference, but the prefix cache
holds it), or fenced. Fenced takes precedence: a transfer may still write the page, so only lifting the fence makes it
available. Not thread-safe: the worker's step loop is the only caller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from enum import StrEnum

from engine.cache.retention.holds import Lost
from engine.cache.retention.page_retention import PageRetention
from engine.cache.windows.window_parts import WindowParts
from penstock.config.retention import RetentionConfig
from penstock.errors import InternalError
from penstock.types import PageId


class PageState(StrEnum):
    FREE = "free"
    OWNED = "owned"
    SHARED = "shared"
    EVICTABLE = "evictable"
    FENCED = "fenced"


class OutOfPages(Exception):
    """Says that more pages were requested than are free or evictable. Nothing was allocated; wait, or preempt a
    sequence.
    """

    def __init__(self, num_asked: int, num_available: int) -> None:
        super().__init__(f"{num_asked} pages asked for, {num_available} available")
        self.num_asked = num_asked
        self.num_available = num_available


class PageMisuse(InternalError):
    """Says that a call would break the pool's bookkeeping. The call has changed nothing."""


class PagePool:
    """References, fences and the free list of `num_pages` pages. Methods cost O(pages named), never O(pool)."""

    def __init__(
        self,
        num_pages: int,
        on_free: Callable[[Sequence[PageId]], None] | None = None,
        evict: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        retention: RetentionConfig | None = None,
        parts: WindowParts | None = None,
    ) -> None:
        """`on_free` receives pages that have become free, before they can be allocated again; it may erase them.
        `evict(n)` must `forget` pages until at least n more are free.
        """
        self._clock = clock
        if num_pages < 1:
            raise ValueError(f"num_pages: {num_pages} given; a pool needs at least 1 page")
        self.num_pages = num_pages
        self.parts = parts
        self._free: list[PageId] = [PageId(page) for page in reversed(range(num_pages))]  # a stack: warm pages first
        self._refs: list[int] = [0] * num_pages
        self._cached = bytearray(num_pages)  # 1: the prefix cache holds the page
        self.retention = PageRetention(num_pages, retention)
        self._evictable = self.retention.order.run_of  # has the cached, unreferenced pages
        self._fences: dict[PageId, set[Hashable]] = {}  # only pages with at least one fence
        self._fenced_by: dict[Hashable, list[PageId]] = {}
        self._fenced_s: dict[Hashable, float] = {}  # when the first pages came under a key; oldest first
        self._evict = evict
        self._on_free = on_free
        self.num_allocated = 0  # pages handed out so far

    # ---- counts -------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_fenced(self) -> int:
        return len(self._fences)

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    @property
    def num_held(self) -> int:
        """Pages with a reference that no transfer may write."""
        return self.num_pages - len(self._free) - len(self._evictable) - len(self._fences)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can hand out now."""
        return len(self._free) + len(self._evictable)

    @property
    def num_reported(self) -> int:
        """Pages that a worker reports as free: those available, but no larger a share than that of available slots, so
        that a worker without slots counts as full.
        """
        if self.parts is None:
            return self.num_available
        return min(self.num_available, self.parts.num_available * self.num_pages // self.parts.num_slots)

    @property
    def num_reserve(self) -> int:
        """Pages that work without a waiting request, such as a hand-over or a prefetch, leaves available: 1/16 of the
        pool.
        """
        return self.num_pages // 16

    def state(self, page: PageId) -> PageState:
        if page in self._fences:
            return PageState.FENCED
        if self._refs[page] > 0:
            return PageState.OWNED if self._refs[page] == 1 else PageState.SHARED
        return PageState.EVICTABLE if page in self._evictable else PageState.FREE

    def num_references(self, page: PageId) -> int:
        return self._refs[page]

    # ---- references ---------------------------------------------------------------------------------------------

    def allocate(self, num_pages: int) -> list[PageId]:
        """Returns pages with one reference each: free ones first, then evicted from the prefix cache.

        Raises OutOfPages, and then changes nothing.
        """
        if num_pages < 0:
            raise PageMisuse(f"allocate: {num_pages} pages asked for")
        if num_pages > self.num_available:
            raise OutOfPages(num_pages, self.num_available)
        if num_pages == 0:
            return []
        missing = num_pages - len(self._free)
        if missing > 0:
            if self._evict is None:
                raise PageMisuse("allocate: cached pages without an evictor")
            self._evict(missing)
            if len(self._free) < num_pages:
                raise PageMisuse(f"allocate: {len(self._free)} pages are free after an eviction, {num_pages} asked for")
        pages = self._free[-num_pages:]
        del self._free[-num_pages:]
        for page in pages:
            self._refs[page] = 1
        self.num_allocated += num_pages
        return pages

    def share(self, pages: Sequence[PageId], windowed: Sequence[PageId] = ()) -> None:
        """Adds a reference to each page, and a hold on the windowed part of each of `windowed`; all pages must be
        referenced or cached.
        """
        self._check_pages("share", pages)
        refs, cached, evictable = self._refs, self._cached, self._evictable
        for page in pages:
            if refs[page] == 0 and not cached[page]:
                raise PageMisuse(f"share: page {page} is {self.state(page)}, nobody holds it")
        for page in pages:
            if refs[page] == 0:
                del evictable[page]
            refs[page] += 1
        if self.parts is not None:
            self.parts.hold(windowed)
        self.retention.on_used(pages)

    def release(self, pages: Sequence[PageId], windowed: Sequence[PageId] = ()) -> None:
        """Drops a reference from each page, and a hold on the windowed part of each of `windowed`. Pass a sequence's
        pages in order and in one call.

        Pages become evictable last page first, so that in a chain that is released together the leaf counts as the
        oldest.
        """
        self._check_pages("release", pages)
        refs, cached, fences = self._refs, self._cached, self._fences
        for page in pages:
            if refs[page] == 0:
                raise PageMisuse(f"release: page {page} is {self.state(page)} and has no reference")
        if windowed:
            self._release_parts(windowed)
        freed: list[PageId] = []
        evictable: list[PageId] = []
        for page in reversed(pages):
            refs[page] -= 1
            if refs[page] == 0 and page not in fences:
                (evictable if cached[page] else freed).append(page)
        if evictable:
            self.retention.on_evictable(evictable, self._clock())
        self._set_free(freed)

    def _release_parts(self, pages: Sequence[PageId]) -> None:
        assert self.parts is not None
        for page in self.parts.release(pages):
            if self._cached[page]:
                self.parts.idle(page)
            elif page not in self._fences:  # otherwise a transfer may still write it, until the page is free
                self.parts.drop([page])

    # ---- fences -------------------------------------------------------------------------------------------------

    def fence(self, pages: Sequence[PageId], key: Hashable) -> None:
        """Marks pages that the transfer `key` may write from now on. More pages may follow under the same key.

        The pages must be referenced and not cached: a page that a peer may write must not be findable.
        """
        self._check_pages("fence", pages)
        for page in pages:
            if self._refs[page] == 0 or self._cached[page]:
                raise PageMisuse(f"fence: page {page} is {self.state(page)}; only uncached pages that the caller holds")
            if key in self._fences.get(page, ()):
                raise PageMisuse(f"fence: page {page} is already fenced by {key}")
        self._fenced_by.setdefault(key, []).extend(pages)
        self._fenced_s.setdefault(key, self._clock())
        for page in pages:
            self._fences.setdefault(page, set()).add(key)

    @property
    def oldest_fence_s(self) -> float | None:
        """The monotonic time of the oldest fence; None if there is none."""
        return next(iter(self._fenced_s.values()), None)

    def is_fencing(self, key: Hashable) -> bool:
        return key in self._fenced_by

    def lift(self, key: Hashable) -> None:
        """Lifts the fence of transfer `key`, whose last write is over. Pages without a reference become free."""
        if key not in self._fenced_by:
            raise PageMisuse(f"lift: no fence of {key}")
        freed: list[PageId] = []
        del self._fenced_s[key]
        for page in self._fenced_by.pop(key):
            keys = self._fences[page]
            keys.discard(key)
            if not keys:
                del self._fences[page]
                if self._refs[page] == 0:
                    freed.append(page)  # never verified, hence never cached
        self._set_free(freed)

    # ---- for the prefix cache -----------------------------------------------------------------------------------

    def first_to_refuse(self, pages: Sequence[PageId]) -> PageId | None:
        """Returns the first page that `keep` would refuse; None if it would take all."""
        refs, cached, fences = self._refs, self._cached, self._fences
        if (
            all(map(refs.__getitem__, pages))
            and not any(map(cached.__getitem__, pages))
            and fences.keys().isdisjoint(pages)
        ):
            return None
        return next(page for page in pages if refs[page] == 0 or cached[page] or page in fences)

    def keep(self, pages: Sequence[PageId], owner: str = "") -> None:
        """Marks pages as cached, for this tenant: without a reference they become evictable instead of free."""
        if (page := self.first_to_refuse(pages)) is not None:
            raise PageMisuse(f"keep: page {page} is {self.state(page)}; only an uncached page that the caller holds")
        cached = self._cached
        for page in pages:
            cached[page] = 1
        self.retention.on_cached(pages, owner)

    def forget(self, pages: Sequence[PageId], cause: Lost = Lost.PRESSURE) -> None:
        """Marks pages as no longer cached: those without a reference become free. Holds on them end for this
        `cause`.
        """
        self._check_pages("forget", pages)
        refs, cached, evictable = self._refs, self._cached, self._evictable
        if not all(map(cached.__getitem__, pages)):
            page = next(page for page in pages if not cached[page])
            raise PageMisuse(f"forget: page {page} is {self.state(page)} and not cached")
        self.retention.on_forgotten(pages, cause)
        freed: list[PageId] = []
        for page in pages:
            cached[page] = 0
            if refs[page] == 0:
                del evictable[page]
                freed.append(page)
        if self.parts is not None:
            self.parts.drop(pages)
        self._set_free(freed)

    def is_cached(self, page: PageId) -> bool:
        return bool(self._cached[page])

    def touch(self, pages: Sequence[PageId]) -> None:
        """Marks the evictable ones among these pages as most recently used, the last page as the oldest of them."""
        if touched := [page for page in reversed(pages) if page in self._evictable]:
            self.retention.on_evictable(touched, self._clock())

    def evictable(self) -> Iterator[PageId]:
        """Iterates over evictable pages, the first to be evicted first; invalid after a change to the pool."""
        return iter(self.retention.order)

    def to_evict(self) -> Iterator[PageId]:
        """Yields evictable pages, the first to be evicted first; the caller must `forget` each of them afterwards."""
        return self.retention.to_evict(self._clock())

    # ---- invariants ---------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises AssertionError, naming the page, unless each page is in exactly one state and all counts add up."""
        free = set(self._free)
        _demand(len(free) == len(self._free), f"the free list holds a page twice: {sorted(self._free)}")
        fenced_by_key: dict[PageId, set[Hashable]] = {}
        for key, pages in self._fenced_by.items():
            for page in pages:
                fenced_by_key.setdefault(page, set()).add(key)
        _demand(fenced_by_key == self._fences, "fences by page and by key differ")
        num_held = 0
        for page in map(PageId, range(self.num_pages)):
            refs, cached, fenced = self._refs[page], bool(self._cached[page]), page in self._fences
            evictable = page in self._evictable
            where = f"page {page}: {refs} references, {cached=}, {fenced=}, {evictable=}, free={page in free}"
            _demand(refs >= 0, f"{where}: negative count")
            _demand(evictable == (cached and refs == 0), f"{where}: evictable means cached and unreferenced")
            _demand(not (cached and fenced), f"{where}: a fenced page is findable")
            _demand((page in free) == (refs == 0 and not cached and not fenced), f"{where}: free means held by nobody")
            num_held += refs > 0 and not fenced
        cached_pages = [PageId(page) for page in range(self.num_pages) if self._cached[page]]
        self.retention.check_integrity([page for page in cached_pages if not self._refs[page]], cached_pages)
        total = len(free) + len(self._evictable) + len(self._fences) + num_held
        _demand(total == self.num_pages, f"{total} pages accounted for, {self.num_pages} in the pool")
        if self.parts is not None:
            self.parts.check_integrity(self.is_cached, lambda page: page not in free)

    def _set_free(self, pages: Sequence[PageId]) -> None:
        if self.parts is not None:
            self.parts.drop(pages)
        if pages and self._on_free is not None:
            self._on_free(pages)
        self._free += pages

    def _check_pages(self, operation: str, pages: Collection[PageId]) -> None:
        if len(set(pages)) != len(pages):
            raise PageMisuse(f"{operation}: a page is named twice in {list(pages)}")
        if pages and (min(pages) < 0 or max(pages) >= self.num_pages):
            raise PageMisuse(f"{operation}: a page outside the pool of {self.num_pages} in {list(pages)}")


def _demand(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)
