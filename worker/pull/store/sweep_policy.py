"""Decides what to delete from the shared store, and which worker does it. Pure: time is passed in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from worker.pull.store.backends.object_store import StoredObject

_KEPT_SHARE = 0.9  # share of the bound that a sweep leaves, so that there is room for a while
_PARTIAL_S = 3600.0  # the writer of a partial object this old is gone


@dataclass(frozen=True, slots=True)
class SweepPlan:
    deleted: list[StoredObject]
    num_bytes: int  # of what is kept


def plan_sweep(objects: Iterable[StoredObject], max_bytes: int, now_s: float) -> SweepPlan:
    """Chooses abandoned partial objects and, while there are more than `max_bytes`, the least recently used ones."""
    deleted: list[StoredObject] = []
    kept: list[StoredObject] = []
    for each in objects:
        (deleted if each.is_partial and each.used_s < now_s - _PARTIAL_S else kept).append(each)
    total = sum(each.num_bytes for each in kept)
    if total > max_bytes:
        for each in sorted(kept, key=lambda each: (each.used_s, each.name)):
            if total <= _KEPT_SHARE * max_bytes:
                break
            if not each.is_partial:
                deleted.append(each)
                total -= each.num_bytes
    return SweepPlan(deleted, total)


@dataclass(frozen=True, slots=True)
class SweepLease:
    """Says which worker sweeps. Two sweeps at once delete the same objects, which does no harm."""

    owner: str
    until_s: float  # Unix time

    def allows(self, owner: str, now_s: float, lease_s: float) -> bool:
        """Returns whether a worker may take the lease. A lease that ends too far ahead comes from a wrong clock."""
        return self.owner == owner or not now_s < self.until_s <= now_s + 2 * lease_s
