"""Keeps one worker's part of the prefix index: its bits in the masks, and the eviction order of its pages. Pure.

Pages belong to generations, each ordered by arrival. Eviction takes the oldest generation, its newest page first: a
page arrives after its parent, so leaves are evicted before the pages that they extend.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat

from penstock.kv.page_places import NUM_RANKS
from penstock.types import PageHash
from router.routing.index.page_masks import BITS, RANK_BITS, RANK_OF_BITS, PageMasks


@dataclass(slots=True)
class PageGeneration:
    started_s: float = 0.0
    pages: dict[PageHash, None] = field(default_factory=dict)


class WorkerPages:
    """Applies every change to one worker's pages, so that masks, generations and counts agree."""

    def __init__(self, slot: int, masks: PageMasks) -> None:
        self.slot = slot
        self.next_seq = 0  # the next event to apply; 0: none seen yet
        self.in_gap = False  # events are missing
        self.is_noted = False  # the worker sends no events; its pages come from `PrefixIndex.note`
        self.is_thinned = False  # the index evicted pages that the worker may still hold, so gaps are possible
        self.num_by_rank = [0] * NUM_RANKS
        self.num_entries = 0  # invariant: the sum over all generations; a page may be in two of them
        self.generations = deque([PageGeneration()])
        self._shift = BITS * slot
        self._masks = masks
        self._transitions = [masks.transition(self._shift, rank) for rank in range(NUM_RANKS + 1)]

    @property
    def bits(self) -> int:
        return RANK_BITS[0] << self._shift

    @property
    def num_pages(self) -> int:
        return sum(self.num_by_rank)

    def begin_generation(self, now_s: float) -> None:
        newest = self.generations[-1]
        if newest.pages:
            self.generations.append(PageGeneration(now_s))
        else:
            newest.started_s = now_s

    def put(self, hashes: Iterable[PageHash], rank: int) -> None:
        """Records that the worker holds the pages on the tier of this rank; NUM_RANKS: nowhere."""
        if rank == NUM_RANKS:
            self._remove(tuple(hashes))
            return
        pages = dict.fromkeys(hashes)
        newest = self.generations[-1].pages
        self.num_entries -= len(newest)
        newest.update(pages)
        self.num_entries += len(newest)
        self._count(self._masks.put(pages, self._transitions[rank]), rank)

    def _remove(self, hashes: Sequence[PageHash]) -> None:
        for generation in self.generations:
            self.num_entries -= len(generation.pages)
            deque(map(generation.pages.pop, hashes, repeat(None)), maxlen=0)
            self.num_entries += len(generation.pages)
        self._count(self._masks.remove(hashes, self._transitions[NUM_RANKS]), NUM_RANKS)

    def _count(self, old: Mapping[int, int], rank: int) -> None:
        """Updates the counts by rank. `old` is the number of pages by their previous mask."""
        for mask, count in old.items():
            before = RANK_OF_BITS[(mask >> self._shift) & RANK_BITS[0]]
            if before < NUM_RANKS:
                self.num_by_rank[before] -= count
            if rank < NUM_RANKS:
                self.num_by_rank[rank] += count

    def evict(self, max_pages: int, kept: set[PageHash] | None = None) -> int:
        """Forgets pages of the oldest generation, leaves first; pages in `kept` move to the newest one instead.

        Returns how many pages it examined; 0 only if the generation was empty.
        """
        if kept and len(self.generations) == 1:
            self.generations.append(PageGeneration(self.generations[0].started_s))
        pages = self.generations[0].pages
        popped = [pages.popitem()[0] for _ in range(min(max_pages, len(pages)))]
        younger = [generation.pages for generation in self.generations if generation.pages is not pages]
        gone = [page for page in popped if not any(page in other for other in younger)] if younger else popped
        self.num_entries -= len(popped)
        if kept:
            moved = dict.fromkeys(page for page in gone if page in kept)
            younger[-1].update(moved)
            self.num_entries += len(moved)
            gone = [page for page in gone if page not in kept]
        self._count(self._masks.remove(gone, self._transitions[NUM_RANKS]), NUM_RANKS)
        if not pages and younger:
            self.generations.popleft()
        return len(popped)

    def check_integrity(self) -> None:
        """Raises AssertionError if masks, generations and counts disagree."""
        held = {page: mask & self.bits for page, mask in self._masks.masks.items() if mask & self.bits}
        in_generations = set().union(*(generation.pages for generation in self.generations))
        assert held.keys() == in_generations, "masks and generations disagree"
        num_entries = sum(len(generation.pages) for generation in self.generations)
        assert self.num_entries == num_entries, "the count of entries is wrong"
        ranks = [RANK_OF_BITS[bits >> self._shift] for bits in held.values()]
        assert [ranks.count(rank) for rank in range(NUM_RANKS)] == self.num_by_rank, "the counts by rank are wrong"
