"""Decides what is deleted from the shared store, and who does it. Pure: time is passed in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from worker.pull.store.object_store import StoredObject

_KEPT_SHARE = 0.9  # of the bound, once it was reached: a sweep makes room for some time
_PARTIAL_S = 3600.0  # a partial object this old is of a writer that is gone


@dataclass(frozen=True, slots=True)
class SweepPlan:
    deleted: list[StoredObject]
    num_bytes: int  # of what is kept


def plan_sweep(objects: Iterable[StoredObject], max_bytes: int, now_s: float) -> SweepPlan:
    """Chooses abandoned partial objects, and those longest unused while there are more than `max_bytes`."""
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
    """Says which worker sweeps. Two at once delete the same objects, which does no harm."""

    owner: str
    until_s: float  # Unix time

    def allows(self, owner: str, now_s: float, lease_s: float) -> bool:
        """Returns whether a worker may take the lease. A time too far ahead is of a clock that is wrong."""
        return self.owner == owner or not now_s < self.until_s <= now_s + 2 * lease_s
