"""Chooses which pages of a dead worker's pool its successor copies back. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.cache.kept.journal import SealedPage
from penstock.types import PageHash


def choose_restored(
    sealed: Mapping[PageHash, SealedPage],
    max_pages: int,
    is_cached: Callable[[PageHash], bool],
    *,
    needs_parents: bool,
) -> list[SealedPage]:
    """Chooses at most `max_pages` pages, those of the latest texts first. Returns them with parents before children.

    With `needs_parents`, a page is useful only together with all pages before it; others are left out.
    """
    chosen: dict[PageHash, SealedPage] = {}
    for newest in sorted(sealed.values(), key=lambda page: page.number, reverse=True):
        chain: dict[PageHash, SealedPage] = {}
        page: SealedPage | None = newest
        is_whole = True
        while page is not None and page.page_hash not in chosen and page.page_hash not in chain:
            chain[page.page_hash] = page
            if page.parent is None or is_cached(page.parent):
                break
            if page.parent not in sealed:
                is_whole = not needs_parents
                break
            page = sealed[page.parent]
        if is_whole and len(chosen) + len(chain) <= max_pages:
            chosen.update(reversed(chain.items()))
    return list(chosen.values())
