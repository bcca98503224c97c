"""Decides which pages of a sequence are still read in a model whose every layer has a sliding window. Pure.

A token of such a model reads the KV of only the last `tokens` tokens, including itself. So pages that lie wholly before
them are released while the sequence runs, are not sent to other workers, and are not needed to find a cached prefix. If
even one layer reads the whole context, every page is needed, because a page holds all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageWindow:
    """`tokens` is None if some layer reads the whole context; then nothing is ever behind the window."""

    tokens: int | None
    page_size: int

    def num_behind(self, num_tokens: int) -> int:
        """Returns how many leading pages are read by no token from position `num_tokens` on."""
        return 0 if self.tokens is None else max(0, num_tokens - self.tokens + 1) // self.page_size

    def num_unsent(self, num_tokens: int) -> int:
        """Returns how many leading pages of a prompt of `num_tokens` need not be sent, which is never all of them."""
        return min(self.num_behind(num_tokens), (num_tokens - 1) // self.page_size)

    def max_pages(self, num_tokens: int, num_new: int) -> int:
        """Returns the most pages that a sequence of up to `num_tokens` holds at once if a step computes at most
        `num_new` of its tokens.
        """
        num_pages = -(-num_tokens // self.page_size)
        if self.tokens is None:
            return num_pages
        return min(num_pages, -(-(self.tokens - 1 + num_new) // self.page_size) + 1)

    def wider(self, num_tokens: int) -> PageWindow:
        """Returns a window that is larger by that many tokens."""
        return self if self.tokens is None else PageWindow(self.tokens + num_tokens, self.page_size)

    def longest_prefix(self, num_pages: int, num_unneeded: int, holds: Callable[[int], bool]) -> int:
        """Returns the length in pages, up to `num_pages`, of the longest prefix whose pages are held as far as later
        tokens read them.

        `holds` is called with indexes of pages from `num_unneeded` on; earlier pages count as held.
        """
        length = index = num_pages
        while index > max(num_unneeded, self.num_behind(length * self.page_size)):
            index -= 1
            if not holds(index):
                length = index
        return max(length, num_unneeded)
