"""Decides which pages of a sequence are read where attention is limited to its first and its last tokens. Pure.

StreamingLLM (Xiao et al. 2023, arXiv:2309.17453): a model that was trained with full attention puts much of it on the
first tokens, the *attention sinks*, so it stays coherent if it sees these and a window of the last tokens. Here both
are rounded up to whole pages: kernels get a page table without the gap between them, and need no further mask. Which
pages a token sees depends on its position alone, so neither chunks, batches, preemption nor another worker change it.

Keys keep the positions of their tokens. The paper uses their places in the cache instead, which would rotate every
key of the window in each step.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.cache.windows.page_window import PageWindow


@dataclass(frozen=True, slots=True)
class SinkWindow:
    """A token sees the pages of the first `num_sinks` tokens, and those of the last `num_recent`, itself included."""

    num_sinks: int
    num_recent: int
    page_size: int

    @property
    def num_sink_pages(self) -> int:
        return -(-self.num_sinks // self.page_size)

    @property
    def window(self) -> PageWindow:
        return PageWindow(self.num_recent, self.page_size)

    def gap(self, num_tokens: int) -> range:
        """Returns the indexes of the pages that no token from position `num_tokens` on reads."""
        return range(self.num_sink_pages, max(self.num_sink_pages, self.window.num_behind(num_tokens)))

    def num_first_entries(self, num_tokens: int, num_cached: int, num_new: int) -> int:
        """Returns how many leading entries a sequence needs for the next `num_new` of `num_tokens` tokens if its first
        `num_cached` pages are computed.
        """
        return self.gap(num_cached * self.page_size).stop + self.window.max_pages(num_tokens, num_new)
