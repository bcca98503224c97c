"""Caches pages as a pull does."""

from __future__ import annotations

from collections.abc import Sequence

from engine.cache.prefix_cache import PrefixCache
from penstock.types import PageHash


def pull(cache: PrefixCache, hashes: Sequence[PageHash], indexes: Sequence[int]) -> None:
    """Caches those of these consecutive pages that are not cached yet, as far as the pool has room."""
    batch = [(hashes[index], hashes[index - 1] if index else None) for index in indexes]
    lacking = cache.lacking(batch)[: cache.pool.num_available]
    pages = cache.pool.allocate(len(lacking))
    for index, page in zip(lacking, pages, strict=True):
        assert cache.graft(*batch[index], page)
    cache.pool.release(pages)
