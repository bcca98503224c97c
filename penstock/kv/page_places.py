"""Tracks the tier of each page of one worker's prefix cache, and counts strays. Pure.

A page is useful only together with all pages before it. A cache that evicts leaves first keeps each page's parent on a
tier at least as good. A prompt's pages then form one stretch on the device, a second on the host and a third on disk,
and a reader finds the end of each by bisection. A page whose parent is gone or on a worse tier is a stray, and while
there are strays the reader has to visit every page. Only the worker knows the parents, so it counts the strays.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.types import PageHash

ROOT = PageHash(b"")  # the parent of a prompt's first page
NUM_RANKS = 3  # device, host, disk; this rank itself means nowhere
_CHILD_BITS = 32
_CHILD = (1, 1 << _CHILD_BITS, 1 << 2 * _CHILD_BITS, 0)  # the weight of one child in `_Place.children`, by rank


class _Place:
    """A page that is held, or has children that are."""

    __slots__ = ("children", "page", "parent", "rank")

    def __init__(self, page: PageHash, rank: int, parent: _Place | None) -> None:
        self.page = page
        self.rank = rank
        self.parent = parent  # None only for the two places that are not pages
        self.children = 0  # numbers of held children on each tier, packed into one integer


class PagePlaces:
    """Maps pages to the ranks of their tiers. Callers synchronize."""

    def __init__(self) -> None:
        self.num_strays = 0
        self._places: dict[PageHash, _Place] = {}
        self._root = _Place(ROOT, 0, None)
        self._unknown = _Place(ROOT, NUM_RANKS, None)

    def __len__(self) -> int:
        return sum(place.rank < NUM_RANKS for place in self._places.values())

    def rank_of(self, page: PageHash) -> int:
        """Returns the rank of the tier that holds a page, NUM_RANKS if none does."""
        place = self._places.get(page)
        return NUM_RANKS if place is None else place.rank

    def put(self, page: PageHash, rank: int, parent: PageHash | None = None) -> bool:
        """Moves a page to a tier. Returns False if it is there already. `parent` (None: unknown) matters only for new
        pages.
        """
        place = self._places.get(page)
        if place is None:
            if rank == NUM_RANKS:
                return False
            place = self._places[page] = _Place(page, NUM_RANKS, self._place_of(parent))
        elif place.rank == rank:
            return False
        elif place.rank == NUM_RANKS:
            place.parent = self._place_of(parent)
        above, old = place.parent, place.rank
        assert above is not None
        self.num_strays += (rank < above.rank) - (old < above.rank)
        if place.children:
            for child_rank, count in enumerate(_counts(place)):
                self.num_strays += count * ((rank > child_rank) - (old > child_rank))
        above.children += _CHILD[rank] - _CHILD[old]
        place.rank = rank
        if rank == NUM_RANKS:
            if not place.children:
                del self._places[page]
            if above.rank == NUM_RANKS and not above.children and above is not self._unknown:
                del self._places[above.page]  # the place was kept only for this child
        return True

    def put_run(self, pages: Iterable[PageHash], parent: PageHash | None) -> list[PageHash]:
        """Moves a run of pages to the device, each the child of the previous one. Returns those that were not there."""
        places, new = self._places, []
        above: _Place | None = None
        for page in pages:
            place = places.get(page)
            if place is None:
                above = above or self._place_of(parent)
                place = places[page] = _Place(page, 0, above)
                above.children += _CHILD[0]
                self.num_strays += above.rank > 0
                new.append(page)
            elif place.rank and self.put(page, 0, parent):
                new.append(page)
            above, parent = place, page
        return new

    def drop(self, pages: Iterable[PageHash]) -> list[PageHash]:
        """Moves pages to nowhere. Returns those that were on a tier."""
        places, unknown, gone = self._places, self._unknown, []
        for page in pages:
            place = places.get(page)
            if place is None or place.rank or place.children:
                if place is not None and self.put(page, NUM_RANKS):
                    gone.append(page)
                continue
            above = place.parent  # the rest is `put` for a leaf on the device
            assert above is not None
            above.children -= _CHILD[0]
            del places[page]
            if above.rank:
                self.num_strays -= 1
                if above.rank == NUM_RANKS and not above.children and above is not unknown:
                    del places[above.page]
            gone.append(page)
        return gone

    def _place_of(self, page: PageHash | None) -> _Place:
        if not page:
            return self._unknown if page is None else self._root
        place = self._places.get(page)
        if place is None:
            place = self._places[page] = _Place(page, NUM_RANKS, self._unknown)
        return place

    def by_rank(self) -> list[list[PageHash]]:
        """Returns the pages of each tier in order of arrival, parents before children."""
        found: list[list[PageHash]] = [[] for _ in range(NUM_RANKS + 1)]
        for place in self._places.values():
            found[place.rank].append(place.page)
        return found[:NUM_RANKS]

    def check_integrity(self) -> None:
        """Raises AssertionError if the counts of strays or children are wrong."""
        places = self._places.values()
        strays = sum(place.rank < place.parent.rank for place in places if place.parent is not None)
        assert strays == self.num_strays, f"{self.num_strays} strays counted, {strays} there"
        held: dict[PageHash, int] = dict.fromkeys(self._places, 0)
        for place in places:
            assert place.rank < NUM_RANKS or place.children, "a page is kept without children"
            if place.parent is not None and place.parent.page and place.rank < NUM_RANKS:
                held[place.parent.page] += 1
        assert held == {place.page: sum(_counts(place)) for place in places}, "children and pages disagree"


def _counts(place: _Place) -> list[int]:
    """Returns the number of held children by rank."""
    return [place.children >> _CHILD_BITS * rank & (1 << _CHILD_BITS) - 1 for rank in range(NUM_RANKS)]
