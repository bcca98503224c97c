"""Decides which cached pages of a draining worker go to which of the remaining ones, and in what batches. Pulls send
their pages in the same batches. Pure.

A prefix is useful only as a whole, so each branch of the cache's tree goes to one worker, together with the trunk that
leads to it. A branch larger than one worker's share is divided where it forks, so that a system prompt common to all
prompts reaches every worker. Rendezvous hashing chooses a branch's worker, so that in a second round new pages follow
their parents to the same worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from penstock.types import Epoch, HandoverTarget, PageHash, WorkerId

BATCH_BYTES = 32 << 20
BATCH_PAGES = 256
_FIRST_BYTES = 1 << 20  # first batch of a pull that is to come in short ones
_GROWTH = 8.0  # most by which a batch is larger than the one before


@dataclass(frozen=True, slots=True)
class _Branch:
    """A page with all its descendants."""

    root: int
    trunk: tuple[int, ...] = ()  # ancestors of the page


def assign_pages(
    pages: Sequence[tuple[PageHash, PageHash | None]], targets: Sequence[HandoverTarget]
) -> dict[Epoch, list[int]]:
    """Returns the indexes of the (page, parent) pairs that each target receives, in the given order: hottest first,
    parents before children."""
    if not targets:
        return {}
    places = {page_hash: index for index, (page_hash, _) in enumerate(pages)}
    parents = [places.get(parent) if parent is not None else None for _, parent in pages]
    children: list[list[int]] = [[] for _ in pages]
    sizes = [1] * len(pages)
    for index in reversed(range(len(pages))):  # parents have lower indexes than their children
        parent = parents[index]
        if parent is not None:
            sizes[parent] += sizes[index]
            children[parent].append(index)
    share = max(1, len(pages) // len(targets))
    chosen: dict[Epoch, set[int]] = {target.epoch: set() for target in targets}
    open_branches = [_Branch(index) for index, parent in enumerate(parents) if parent is None]
    while open_branches:
        branch = open_branches.pop()
        if sizes[branch.root] > share and len(targets) > 1 and children[branch.root]:
            trunk = (*branch.trunk, branch.root)
            open_branches += [_Branch(child, trunk) for child in children[branch.root]]
            continue
        best = max(targets, key=lambda target: _weight(pages[branch.root][0], target.worker_id))
        chosen[best.epoch].update((*branch.trunk, *_subtree(branch.root, children)))
    return {target.epoch: sorted(chosen[target.epoch])[: target.max_pages] for target in targets}


def batch_size(page_bytes: int) -> int:
    """Returns how many pages form one batch, which the target accepts or refuses as a whole."""
    return max(1, min(BATCH_PAGES, BATCH_BYTES // page_bytes))


def first_batch_size(page_bytes: int) -> int:
    """Returns how many pages the first batch has if batches are to take a certain time on a link that may be slow."""
    return max(1, min(batch_size(page_bytes), _FIRST_BYTES // page_bytes))


def next_batch_size(size: int, took_s: float, batch_s: float, page_bytes: int) -> int:
    """Returns how many pages to send next so that writing them takes about `batch_s`, if the last `size` pages took
    `took_s`.
    """
    growth = min(_GROWTH, batch_s / max(took_s, 1e-6))
    return max(1, min(batch_size(page_bytes), int(size * growth)))


def _subtree(root: int, children: Sequence[Sequence[int]]) -> list[int]:
    found = [root]
    for index in found:  # the list grows during the walk
        found += children[index]
    return found


def _weight(page_hash: PageHash, worker_id: WorkerId) -> bytes:
    return blake2b(page_hash + worker_id.encode(), digest_size=8).digest()
