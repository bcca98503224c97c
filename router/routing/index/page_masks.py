"""Keeps an integer per page that says who holds it, three bits per worker: any tier, memory, the device. Pure.

Work on many pages is done by single calls into the interpreter's C code, each at some 30 ns per page. Pages with equal
masks share one integer object, since a worker's change maps each mask object to one other (`MaskTransition`).

A worker's bit is set on a page that it holds on that tier or a better one. A match is the AND of the masks along a
prompt: once a page lacks a bit, later pages no longer count for it. If a worker has no stray pages
(`penstock.kv.page_places`), the AND over the first n pages equals the mask of the n-th, and bisection finds where it
changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat

from penstock.types import PageHash

BITS = 3  # per worker
RANK_BITS = (0b111, 0b011, 0b001, 0b000)  # device, host, disk, nowhere
RANK_OF_BITS = {bits: rank for rank, bits in enumerate(RANK_BITS)}

Losses = list[tuple[int, int]]  # bits lost along a prompt, and the number of pages before the loss

_MAX_CHANGES = 6  # changes searched for by bisection; with more, scanning every page is quicker
_MAX_CACHED = 10_000  # masks cached by one transition


class MaskTransition(dict[int, int]):
    """Maps a mask to the mask after one worker's change to one tier rank; computes each mapping once."""

    def __init__(self, shift: int, rank: int, shared: dict[int, int]) -> None:
        self._keep = ~(RANK_BITS[0] << shift)
        self._bits = RANK_BITS[rank] << shift
        self._shared = shared

    def __missing__(self, old: int) -> int:
        if len(self) >= _MAX_CACHED:
            self.clear()
        new = (old & self._keep) | self._bits
        new = self[old] = self._shared.setdefault(new, new)
        return new


class PageMasks:
    """The mask of every known page."""

    def __init__(self) -> None:
        self.masks: dict[PageHash, int] = {}
        self._shared: dict[int, int] = {}

    def transition(self, shift: int, rank: int) -> MaskTransition:
        if len(self._shared) > 4 * _MAX_CACHED:
            self._shared.clear()  # from then on equal masks may be two objects, which costs only memory
        return MaskTransition(shift, rank, self._shared)

    def put(self, hashes: Mapping[PageHash, object], transition: MaskTransition) -> Mapping[int, int]:
        """Applies a transition to each page. Returns the number of pages by their previous mask."""
        masks = self.masks
        old = list(map(masks.get, hashes, repeat(0)))
        counts = _counted(old)
        if len(counts) == 1:
            masks.update(dict.fromkeys(hashes, transition[old[0]]))
        else:
            masks.update(zip(hashes, map(transition.__getitem__, old), strict=True))
        return counts

    def remove(self, hashes: Sequence[PageHash], transition: MaskTransition) -> Mapping[int, int]:
        """Applies a transition that clears bits, and forgets pages without any bits left. Returns what `put` does."""
        masks = self.masks
        old = list(map(masks.pop, hashes, repeat(0)))
        counts = _counted(old)
        if any(transition[mask] for mask in counts):
            masks.update((page, transition[mask]) for page, mask in zip(hashes, old, strict=True) if transition[mask])
        return counts


def _counted(masks: list[int]) -> Mapping[int, int]:
    return Counter(masks) if len(masks) != 1 else {masks[0]: 1}


def bisect_masks(get: Callable[[PageHash, int], int], hashes: Sequence[PageHash], alive: int, losses: Losses) -> None:
    """Appends to `losses` where each bit is lost, for workers without strays. `alive` are the first page's bits."""
    low, last = 0, len(hashes) - 1  # page `low` has every bit in `alive`
    for _ in range(_MAX_CHANGES):
        at_end = get(hashes[last], 0) & alive
        if at_end == alive:
            losses.append((alive, last + 1))
            return
        high, at_high = last, at_end  # page `high` lacks some of them
        start = low  # page `start` has all of them
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
    """Appends to `losses` where each bit of `alive` is lost, for any worker, looking at each page from `low` on."""
    before: int | None = None
    for depth, held in enumerate(map(get, _from(hashes, low), repeat(0)), low):
        if held is before:  # most pages have the same mask object as their predecessor
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
