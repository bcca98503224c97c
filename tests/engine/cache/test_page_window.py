"""Tests windows over pages: which pages lie behind them, and prefixes that only need their last window."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.page_pool import PagePool, PageState
from engine.cache.prefix_cache import PrefixCache
from engine.cache.tiers import CacheTiers
from engine.cache.windows.page_window import PageWindow
from penstock.kv.events import KvEventKind, KvEventLog
from penstock.kv.page_hash import hash_pages
from penstock.types import PageHash, PageId
from tests.support.engine.fake_engine import FakeHost

SALT = b"0123456789abcdef"
widths, sizes = st.integers(1, 40), st.integers(1, 9)


def read_pages(tokens: int, page_size: int, position: int) -> set[int]:
    """Returns the pages before `position` that tokens from there on read."""
    return {at // page_size for at in range(max(0, position - tokens + 1), position)}


@given(tokens=widths, size=sizes, position=st.integers(0, 200))
def test_pages_behind_the_window_are_those_that_no_later_token_reads(tokens: int, size: int, position: int) -> None:
    behind = PageWindow(tokens, size).num_behind(position)
    later = set().union(*(read_pages(tokens, size, at) for at in range(position, position + 3)))
    assert not later & set(range(behind))
    visible_from = max(0, position - tokens + 1)
    assert behind == visible_from // size, "no page that could go stays"
    assert PageWindow(None, size).num_behind(position) == 0


@given(tokens=widths, size=sizes, num_tokens=st.integers(1, 200), num_new=st.integers(1, 30))
def test_max_pages_bounds_what_a_sequence_holds(tokens: int, size: int, num_tokens: int, num_new: int) -> None:
    window = PageWindow(tokens, size)
    held = max(
        -(-min(num_tokens, start + num_new) // size) - window.num_behind(start) for start in range(0, num_tokens)
    )
    assert held <= window.max_pages(num_tokens, num_new) <= -(-num_tokens // size)
    assert PageWindow(None, size).max_pages(num_tokens, num_new) == -(-num_tokens // size)


@given(st.data(), widths, sizes)
def test_the_longest_prefix_equals_an_exhaustive_search(data: st.DataObject, tokens: int, size: int) -> None:
    held = data.draw(st.lists(st.booleans(), max_size=30))
    unneeded = data.draw(st.integers(0, 12))
    window = PageWindow(tokens, size)

    def suffices(length: int) -> bool:
        return all(held[index] for index in range(max(unneeded, window.num_behind(length * size)), length))

    best = max((length for length in range(len(held) + 1) if suffices(length)), default=0)
    assert window.longest_prefix(len(held), unneeded, held.__getitem__) == max(best, unneeded)


@given(tokens=widths, size=sizes, other=sizes, num_tokens=st.integers(1, 200))
def test_a_sender_keeps_every_page_that_a_receiver_with_other_pages_needs(
    tokens: int, size: int, other: int, num_tokens: int
) -> None:
    sent_from = PageWindow(tokens, other).num_unsent(num_tokens) * other
    sender = PageWindow(tokens, size)
    kept = sender if size == other else sender.wider(other)
    assert kept.num_behind(num_tokens - (size == other)) * size <= sent_from < num_tokens


def hashes_of(*tokens: int) -> list[PageHash]:
    """Returns the hashes of a chain of pages with one token each."""
    return hash_pages(tokens, 1, SALT)


def make(num_pages: int, window: int = 3) -> tuple[PagePool, PrefixCache, KvEventLog]:
    """Makes a cache in which a prefix needs the two pages before the next token."""
    events = KvEventLog()
    cache = PrefixCache(num_pages, 1, events, window=window)
    return cache.pool, cache, events


def test_a_prefix_is_found_without_the_pages_behind_the_window() -> None:
    pool, cache, _ = make(8)
    pages = pool.allocate(5)
    cache.insert(hashes_of(1, 2, 3, 4, 5), pages)
    pool.release(pages)
    assert cache.match(hashes_of(1, 2, 3, 4, 5)) == [PageId(0), PageId(0), PageId(0), *pages[3:]]
    assert cache.first_needed(5) == 3
    assert [pool.num_references(page) for page in pages] == [0, 0, 0, 1, 1]
    cache.check_integrity()


def test_eviction_goes_page_by_page_and_leaves_children_findable() -> None:
    pool, cache, events = make(5)
    pages = pool.allocate(5)
    hashes = hashes_of(1, 2, 3, 4, 5)
    cache.insert(hashes, pages)
    pool.release(pages[:3])  # these pages fall behind the window while the sequence runs
    assert pool.allocate(2)
    assert {pool.state(page) for page in pages[3:]} == {PageState.OWNED}
    pool.release(pages[3:])
    assert cache.num_cached == 3
    assert cache.peek(hashes) == cache.num_on_device(hashes) == 5
    found = cache.match(hashes)
    assert found[3:] == pages[3:]
    assert [event.kind for event in events.read(1).events] == [KvEventKind.STORED, KvEventKind.REMOVED]
    assert events.read(1).num_strays > 0, "readers look at every page, since parents are missing"
    cache.check_integrity()


def test_a_hole_in_the_window_leaves_the_longest_prefix_before_it() -> None:
    pool, cache, _ = make(6)
    pages = pool.allocate(6)
    hashes = hashes_of(1, 2, 3, 4, 5, 6)
    cache.insert(hashes, pages)
    pool.release([pages[4]])
    pool.allocate(1)  # evicts the fifth page
    assert cache.peek(hashes) == 4
    assert cache.match(hashes)[2:] == pages[2:4]
    cache.check_integrity()


def test_pages_join_the_cache_after_their_parents_have_left_it() -> None:
    pool, cache, _ = make(6)
    first = pool.allocate(2)
    hashes = hashes_of(1, 2, 3, 4)
    cache.insert(hashes[:2], first)
    later = pool.allocate(2)
    pool.release(first)
    pool.release(pool.allocate(4))  # evicts both
    entries = [PageId(0), PageId(0), *later]
    assert cache.insert(hashes, entries, start=2) == 2
    assert cache.peek(hashes) == 4
    assert cache.graft(hashes_of(9, 8)[1], hashes_of(9)[0], pool.allocate(1)[0]), "and so do another worker's"
    cache.check_integrity()


def test_the_hottest_pages_are_handed_over_with_their_window() -> None:
    pool, cache, _ = make(8)
    pages = pool.allocate(6)
    hashes = hashes_of(1, 2, 3, 4, 5, 6)
    cache.insert(hashes, pages)
    pool.release(pages[:5])
    handed = cache.hottest(2)
    assert [(page.page_hash, page.parent) for page in handed] == list(zip(hashes[4:], hashes[3:5], strict=True)), (
        "the page in use, and its parent"
    )


def test_without_a_window_an_orphan_violates_integrity() -> None:
    cache = PrefixCache(4, 1)
    pool = cache.pool
    pages = pool.allocate(2)
    cache.insert(hashes_of(1, 2), pages)
    cache._chains.detach(cache._chains.by_page[pages[0]])
    pool.forget([pages[0]])
    with pytest.raises(AssertionError, match="without its parent"):
        cache.check_integrity()


@pytest.mark.parametrize(("first", "second"), [(2, 2), (2, 5), (5, 2), (5, 5)])
def test_a_wider_window_finds_less(first: int, second: int) -> None:
    pool, cache, _ = make(8, window=first)
    pages = pool.allocate(6)
    hashes = hashes_of(1, 2, 3, 4, 5, 6)
    cache.insert(hashes, pages)
    pool.release([pages[3]])
    pool.release(pool.allocate(3))  # evicts the released page: two pages remain after the hole
    wide = PageWindow(second, 1)
    assert len(cache.match(hashes, window=wide)) == (6 if second == 2 else 3)


@pytest.mark.parametrize("num_evicted", range(7))
def test_peek_promises_no_more_than_lower_tiers_can_fill(num_evicted: int) -> None:
    """A window that is half on the device and half below it does not suffice."""
    host = CacheTiers(FakeHost([[None] for _ in range(7)], 8))
    cache = PrefixCache(7, 1, tiers=host, window=4)
    pool = cache.pool
    pages = pool.allocate(6)
    hashes = hashes_of(1, 2, 3, 4, 5, 6)
    cache.insert(hashes, pages)
    for page in pages:
        pool.release([page])
    pool.release(pool.allocate(1 + num_evicted))
    assert cache.num_cached == 6 - num_evicted
    promised = cache.peek(hashes)
    found = cache.match(hashes)
    num_dropped = cache.first_needed(len(found))
    num_matched = len(found)
    found += pool.allocate(6 - num_matched)
    assert cache.promote(hashes, found, num_matched) >= promised, "what the allocation evicts may come on top"
    pool.release(found[num_dropped:])
    cache.check_integrity()
