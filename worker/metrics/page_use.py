"""Measures how a worker's pages are used at the moment of a scrape, at no cost to its steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from engine.cache.page_pool import PagePool
from engine.step.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PageUse:
    """The pages of a pool by state, and the unused share of those that sequences hold."""

    by_state: Mapping[str, int]
    num_allocated: int  # pages allocated since the worker started
    fragmentation: float  # share of the slots in sequences' pages that hold no KV
    window_slots: Mapping[str, int] | None = None  # slots of windowed layers by state, if pages have two parts


def measure_pages(pool: PagePool, sequences: Collection[Sequence], page_size: int) -> PageUse:
    """Counts the pages of these sequences and of their pool.

    All pages have one size, so the only waste is the unfilled part of the pages that a sequence holds. The step loop
    runs meanwhile, so a figure may be off by one step's tokens.
    """
    by_state = {
        "free": pool.num_free,
        "evictable": pool.num_evictable,
        "fenced": pool.num_fenced,
        "held": pool.num_held,
    }
    num_slots = num_filled = 0
    for sequence in sequences:
        num_dropped = sequence.num_dropped - (sequence.num_sinks if sequence.has_gap else 0)
        slots = max(0, len(sequence.pages) - num_dropped) * page_size
        num_slots += slots
        num_filled += min(slots, max(0, sequence.num_computed_tokens - num_dropped * page_size))
    window_slots = None
    if (parts := pool.parts) is not None:
        window_slots = {"free": parts.num_free, "evictable": parts.num_idle, "held": parts.num_held}
    return PageUse(by_state, pool.num_allocated, 1.0 - num_filled / num_slots if num_slots else 0.0, window_slots)
