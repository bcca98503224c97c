"""Tests the windowed parts of pages: their slots, prefixes that need those of the last window, and random histories of
sequences over one pool.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.page_pool import OutOfPages
from engine.cache.prefix_cache import PrefixCache
from engine.cache.windows.page_window import PageWindow
from engine.cache.windows.window_parts import OutOfSlots, WindowParts
from penstock.kv.page_hash import hash_pages
from penstock.types import PageHash, PageId
from tests.support.suite.examples import examples

SALT = b"0123456789abcdef"


def make(num_pages: int, num_slots: int, window: int) -> tuple[PrefixCache, WindowParts]:
    """Returns a cache of pages with one token each."""
    parts = WindowParts(num_pages, num_slots, PageWindow(window, 1))
    return PrefixCache(num_pages, 1, parts=parts), parts


def hashes_of(*tokens: int) -> list[PageHash]:
    return hash_pages(tokens, 1, SALT)


def start(cache: PrefixCache, *tokens: int) -> list[PageId]:
    """Returns cached pages of a text, all with their windowed part, which the caller holds."""
    pages = cache.pool.allocate(len(tokens))
    assert cache.pool.parts is not None
    cache.pool.parts.attach(pages)
    cache.insert(hashes_of(*tokens), pages)
    return pages


def test_idle_parts_give_up_their_slots_oldest_first_and_their_pages_stay_cached() -> None:
    cache, parts = make(8, 4, window=3)
    pages = start(cache, 1, 2, 3, 4)
    cache.pool.release((), pages[:2])
    assert (parts.num_held, parts.num_available) == (2, 2)
    fresh = cache.pool.allocate(1)
    parts.attach(fresh)
    assert [parts.has(page) for page in pages] == [False, True, True, True]
    assert cache.num_cached == 4
    cache.pool.release(pages, pages[2:])
    cache.pool.release(fresh, fresh)
    assert not parts.has(fresh[0])  # it was not cached
    assert parts.num_held == 0
    cache.check_integrity()


def test_a_pool_without_slots_is_reported_as_full() -> None:
    cache, parts = make(12, 4, window=3)
    pool = cache.pool
    assert pool.num_reported == 12
    pages = start(cache, 1, 2, 3)
    assert (pool.num_available, pool.num_reported) == (9, 3)
    last = pool.allocate(1)
    parts.attach(last)
    assert (pool.num_available, pool.num_reported) == (8, 0)
    pool.release((), pages[:2])  # their slots are available to others
    assert pool.num_reported == 6
    more = pool.allocate(7)
    assert pool.num_reported == pool.num_available == 1
    pool.release([*pages, *last, *more], [pages[2], *last])
    assert pool.num_reported == 12


def test_a_prefix_ends_where_its_last_window_is_kept() -> None:
    cache, parts = make(8, 8, window=3)  # a token reads two pages before its own
    pages = start(cache, 1, 2, 3, 4, 5)
    cache.pool.release(pages, pages)
    assert cache.peek(hashes_of(1, 2, 3, 4, 5)) == 5
    parts.drop([pages[0], pages[4]])
    assert cache.peek(hashes_of(1, 2, 3, 4, 5)) == 4
    parts.drop([pages[2]])
    assert cache.match(hashes_of(1, 2, 3, 4, 5)) == []
    cache.check_integrity()


def test_a_match_holds_the_windowed_parts_of_its_last_window() -> None:
    cache, parts = make(8, 8, window=3)
    pages = start(cache, 1, 2, 3, 4)
    cache.pool.release(pages, pages)
    matched = cache.match(hashes_of(1, 2, 3, 4))
    assert matched == pages
    assert list(cache.windowed(matched)) == pages[2:]
    assert parts.num_held == 2
    cache.pool.release(matched, cache.windowed(matched))
    assert parts.num_held == 0


def test_a_page_computed_again_takes_the_place_of_one_without_its_windowed_part() -> None:
    cache, parts = make(8, 8, window=3)
    pages = start(cache, 1, 2)
    cache.pool.release(pages, pages)
    parts.drop(pages)
    again = start(cache, 1, 2)
    assert cache.num_cached == 2
    assert cache.pool.num_free == 6  # the others are free again
    assert cache.match(hashes_of(1, 2)) == again
    cache.check_integrity()


def test_too_few_slots_change_nothing() -> None:
    cache, parts = make(8, 2, window=3)
    pages = cache.pool.allocate(3)
    with pytest.raises(OutOfSlots, match="3 slots asked for, 2 available"):
        parts.attach(pages)
    assert parts.num_available == 2
    assert parts.slots_of(pages) == []


def test_a_fenced_page_keeps_its_slot_until_the_fence_is_lifted() -> None:
    cache, parts = make(4, 2, window=3)
    pages = cache.pool.allocate(1)
    parts.attach(pages)
    cache.pool.fence(pages, "transfer")
    cache.pool.release(pages, pages)
    assert parts.has(pages[0])
    assert parts.num_available == 1
    cache.check_integrity()
    cache.pool.lift("transfer")
    assert parts.num_available == 2
    cache.check_integrity()


def test_freed_slots_are_reported_before_they_are_used_again() -> None:
    freed: list[int] = []
    parts = WindowParts(4, 2, PageWindow(3, 1), freed.extend)
    cache = PrefixCache(4, 1, parts=parts)
    pages = start(cache, 1, 2)
    cache.pool.release(pages, pages)
    assert freed == []
    fresh = cache.pool.allocate(1)
    parts.attach(fresh)
    assert len(freed) == 1


@examples(200)
@given(seed=st.integers(0, 2**32))
def test_random_histories_keep_every_part_that_a_sequence_reads(seed: int) -> None:
    """Sequences begin at what they find cached, grow, strip what lies behind their window, and end. The test records
    which slot holds which token of which text."""
    rng = random.Random(seed)
    window, num_pages = rng.randint(1, 5), rng.randint(8, 20)
    cache, parts = make(num_pages, rng.randint(window + 1, num_pages), window)
    content: dict[int, PageHash] = {}
    running: list[tuple[list[int], list[PageId], int]] = []  # text, pages, number of stripped pages
    for _ in range(60):
        action = rng.randrange(3)
        if action == 0:
            text = [rng.randint(0, 1) for _ in range(rng.randint(1, 8))]
            matched = cache.match(hashes_of(*text[:-1]))
            running.append((text[: len(matched)], matched, parts.first_needed(len(matched))))
        elif running and action == 1:
            text, pages, num_stripped = running.pop(rng.randrange(len(running)))
            text = [*text, rng.randint(0, 1)]
            hashes = hashes_of(*text)
            if not parts.num_available or not cache.pool.num_available:
                cache.pool.release(pages, pages[num_stripped:])
                continue
            pages += cache.pool.allocate(1)
            parts.attach(pages[-1:])
            for page_hash, page in list(zip(hashes, pages, strict=True))[max(0, len(text) - window) : -1]:
                assert content[int(parts.slot_of_P[page])] == page_hash
            content[int(parts.slot_of_P[pages[-1]])] = hashes[-1]
            cache.insert(hashes, pages, len(hashes) - 1)
            behind = max(num_stripped, parts.window.num_behind(len(text)))
            cache.pool.release((), pages[num_stripped:behind])
            running.append((text, pages, behind))
        elif running:
            _, pages, num_stripped = running.pop(rng.randrange(len(running)))
            cache.pool.release(pages, pages[num_stripped:])
        cache.check_integrity()
    for _, pages, num_stripped in running:
        cache.pool.release(pages, pages[num_stripped:])
    assert parts.num_held == 0
    assert cache.pool.num_available == num_pages
    with pytest.raises(OutOfPages):
        cache.pool.allocate(num_pages + 1)
