"""Where each page of one worker's prefix cache is, and how many of them stray from their parents. Pure.

A page is of use only together with all pages before it. A cache that lets leaves go first has for each page its parent
on a tier at least as good; then a prompt's pages are a first stretch on the device, a second one on the host, a third
on disk, and nothing after, so that a reader finds where each ends by bisection. A page whose parent is gone, or on a
worse tier, is a stray: with a single one the reader has to look at every page. The worker counts them, since it alone
knows the parents.
"""

from __future__ import annotations

from penstock.types import PageHash

ROOT = PageHash(b"")  # parent of a prompt's first page
NUM_RANKS = 3  # device, host, disk; this rank itself: nowhere


class PagePlaces:
    """A map from page to tier by rank, 0 the device. The caller holds its lock."""

    def __init__(self) -> None:
        self.num_strays = 0
        self._places: dict[PageHash, tuple[int, PageHash | None]] = {}  # rank and parent
        self._children: dict[PageHash, list[int]] = {}  # of pages held or not: children held, by rank

    def __len__(self) -> int:
        return len(self._places)

    def put(self, page: PageHash, rank: int, parent: PageHash | None = None) -> bool:
        """False where the page is there already. `parent` counts where the page is new; None: not known."""
        old, parent = self._places.get(page, (NUM_RANKS, parent))
        if old == rank:
            return False
        above = self._rank(parent)
        self.num_strays += (rank < above) - (old < above)
        for child_rank, count in enumerate(self._children.get(page, ())):
            self.num_strays += count * ((rank > child_rank) - (old > child_rank))
        if parent is not None and parent != ROOT:
            self._count_child(parent, old, rank)
        if rank == NUM_RANKS:
            del self._places[page]
        else:
            self._places[page] = rank, parent
        return True

    def by_rank(self) -> list[list[PageHash]]:
        """Every page, those of each tier in the order in which they came: parents before their children."""
        found: list[list[PageHash]] = [[] for _ in range(NUM_RANKS)]
        for page, (rank, _) in self._places.items():
            found[rank].append(page)
        return found

    def _rank(self, page: PageHash | None) -> int:
        if page == ROOT:
            return 0
        return self._places[page][0] if page is not None and page in self._places else NUM_RANKS

    def _count_child(self, parent: PageHash, old: int, new: int) -> None:
        counts = self._children.setdefault(parent, [0] * NUM_RANKS)
        if old < NUM_RANKS:
            counts[old] -= 1
        if new < NUM_RANKS:
            counts[new] += 1
        if not any(counts):
            del self._children[parent]

    def check_integrity(self) -> None:
        """Raises AssertionError where the count of strays is off."""
        strays = sum(rank < self._rank(parent) for rank, parent in self._places.values())
        assert strays == self.num_strays, f"{self.num_strays} strays counted, {strays} there"
        held = sum(parent is not None and parent != ROOT for _, parent in self._places.values())
        assert held == sum(map(sum, self._children.values())), "children and pages disagree"
