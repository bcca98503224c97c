"""Counts the pages that tenants hold against eviction, and bounds them by quotas. Pure.

A hold is a page's retention record: its owner, priority and expiry. It never makes a page unavailable: held pages are
evicted last, and a pool that has nothing else evicts them too, the lowest priority first and among equals the hold that
would end first.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.types import PageId

_SLACK = 64  # holds without pages that may wait for their expiry


class Lost(StrEnum):
    """Why a hold ended before its time."""

    PRESSURE = "pressure"  # running sequences needed the page
    CLEARED = "cleared"  # the cache was cleared


@dataclass(slots=True, eq=False)
class Hold:
    """Pages that one hint holds; a page has one hold at most."""

    owner: str
    priority: int
    expiry_s: float
    shared_until_s: float = 0.0  # until when another tenant, which is not charged, holds the pages too
    pages: set[PageId] = field(default_factory=set)


def _merged(before: Hold, owner: str, priority: int, expiry_s: float) -> tuple[str, int, float, float]:
    """Returns the merged record of a page that is already held: its owner, priority, expiry and `shared_until_s`."""
    charged, shared_until_s = owner, before.shared_until_s
    if before.owner != owner:
        shared_until_s = max(shared_until_s, min(before.expiry_s, expiry_s))
        if before.expiry_s >= expiry_s:
            charged = before.owner
    return charged, max(priority, before.priority), max(expiry_s, before.expiry_s), shared_until_s


class HoldLedger:
    """Owns the holds of one pool. Every operation costs O(pages named) and O(log holds)."""

    def __init__(self, max_pages_per_owner: int, max_pages: int) -> None:
        self._max_per_owner = max_pages_per_owner
        self._max = max_pages
        self._of: dict[PageId, Hold] = {}
        self._by_expiry: list[tuple[float, int, Hold]] = []
        self._numbers = itertools.count()
        self.num_held: Counter[str] = Counter()  # pages, by owner; owners without any are left out
        self.num_lost: Counter[Lost] = Counter()  # pages

    def __len__(self) -> int:
        return len(self._of)

    def of(self, page: PageId) -> Hold | None:
        return self._of.get(page)

    def hold(self, pages: Iterable[PageId], owner: str, priority: int, expiry_s: float) -> int:
        """Holds as many leading pages as the owner's quota admits, and returns their number.

        A page that this owner already holds is not charged twice; its record becomes the stronger of the two. A page
        that another owner holds as well is charged to the owner that holds it for longer.
        """
        made: dict[tuple[str, int, float, float], Hold] = {}
        count = 0
        for page in pages:
            before = self._of.get(page)
            record = (owner, priority, expiry_s, 0.0) if before is None else _merged(before, owner, priority, expiry_s)
            if (before is None or before.owner != record[0]) and not self._has_room(owner, before):
                break
            if before is not None:
                self._drop(page, before)
            if (hold := made.get(record)) is None:
                hold = made[record] = Hold(*record)
            self._add(page, hold)
            count += 1
        for hold in made.values():
            heapq.heappush(self._by_expiry, (hold.expiry_s, next(self._numbers), hold))
        if len(self._by_expiry) > 2 * len(self._of) + _SLACK:
            self._by_expiry = [entry for entry in self._by_expiry if entry[2].pages]
            heapq.heapify(self._by_expiry)
        return count

    def _add(self, page: PageId, hold: Hold) -> None:
        hold.pages.add(page)
        self._of[page] = hold
        self.num_held[hold.owner] += 1

    def _has_room(self, owner: str, replaced: Hold | None) -> bool:
        in_all = len(self._of) - (replaced is not None)
        return self.num_held[owner] < self._max_per_owner and in_all < self._max

    def drop(self, page: PageId, cause: Lost | None = None) -> None:
        """Ends a page's hold, if it has one. With `cause`, counts it as lost for that reason."""
        hold = self._of.get(page)
        if hold is not None:
            self._drop(page, hold)
            if cause is not None:
                self.num_lost[cause] += 1

    def expire(self, now_s: float) -> list[PageId]:
        """Ends the holds that have run out, and returns their pages."""
        ended: list[PageId] = []
        while self._by_expiry and self._by_expiry[0][0] <= now_s:
            _, _, hold = heapq.heappop(self._by_expiry)
            for page in list(hold.pages):
                self._drop(page, hold)
                ended.append(page)
        return ended

    @property
    def next_expiry_s(self) -> float | None:
        return self._by_expiry[0][0] if self._by_expiry else None

    def _drop(self, page: PageId, hold: Hold) -> None:
        hold.pages.discard(page)
        del self._of[page]
        self.num_held[hold.owner] -= 1
        if not self.num_held[hold.owner]:
            del self.num_held[hold.owner]

    def check_integrity(self) -> None:
        """Raises AssertionError unless pages, holds and charges agree, and no quota is exceeded."""
        charged = Counter(hold.owner for hold in self._of.values())
        if charged != self.num_held:
            raise AssertionError(f"{dict(charged)} pages are held, {dict(self.num_held)} are charged")
        if any(page not in hold.pages for page, hold in self._of.items()):
            raise AssertionError("a page is missing from its hold")
        if len(self._of) > self._max or any(count > self._max_per_owner for count in charged.values()):
            raise AssertionError(f"{dict(charged)} pages are held; quotas are {self._max_per_owner} and {self._max}")
