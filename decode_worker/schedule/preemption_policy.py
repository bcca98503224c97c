"""Decides which running sequence is preempted when another one needs a page and none is left. Pure.

Only sequences that rank behind the one in need are considered, so the first in rank always progresses. Bulk ranks
behind all others. Every other sequence becomes first in time, so none of these starves.
"""

from __future__ import annotations

from collections.abc import Iterable

from decode_worker.schedule.run_queues import TrackedSequence
from penstock.types import Lane


def choose_victim(behind: Iterable[TrackedSequence]) -> TrackedSequence | None:
    """Returns the sequence to preempt among those that rank behind the one in need; None if there are none.

    Bulk goes first, then the sequence with the fewest tokens to recompute, then the youngest.
    """
    return min(behind, key=_cost, default=None)


def _cost(victim: TrackedSequence) -> tuple[bool, int, int]:
    return victim.sequence.lane is not Lane.BULK, victim.sequence.num_computed_tokens, -victim.rank[1]
