"""Which cached pages of a worker that leaves go to which of those that stay. Pure.

A prefix is of use where it is whole, so branches of the cache's tree go to one worker each, with the trunk that leads
to them; what would be more than one worker's share is divided where it branches, so that a system prompt that all have
in common reaches everybody. A branch chooses its worker by rendezvous hashing: a second round sends what has come since
where the first one sent what it hangs from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from penstock.types import Epoch, HandoverTarget, PageHash, WorkerId


@dataclass(frozen=True, slots=True)
class _Branch:
    """A page with all that hangs from it."""

    root: int
    trunk: tuple[int, ...] = ()  # that leads to it


def assign(
    pages: Sequence[tuple[PageHash, PageHash | None]], targets: Sequence[HandoverTarget]
) -> dict[Epoch, list[int]]:
    """Indexes of the (page, parent) that each target is to get, in the order given: hottest first, parents before
    children."""
    if not targets:
        return {}
    places = {page_hash: index for index, (page_hash, _) in enumerate(pages)}
    parents = [places.get(parent) if parent is not None else None for _, parent in pages]
    children: list[list[int]] = [[] for _ in pages]
    sizes = [1] * len(pages)
    for index in reversed(range(len(pages))):  # parents stand before their children
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
        target = max(targets, key=lambda one: _weight(pages[branch.root][0], one.worker_id))
        chosen[target.epoch].update((*branch.trunk, *_below(branch.root, children)))
    return {target.epoch: sorted(chosen[target.epoch])[: target.max_pages] for target in targets}


def _below(root: int, children: Sequence[Sequence[int]]) -> list[int]:
    found = [root]
    for index in found:  # grows while it is walked
        found += children[index]
    return found


def _weight(page_hash: PageHash, worker_id: WorkerId) -> bytes:
    return blake2b(page_hash + worker_id.encode(), digest_size=8).digest()
