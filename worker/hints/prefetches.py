"""Decides which prefetches wait for their time, and which are due. Pure.

The number of waiting prefetches is bounded, and each tenant gets at most half of it, so that no tenant can take every
place.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.types import PageHash


@dataclass(frozen=True, slots=True)
class Prefetch:
    tenant: str
    hashes: Sequence[PageHash]  # of the leading full pages of a prompt


class PrefetchQueue:
    """Keeps prefetches until they are due. Times are monotonic."""

    def __init__(self, max_waiting: int) -> None:
        self._max = max_waiting
        self._max_per_tenant = (max_waiting + 1) // 2
        self._waiting: list[tuple[float, int, Prefetch]] = []
        self._numbers = itertools.count()
        self._by_tenant: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def next_s(self) -> float | None:
        return self._waiting[0][0] if self._waiting else None

    def add(self, prefetch: Prefetch, due_s: float) -> bool:
        """Queues a prefetch. Returns False if too many wait already."""
        if len(self._waiting) >= self._max or self._by_tenant[prefetch.tenant] >= self._max_per_tenant:
            return False
        heapq.heappush(self._waiting, (due_s, next(self._numbers), prefetch))
        self._by_tenant[prefetch.tenant] += 1
        return True

    def take_due(self, now_s: float) -> Prefetch | None:
        """Removes and returns a prefetch whose time has come."""
        if not self._waiting or self._waiting[0][0] > now_s:
            return None
        prefetch = heapq.heappop(self._waiting)[2]
        self._by_tenant[prefetch.tenant] -= 1
        if not self._by_tenant[prefetch.tenant]:
            del self._by_tenant[prefetch.tenant]
        return prefetch
