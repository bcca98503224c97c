"""One worker's part of the prefix index: its bits in the masks, and the order in which it would give pages up. Pure.

Pages stand in generations, each in the order in which they came. The oldest generation gives up its newest page first:
a page comes after its parent, so that leaves go before what they hang from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat

from penstock.page_places import NUM_RANKS
from penstock.types import PageHash
from router.page_masks import BITS, RANK_BITS, RANK_OF_BITS, PageMasks


@dataclass(slots=True)
class Generation:
    started_s: float = 0.0
    pages: dict[PageHash, None] = field(default_factory=dict)


class Holder:
    """All changes to one worker's pages pass through here, so that masks, generations and counts agree."""

    def __init__(self, slot: int, masks: PageMasks) -> None:
        self.slot = slot
        self.next_seq = 0  # the first event wanted; 0: nothing seen yet, which a snapshot mends
        self.in_gap = False  # events are missing that were asked for again
        self.is_noted = False  # known by what was sent there, not by events
        self.is_thinned = False  # pages were given up that the worker may still have: there may be holes
        self.num_by_rank = [0] * NUM_RANKS
        self.num_entries = 0  # invariant: the sum over all generations; a page may stand in two of them
        self.generations = deque([Generation()])
        self._shift = BITS * slot
        self._masks = masks
        self._steps = [masks.step(self._shift, rank) for rank in range(NUM_RANKS + 1)]

    @property
    def bits(self) -> int:
        return RANK_BITS[0] << self._shift

    @property
    def num_pages(self) -> int:
        return sum(self.num_by_rank)

    def begin_generation(self, now_s: float) -> None:
        newest = self.generations[-1]
        if newest.pages:
            self.generations.append(Generation(now_s))
        else:
            newest.started_s = now_s

    def put(self, hashes: Iterable[PageHash], rank: int) -> None:
        """The worker has the pages on the tier of this rank; NUM_RANKS: nowhere."""
        if rank == NUM_RANKS:
            self.take(tuple(hashes))
            return
        pages = dict.fromkeys(hashes)
        newest = self.generations[-1].pages
        self.num_entries -= len(newest)
        newest.update(pages)
        self.num_entries += len(newest)
        self._count(self._masks.put(pages, self._steps[rank]), rank)

    def take(self, hashes: Sequence[PageHash]) -> None:
        for generation in self.generations:
            self.num_entries -= len(generation.pages)
            deque(map(generation.pages.pop, hashes, repeat(None)), maxlen=0)
            self.num_entries += len(generation.pages)
        self._count(self._masks.take(hashes, self._steps[NUM_RANKS]), NUM_RANKS)

    def _count(self, old: Mapping[int, int], rank: int) -> None:
        """`old`: how many pages had which mask before."""
        for mask, count in old.items():
            before = RANK_OF_BITS[(mask >> self._shift) & RANK_BITS[0]]
            if before < NUM_RANKS:
                self.num_by_rank[before] -= count
            if rank < NUM_RANKS:
                self.num_by_rank[rank] += count

    def give_up(self, max_pages: int, kept: set[PageHash] | None = None) -> int:
        """Forgets pages of the oldest generation, leaves first; those in `kept` join the youngest one instead.

        Returns how many it has looked at, none only where that generation was empty.
        """
        if kept and len(self.generations) == 1:
            self.generations.append(Generation(self.generations[0].started_s))
        pages = self.generations[0].pages
        popped = [pages.popitem()[0] for _ in range(min(max_pages, len(pages)))]
        younger = [one.pages for one in self.generations if one.pages is not pages]
        gone = [page for page in popped if not any(page in other for other in younger)] if younger else popped
        self.num_entries -= len(popped)
        if kept:
            asked = dict.fromkeys(page for page in gone if page in kept)
            younger[-1].update(asked)
            self.num_entries += len(asked)
            gone = [page for page in gone if page not in kept]
        self._count(self._masks.take(gone, self._steps[NUM_RANKS]), NUM_RANKS)
        if not pages and younger:
            self.generations.popleft()
        return len(popped)

    def check_integrity(self) -> None:
        """Raises AssertionError where masks, generations and counts disagree."""
        held = {page: mask & self.bits for page, mask in self._masks.masks.items() if mask & self.bits}
        assert held.keys() == set().union(*(one.pages for one in self.generations)), "masks and generations disagree"
        assert self.num_entries == sum(len(one.pages) for one in self.generations), "entries are counted wrong"
        ranks = [RANK_OF_BITS[bits >> self._shift] for bits in held.values()]
        assert [ranks.count(rank) for rank in range(NUM_RANKS)] == self.num_by_rank, "counts are off"
