"""Tracks which cached page is in which slot of a bounded store, and which one is evicted when no slot is free.

It does the bookkeeping of the host tier and the disk tier. Torch-free; it never touches the content of a slot. A page
is identified by its hash, so its content may be missing but never stale.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from penstock.errors import InternalError
from penstock.types import PageHash


class PageSlots:
    """A map from hash to slot, least recently used first. Used only on the worker's step loop."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots: {num_slots} given; a tier needs at least 1 slot")
        self.num_slots = num_slots
        self._slots: OrderedDict[PageHash, int] = OrderedDict()
        self._free: list[int] = list(reversed(range(num_slots)))

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, page_hash: PageHash) -> bool:
        return page_hash in self._slots

    def __iter__(self) -> Iterator[PageHash]:
        """Iterates over the hashes, least recently used first."""
        return iter(self._slots)

    def slot(self, page_hash: PageHash) -> int:
        """Returns the page's slot. Raises KeyError if the page is not stored."""
        return self._slots[page_hash]

    def touch(self, hashes: Iterable[PageHash]) -> None:
        """Marks those of these pages that are stored as most recently used, the last one as the newest."""
        for page_hash in hashes:
            if page_hash in self._slots:
                self._slots.move_to_end(page_hash)

    def add(self, page_hash: PageHash) -> tuple[int, PageHash | None]:
        """Returns a slot for a new page, and the page evicted from it if no slot was free."""
        if page_hash in self._slots:
            raise InternalError(f"slot: page {page_hash.hex()} has one already")
        evicted: PageHash | None = None
        if self._free:
            slot = self._free.pop()
        else:
            evicted, slot = self._slots.popitem(last=False)
        self._slots[page_hash] = slot
        return slot, evicted

    def discard(self, page_hash: PageHash) -> None:
        """Removes the page and frees its slot."""
        self._free.append(self._slots.pop(page_hash))

    def clear(self) -> list[PageHash]:
        """Removes and returns every page."""
        hashes = list(self._slots)
        for page_hash in hashes:
            self.discard(page_hash)
        return hashes

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot is either free or holds exactly one page."""
        slots = sorted([*self._slots.values(), *self._free])
        if slots != list(range(self.num_slots)):
            raise AssertionError(f"slots {slots} accounted for, {self.num_slots} in the store")
