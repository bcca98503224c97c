"""One integer a page says who holds it, three bits a worker: on any tier, in memory, on the device. Pure.

All work on many pages is done by single calls into the interpreter's C code, some 30 ns a page each. Pages held alike
share one integer object, since a worker's change leads from one object to one other (`Step`).

A worker's three bits each name the leading pages that it holds so or better. Along a prompt a bit once lost counts no
more, so that the AND over a prompt's pages is all that a match needs; and where no page of a worker strays from its
parent (`penstock.page_places`), the AND over the first pages is that of the last of them alone, and bisection finds
where it changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat

from penstock.types import PageHash

BITS = 3  # of one worker
RANK_BITS = (0b111, 0b011, 0b001, 0b000)  # device, host, disk, nowhere
RANK_OF_BITS = {bits: rank for rank, bits in enumerate(RANK_BITS)}

Losses = list[tuple[int, int]]  # bits, and the leading pages that those who lost them hold

_MAX_CHANGES = 6  # found by bisection; with more of them a look at every page is quicker
_MAX_STEPS = 10_000  # remembered a worker and rank


class Step(dict[int, int]):
    """Where one worker's change of one kind leads a mask; worked out once for each mask."""

    def __init__(self, shift: int, rank: int, shared: dict[int, int]) -> None:
        self._keep = ~(RANK_BITS[0] << shift)
        self._bits = RANK_BITS[rank] << shift
        self._shared = shared

    def __missing__(self, old: int) -> int:
        if len(self) >= _MAX_STEPS:
            self.clear()
        new = (old & self._keep) | self._bits
        new = self[old] = self._shared.setdefault(new, new)
        return new


class PageMasks:
    def __init__(self) -> None:
        self.masks: dict[PageHash, int] = {}
        self._shared: dict[int, int] = {}

    def step(self, shift: int, rank: int) -> Step:
        if len(self._shared) > 4 * _MAX_STEPS:
            self._shared.clear()  # costs memory alone: equal masks may be two objects from then on
        return Step(shift, rank, self._shared)

    def put(self, hashes: Mapping[PageHash, object], step: Step) -> Mapping[int, int]:
        """Each page is held as `step` says; returns how many pages had which mask before."""
        masks = self.masks
        old = list(map(masks.get, hashes, repeat(0)))
        counts = _counted(old)
        if len(counts) == 1:
            masks.update(dict.fromkeys(hashes, step[old[0]]))
        else:
            masks.update(zip(hashes, map(step.__getitem__, old), strict=True))
        return counts

    def take(self, hashes: Sequence[PageHash], step: Step) -> Mapping[int, int]:
        """As `put`, for a step that takes bits away: a page without any is forgotten."""
        masks = self.masks
        old = list(map(masks.pop, hashes, repeat(0)))
        counts = _counted(old)
        if any(step[mask] for mask in counts):
            masks.update((page, step[mask]) for page, mask in zip(hashes, old, strict=True) if step[mask])
        return counts


def _counted(masks: list[int]) -> Mapping[int, int]:
    return Counter(masks) if len(masks) != 1 else {masks[0]: 1}


def bisect_masks(get: Callable[[PageHash, int], int], hashes: Sequence[PageHash], alive: int, losses: Losses) -> None:
    """For bits of workers without strays. `alive`: those of the first page; notes when each of them is lost."""
    low, last = 0, len(hashes) - 1  # page `low` has every bit that is alive
    for _ in range(_MAX_CHANGES):
        at_end = get(hashes[last], 0) & alive
        if at_end == alive:
            losses.append((alive, last + 1))
            return
        high, at_high = last, at_end  # page `high` has not
        start = low
        while high - start > 1:
            middle = (start + high) >> 1
            held = get(hashes[middle], 0) & alive
            if held == alive:
                start = middle
            else:
                high, at_high = middle, held
        losses.append((alive ^ at_high, high))
        alive, low = at_high, high
        if not alive:
            return
    scan_masks(get, hashes, low, alive, losses)


def scan_masks(
    get: Callable[[PageHash, int], int], hashes: Sequence[PageHash], low: int, alive: int, losses: Losses
) -> None:
    """The same for any bits, page by page from `low` on."""
    before: int | None = None
    for depth, held in enumerate(map(get, _from(hashes, low), repeat(0)), low):
        if held is before:  # most pages are held like the one before
            continue
        before = held
        left = alive & held
        if left != alive:
            losses.append((alive ^ left, depth))
            alive = left
            if not alive:
                return
    losses.append((alive, len(hashes)))


def _from(hashes: Sequence[PageHash], low: int) -> Iterable[PageHash]:
    return hashes[low:] if low else hashes
