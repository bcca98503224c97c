"""Which cached page stands in which slot of a bounded store, and which goes when there is none left.

The bookkeeping of the host tier and the disk tier; torch-free, and it never touches what is in a slot. A page is named
by its hash, hence its content can never be out of date, only gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from penstock.types import PageHash


class PageSlots:
    """A map from hash to slot, least recently used first. The worker's step loop is the only caller."""

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
        """Least recently used first."""
        return iter(self._slots)

    def slot(self, page_hash: PageHash) -> int:
        """KeyError for a page that is not here."""
        return self._slots[page_hash]

    def touch(self, hashes: Iterable[PageHash]) -> None:
        """Make those of the pages that are here the most recently used ones, the last named the newest of them."""
        for page_hash in hashes:
            if page_hash in self._slots:
                self._slots.move_to_end(page_hash)

    def add(self, page_hash: PageHash) -> tuple[int, PageHash | None]:
        """A slot for a page that is not here, and the page that had to leave that slot, where there was no free one."""
        assert page_hash not in self._slots
        left: PageHash | None = None
        if self._free:
            slot = self._free.pop()
        else:
            left, slot = self._slots.popitem(last=False)
        self._slots[page_hash] = slot
        return slot, left

    def discard(self, page_hash: PageHash) -> None:
        """The page leaves; its slot is free."""
        self._free.append(self._slots.pop(page_hash))

    def clear(self) -> list[PageHash]:
        """Every page leaves; returns them."""
        left = list(self._slots)
        for page_hash in left:
            self.discard(page_hash)
        return left

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot is either free or one page's."""
        slots = sorted([*self._slots.values(), *self._free])
        if slots != list(range(self.num_slots)):
            raise AssertionError(f"slots {slots} accounted for, {self.num_slots} in the store")
