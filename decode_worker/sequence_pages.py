"""The pages that a sequence takes to be computed here, and the full ones that others may find after it. Pure.

Asked by the decode scheduler. It owns how much of each sequence the prefix cache has been offered; the pages themselves
are the pool's, and when they go back is `decode_worker.steps_under_way`'s.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.page_pool import OutOfPages, PagePool
from engine.prefix_cache import PrefixCache
from engine.sequence import Sequence, hash_one_more_page
from penstock.types import PageHash, PageId


class SequencePages:
    def __init__(self, pool: PagePool, cache: PrefixCache, page_size: int) -> None:
        self._pool = pool
        self._cache = cache
        self._page_size = page_size
        self._num_shared: dict[Sequence, int] = {}  # leading full pages already offered to the prefix cache

    def peek(self, sequence: Sequence) -> int:
        """Leading pages that need no computing here."""
        return self._cache.peek(self._reusable_hashes(sequence, len(sequence.token_ids)))

    def take(self, sequence: Sequence, num_tokens: int, num_kept_back: int) -> tuple[int, list[PageId]] | None:
        """(how many leading pages are cached, pages for `num_tokens`), a reference on each; None, and nothing taken,
        where that would leave fewer than `num_kept_back` in the pool."""
        hashes = self._reusable_hashes(sequence, num_tokens)
        held = self._cache.match(hashes)
        num_fresh = -(-num_tokens // self._page_size) - len(held)
        if self._pool.num_available - num_fresh >= num_kept_back:
            try:
                pages = [*held, *self._pool.allocate(num_fresh)]
                return self._cache.promote(hashes, pages, len(held)), pages
            except OutOfPages:
                pass  # the reference on `held` made evictable pages unavailable: same as too few
        self._pool.release(held)
        return None

    def hold(self, sequence: Sequence, num_cached: int, pages: list[PageId]) -> None:
        """The sequence has what was taken for it; the rest of its tokens is computed next."""
        sequence.pages = pages
        sequence.num_computed_tokens = num_cached * self._page_size
        self._num_shared[sequence] = num_cached

    def let_go(self, sequence: Sequence) -> None:
        """The sequence holds nothing any more; the pages are given back by the caller."""
        sequence.pages = []
        sequence.num_computed_tokens = 0
        self._num_shared.pop(sequence, None)

    def share_full(self, sequence: Sequence) -> None:
        """Others may find the pages that are computed to their end, where there is a cache."""
        if not self._cache.enabled:
            return
        num_full = sequence.num_computed_tokens // self._page_size
        num_shared = self._num_shared.get(sequence, 0)
        if num_full > num_shared:
            hashes = sequence.hash_full_pages(self._page_size)
            self._cache.insert(hashes[:num_full], sequence.pages, start=num_shared)
            self._num_shared[sequence] = num_full

    def share_filled(self, sequences: Iterable[Sequence]) -> None:
        """`share_full` of sequences that have just computed a page to its end, all at once."""
        if not self._cache.enabled:
            return
        plain: list[Sequence] = []
        for sequence in sequences:
            num_full = sequence.num_computed_tokens // self._page_size
            if len(sequence.page_hashes) == self._num_shared.get(sequence, 0) == num_full - 1:
                self._num_shared[sequence] = num_full
                plain.append(sequence)
            else:
                self.share_full(sequence)
        if plain:
            hash_one_more_page(plain, self._page_size)
            self._cache.insert_last([(sequence.page_hashes, sequence.pages) for sequence in plain])

    def _reusable_hashes(self, sequence: Sequence, num_tokens: int) -> list[PageHash]:
        """Of the full pages before the last token, which is computed anew for its logits."""
        num_known = min(num_tokens, len(sequence.token_ids))
        return sequence.hash_full_pages(self._page_size)[: (num_known - 1) // self._page_size]
