"""Keeps where the windowed layers' part of each page is, in models that also have layers without a window.

Such a page has two parts in memory: that of the layers that read the whole context, at the page's own place, and that
of the windowed layers, in a *slot*. There are fewer slots than pages: a sequence holds the slots of the pages in its
window only. `engine.cache.page_pool` owns the pages and this; batches read `slot_of_P` when they are laid out.

A page's windowed part is held (by at least one sequence), idle (the page is cached and a prefix may end there), or
gone. Idle parts give up their slots to others, the least recently held first; the page stays cached without it. Not
thread-safe: the worker's step loop is the only caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from engine.cache.windows.page_window import PageWindow
from penstock.types import PageId

NO_SLOT = -1


class OutOfSlots(Exception):
    """Says that more slots were requested than are free or idle. Nothing was taken."""


class WindowParts:
    """Owns the slots of a pool of `num_pages` pages. Methods cost O(pages named)."""

    def __init__(
        self,
        num_pages: int,
        num_slots: int,
        window: PageWindow,
        on_free: Callable[[Sequence[PageId]], None] | None = None,
    ) -> None:
        """`window` is that of the windowed layer that reads most. `on_free` receives slots that have become free,
        before they can be given to another page; it may erase them.
        """
        if num_slots < 1:
            raise ValueError(f"num_slots: {num_slots} given; at least 1 is needed")
        self.num_slots, self.window = num_slots, window
        self.slot_of_P = np.full(num_pages, NO_SLOT, np.int32)
        self._num_holders = [0] * num_pages
        self._free = list(reversed(range(num_slots)))
        self._idle: dict[PageId, None] = {}  # the least recently held first
        self._on_free = on_free

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Returns how many slots `attach` can give now."""
        return len(self._free) + len(self._idle)

    @property
    def num_held(self) -> int:
        return self.num_slots - self.num_available

    def has(self, page: PageId) -> bool:
        """Returns whether the page has its windowed part."""
        return bool(self.slot_of_P[page] != NO_SLOT)

    def slots_of(self, pages: Sequence[PageId]) -> list[int]:
        """Returns the slots of those of the pages that have their windowed part, in order."""
        return [int(slot) for slot in self.slot_of_P[list(pages)] if slot != NO_SLOT] if len(pages) else []

    def first_needed(self, num_pages: int) -> int:
        """Returns how many leading pages of a prefix of `num_pages` need no windowed part."""
        return self.window.num_behind(num_pages * self.window.page_size)

    def longest_prefix(self, pages: Sequence[PageId]) -> int:
        """Returns the length of the longest prefix of these pages whose last window has its windowed parts."""
        return self.window.longest_prefix(len(pages), 0, lambda index: self.has(pages[index]))

    def attach(self, pages: Sequence[PageId]) -> None:
        """Gives each of these pages, which have none, a slot with one holder. Raises OutOfSlots, and then changes
        nothing.
        """
        if len(pages) > self.num_available:
            raise OutOfSlots(f"{len(pages)} slots asked for, {self.num_available} available")
        assert not any(map(self.has, pages)), f"one of the pages {list(pages)} has its windowed part already"
        missing = len(pages) - len(self._free)
        for page in list(self._idle)[: max(0, missing)]:
            self._drop(page)
        for page in pages:
            self.slot_of_P[page] = self._free.pop()
            self._num_holders[page] = 1

    def hold(self, pages: Iterable[PageId]) -> None:
        """Adds a holder to the windowed part of each page, which must be there."""
        for page in pages:
            assert self.has(page), f"page {page} has no windowed part"
            self._idle.pop(page, None)
            self._num_holders[page] += 1

    def release(self, pages: Iterable[PageId]) -> list[PageId]:
        """Drops a holder from the windowed part of each page. Returns the pages whose part nobody holds any more; the
        caller says what becomes of it (`idle` or `drop`).
        """
        unheld: list[PageId] = []
        for page in pages:
            assert self._num_holders[page] > 0, f"nobody holds the windowed part of page {page}"
            self._num_holders[page] -= 1
            if not self._num_holders[page]:
                unheld.append(page)
        return unheld

    def idle(self, page: PageId) -> None:
        """Keeps the unheld part of a cached page until its slot is needed."""
        self._idle.pop(page, None)
        self._idle[page] = None

    def drop(self, pages: Iterable[PageId]) -> None:
        """Frees the slots of pages whose part nobody holds; those without a part are left out."""
        for page in pages:
            if self.has(page) and not self._num_holders[page]:
                self._drop(page)

    def _drop(self, page: PageId) -> None:
        self._idle.pop(page, None)
        slot = int(self.slot_of_P[page])
        self.slot_of_P[page] = NO_SLOT
        if self._on_free is not None:
            self._on_free([PageId(slot)])
        self._free.append(slot)

    def check_integrity(self, cached: Callable[[PageId], bool], is_used: Callable[[PageId], bool]) -> None:
        """Raises AssertionError unless each slot is free or belongs to one page. `is_used` says whether a page is not
        free.
        """
        slots = [int(slot) for slot in self.slot_of_P if slot != NO_SLOT]
        everything = [*slots, *self._free]
        assert sorted(everything) == list(range(self.num_slots)), "a slot is lost or belongs to two pages"
        for page, count in enumerate(self._num_holders):
            page_id, where = PageId(page), f"page {page}: {count} holders of its windowed part"
            assert not count or self.has(page_id), f"{where}, which is gone"
            assert not self.has(page_id) or is_used(page_id), f"{where}, and the page is free"
            assert (page_id in self._idle) <= (not count and self.has(page_id) and cached(page_id)), (
                f"{where}, but idle"
            )
