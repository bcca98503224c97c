"""Says how a worker's pages are used at the moment of a scrape, without a cost to its steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from engine.cache.page_pool import PagePool
from engine.step.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PageUse:
    """The pages of a pool by state, and what their holders leave empty."""

    by_state: Mapping[str, int]
    num_allocated: int  # since the worker started
    fragmentation: float  # share of the slots in the pages that sequences hold without a token's KV


def measure_pages(pool: PagePool, sequences: Collection[Sequence], page_size: int) -> PageUse:
    """Counts the pages of these sequences and of their pool.

    Pages have one size, so that none is too small for anybody: all that is wasted is the unfilled part of the pages
    that a sequence holds. Reads beside the step loop; a step may make a figure wrong by its own tokens.
    """
    by_state = {
        "free": pool.num_free,
        "evictable": pool.num_evictable,
        "fenced": pool.num_fenced,
        "held": pool.num_held,
    }
    num_slots = num_filled = 0
    for sequence in sequences:
        num_dropped = sequence.num_dropped
        slots = max(0, len(sequence.pages) - num_dropped) * page_size
        num_slots += slots
        num_filled += min(slots, max(0, sequence.num_computed_tokens - num_dropped * page_size))
    return PageUse(by_state, pool.num_allocated, 1.0 - num_filled / num_slots if num_slots else 0.0)
