"""Orders the evictable pages of one pool, the ones that cost least to lose first. Pure.

Pages that are released together form a run, and a heap orders the runs of each owner. A page that is used again leaves
its run at once, but its entry stays there until the run is reached or the heaps are rebuilt. So every operation costs
O(pages named) and, for each run, O(log runs), whatever the size of the pool.

A key is a rank and, within the rank, a value; the least key is evicted first. `page_retention` gives each page its key,
with what `reuse_policy` learns of its reuse. An owner with more cached pages than its
share loses its own pages first, so that nobody's cache grows at the expense of pages within their owners' shares.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from penstock.types import PageId

_SLACK = 1024  # stale entries that are always tolerated


class Rank(IntEnum):
    """The kind of a page; earlier members are evicted first."""

    GIVEN_UP = 0  # its session has ended or continued without it, or its owner has given it up
    CACHED = 1
    HELD = 2  # pinned or retained, within its owner's quota


class EvictionKey(NamedTuple):
    rank: Rank
    value: float  # of a cached page: the time of its last use, minus the handicap of its session
    expiry_s: float = 0.0  # of a held page


@dataclass(slots=True, eq=False)
class EvictionRun:
    """Pages with one key, in the order in which they were released: the first one is evicted first."""

    pages: list[PageId]
    owner: str
    num_taken: int = 0  # leading entries that have been evicted or were stale


@dataclass(slots=True)
class _OwnerRuns:
    heap: list[tuple[EvictionKey, int, EvictionRun]] = field(default_factory=list)


class EvictionOrder:
    """Owns the order. `len` counts the evictable pages."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self.run_of: dict[PageId, EvictionRun] = {}  # the pages in the order; deleting one takes it out
        self._owners: dict[str, _OwnerRuns] = {}
        self._num_runs = itertools.count()
        self._num_entries = 0  # stale ones included

    def __len__(self) -> int:
        return len(self.run_of)

    def __contains__(self, page: PageId) -> bool:
        return page in self.run_of

    def add(self, pages: list[PageId], owner: str, key: EvictionKey) -> None:
        """Adds pages of one owner, the first to be evicted first. Moves a page that is already in the order."""
        run = EvictionRun(pages, owner)
        run_of = self.run_of
        for page in pages:
            run_of[page] = run
        runs = self._owners.get(owner)
        if runs is None:
            runs = self._owners[owner] = _OwnerRuns()
        heapq.heappush(runs.heap, (key, next(self._num_runs), run))
        self._num_entries += len(pages)
        if self._num_entries > 2 * self._num_pages + _SLACK:
            self._rebuild()

    def remove(self, page: PageId) -> None:
        """Removes a page that is in the order."""
        del self.run_of[page]

    def take(self, excess: Mapping[str, int]) -> Iterator[PageId]:
        """Yields pages, the first to be evicted first; the caller must `remove` each of them after the iteration.

        `excess` holds by how many pages some owners exceed their shares; that many of their pages come before all
        others.
        """
        for owner, over in sorted(excess.items(), key=lambda each: -each[1]):
            if owner in self._owners:
                yield from itertools.islice(self._pop_all(self._owners[owner]), over)
        # The owners' first runs, in a heap: O(owners) for a call and O(log owners) for each run.
        heads: list[tuple[EvictionKey, int, str]] = []
        for owner, runs in list(self._owners.items()):
            self._drop_stale(runs)
            if runs.heap:
                heads.append((*runs.heap[0][:2], owner))
            else:
                del self._owners[owner]
        heapq.heapify(heads)
        while heads:
            number, owner = heads[0][1:]
            runs = self._owners[owner]
            while runs.heap and runs.heap[0][1] == number:
                yield self._pop(runs)
                self._drop_stale(runs)
            if runs.heap:
                heapq.heapreplace(heads, (*runs.heap[0][:2], owner))
            else:
                heapq.heappop(heads)

    def _pop_all(self, runs: _OwnerRuns) -> Iterator[PageId]:
        self._drop_stale(runs)
        while runs.heap:
            yield self._pop(runs)
            self._drop_stale(runs)

    def __iter__(self) -> Iterator[PageId]:
        """Iterates over all pages by key alone, the first to be evicted first; invalid after a change."""
        runs = sorted((entry for owner in self._owners.values() for entry in owner.heap), key=lambda entry: entry[:2])
        for _, _, run in runs:
            yield from (page for page in run.pages[run.num_taken :] if self.run_of.get(page) is run)

    def _drop_stale(self, runs: _OwnerRuns) -> None:
        """Advances to the first page that is still in its run."""
        while runs.heap:
            run = runs.heap[0][2]
            while run.num_taken < len(run.pages):
                if self.run_of.get(run.pages[run.num_taken]) is run:
                    return
                run.num_taken += 1
                self._num_entries -= 1
            heapq.heappop(runs.heap)

    def _pop(self, runs: _OwnerRuns) -> PageId:
        run = runs.heap[0][2]
        page = run.pages[run.num_taken]
        run.num_taken += 1
        self._num_entries -= 1
        return page

    def _rebuild(self) -> None:
        """Drops all stale entries."""
        self._num_entries = 0
        for owner, runs in list(self._owners.items()):
            kept = []
            for key, number, run in runs.heap:
                pages = [page for page in run.pages[run.num_taken :] if self.run_of.get(page) is run]
                run.pages, run.num_taken = pages, 0
                if pages:
                    kept.append((key, number, run))
                    self._num_entries += len(pages)
            heapq.heapify(kept)
            runs.heap = kept
            if not kept:
                del self._owners[owner]

    def check_integrity(self, evictable: Iterable[PageId]) -> None:
        """Raises AssertionError unless the order holds exactly these pages, each once."""
        listed = list(self)
        if sorted(listed) != sorted(evictable) or len(listed) != len(self.run_of):
            raise AssertionError(f"the order holds {sorted(listed)}, and {sorted(evictable)} are evictable")
