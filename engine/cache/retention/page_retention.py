"""Keeps the retention records of one pool's pages, and the order of eviction that follows from them. Pure.

The page pool reports what happens to its cached pages, and takes the pages to evict from here. Hints set a page's
record (`engine.cache.retention.session_hints`): its owner, how long it is held, and how soon its session is expected
back. Without any record the least recently used page goes first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from engine.cache.retention.eviction_order import EvictionKey, EvictionOrder, Rank
from engine.cache.retention.holds import HoldLedger, Lost
from penstock.config.retention import RetentionConfig
from penstock.types import PageId

_GIVEN_UP = math.inf  # handicap of pages that nobody is expected to use again


class PageRetention:
    """Owns the records. Methods cost O(pages named) and O(log runs)."""

    def __init__(self, num_pages: int, config: RetentionConfig | None = None) -> None:
        self.config = config or RetentionConfig()
        self._max_cached = int(self.config.cached_share * num_pages)
        self._has_shares = self._max_cached < num_pages  # otherwise the order need not distinguish owners
        self.order = EvictionOrder(num_pages)
        self.holds = HoldLedger(int(self.config.held_share * num_pages), int(self.config.total_held_share * num_pages))
        self._owners: dict[PageId, str] = {}  # of cached pages whose owner is known
        self._values: dict[PageId, float] = {}  # of pages that a session has used; they never fall
        self._handicaps: dict[PageId, float] = {}  # seconds, until the page is used again
        self.num_cached: Counter[str] = Counter()  # pages, by owner

    # Called by the pool.

    def on_cached(self, pages: Sequence[PageId], owner: str) -> None:
        """Records whose pages they are; the first owner of a page stays its owner."""
        if owner:
            for page in pages:
                self._owners[page] = owner
            self.num_cached[owner] += len(pages)

    def on_forgotten(self, pages: Sequence[PageId], cause: Lost) -> None:
        """Drops the records of pages that are no longer cached."""
        if not self._has_records:
            return
        for page in pages:
            self._values.pop(page, None)
            self._handicaps.pop(page, None)
            self.holds.drop(page, cause)
            owner = self._owners.pop(page, None)
            if owner is not None:
                self.num_cached[owner] -= 1
                if not self.num_cached[owner]:
                    del self.num_cached[owner]

    def on_evictable(self, pages: list[PageId], now_s: float) -> None:
        """Adds pages without references to the order, the first to be evicted first."""
        if not self._has_records:
            self.order.add(pages, "", EvictionKey(Rank.CACHED, now_s))
            return
        start, last = 0, None
        for index, page in enumerate(pages):
            place = (self._owners.get(page, "") if self._has_shares else "", self._key(page, now_s))
            if place != last:
                if last is not None:
                    self.order.add(pages[start:index], *last)
                start, last = index, place
        if last is not None:
            self.order.add(pages[start:], *last)

    def on_used(self, pages: Sequence[PageId]) -> None:
        """Makes pages count by their age alone from now on, because another request uses them."""
        if self._handicaps:
            for page in pages:
                self._handicaps.pop(page, None)

    @property
    def _has_records(self) -> bool:
        return bool(self._owners or self._values or self._handicaps or len(self.holds))

    def _key(self, page: PageId, now_s: float) -> EvictionKey:
        handicap_s = self._handicaps.get(page, 0.0)
        if (hold := self.holds.of(page)) is not None:
            return EvictionKey(Rank.HELD, hold.priority, hold.expiry_s)
        if handicap_s == _GIVEN_UP:
            return EvictionKey(Rank.GIVEN_UP, now_s)
        value = now_s - handicap_s
        if page in self._values or handicap_s:
            # A parent is used whenever its child is: as values never fall, it is not evicted before its child.
            value = self._values[page] = max(value, self._values.get(page, value))
        return EvictionKey(Rank.CACHED, value)

    # Called for hints.

    def set_handicap(self, pages: Iterable[PageId], handicap_s: float) -> None:
        """Makes pages in use count as that many seconds older once they are released."""
        for page in pages:
            self._handicaps[page] = handicap_s

    def may_give_up(self, page: PageId, owner: str, now_s: float) -> bool:
        """Returns whether this owner alone decides about the page, because no other owner cached it first or
        holds it.
        """
        if self._owners.get(page, owner) != owner:
            return False
        hold = self.holds.of(page)
        return hold is None or (hold.owner == owner and hold.shared_until_s <= now_s)

    def give_up(self, pages: list[PageId], now_s: float) -> None:
        """Makes pages the next to be evicted, in this order, unless they are used again."""
        for page in pages:
            self.holds.drop(page)
            self._values.pop(page, None)
            self._handicaps[page] = _GIVEN_UP
        self._move(pages, now_s)

    def is_given_up(self, page: PageId) -> bool:
        return self._handicaps.get(page) == _GIVEN_UP

    def hold(self, pages: Sequence[PageId], owner: str, priority: int, expiry_s: float, now_s: float) -> int:
        """Holds as many leading pages as the owner's quota admits; returns their number."""
        self.expire(now_s)
        num_held = self.holds.hold(pages, owner, priority, expiry_s)
        self._move(list(reversed(pages[:num_held])), now_s)
        return num_held

    def expire(self, now_s: float) -> None:
        """Ends the holds that have run out: their pages become ordinary cached ones."""
        self._move(self.holds.expire(now_s), now_s)

    def _move(self, pages: list[PageId], now_s: float) -> None:
        """Moves those of these pages that are evictable to their new places in the order."""
        if moved := [page for page in pages if page in self.order]:
            self.on_evictable(moved, now_s)

    # Eviction.

    def to_evict(self, now_s: float) -> Iterator[PageId]:
        """Yields evictable pages in order; the caller must forget each of them after the iteration."""
        self.expire(now_s)
        excess: dict[str, int] = {}
        if self._has_shares:
            excess = {owner: count - self._max_cached for owner, count in self.num_cached.items()}
            excess = {owner: count for owner, count in excess.items() if count > 0}
        return self.order.take(excess)

    def check_integrity(self, evictable: Iterable[PageId], cached: Iterable[PageId]) -> None:
        """Raises AssertionError unless records and order agree with the pool."""
        self.order.check_integrity(evictable)
        self.holds.check_integrity()
        known = set(cached)
        for name, pages in (("owner", self._owners), ("value", self._values), ("handicap", self._handicaps)):
            if stray := pages.keys() - known:
                raise AssertionError(f"pages {sorted(stray)} have a {name} and are not cached")
        if Counter(self._owners.values()) != self.num_cached:
            raise AssertionError("counts of cached pages by owner are wrong")
