"""Tests the page pool alone: references, fences, and misuse, which must change nothing."""

from __future__ import annotations

import pytest

from engine.cache.page_pool import OutOfPages, PageMisuse, PagePool, PageState
from penstock.types import PageId


def test_allocate_is_all_or_nothing() -> None:
    pool = PagePool(4)
    held = pool.allocate(3)
    assert len(set(held)) == 3
    with pytest.raises(OutOfPages, match="2 pages asked for, 1 available"):
        pool.allocate(2)
    assert pool.num_free == pool.num_available == 1
    assert pool.allocate(0) == []
    pool.check_integrity()


def test_a_shared_page_is_free_only_after_its_last_release() -> None:
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.share([page])
    assert pool.state(page) is PageState.SHARED
    pool.release([page])
    assert pool.state(page) is PageState.OWNED
    pool.release([page])
    assert pool.state(page) is PageState.FREE
    pool.check_integrity()


def test_a_fenced_page_is_not_reused_until_every_fence_is_lifted() -> None:
    pool = PagePool(3)
    pages = pool.allocate(3)
    pool.fence(pages[:2], "first")
    pool.fence(pages[1:], "second")
    pool.release(pages)
    assert (pool.num_available, pool.num_fenced) == (0, 3)
    with pytest.raises(OutOfPages):
        pool.allocate(1)
    pool.lift("first")
    assert pool.allocate(1) == [pages[0]]
    assert pool.state(pages[1]) is PageState.FENCED
    pool.check_integrity()
    pool.lift("second")
    assert sorted(pool.allocate(2)) == sorted(pages[1:])
    pool.check_integrity()


def test_lifting_a_fence_leaves_a_held_page_with_its_owner() -> None:
    pool = PagePool(1)
    pages = pool.allocate(1)
    pool.fence(pages, "t")
    assert pool.is_fencing("t")
    pool.lift("t")
    assert not pool.is_fencing("t")
    assert pool.state(pages[0]) is PageState.OWNED
    pool.release(pages)
    assert pool.num_free == 1


def test_a_transfer_can_start_without_pages_and_fence_more_later() -> None:
    pool = PagePool(2)
    pool.fence([], "t")
    pages = pool.allocate(2)
    pool.fence(pages[:1], "t")
    pool.fence(pages[1:], "t")
    pool.release(pages)
    pool.check_integrity()
    pool.lift("t")
    assert pool.num_free == 2


def test_misuse_is_refused_and_changes_nothing() -> None:
    pool = PagePool(4)
    held = pool.allocate(2)
    free = next(PageId(page) for page in range(4) if page not in held)
    pool.fence(held[:1], "t")
    for call, message in (
        (lambda: pool.release([held[0], free]), f"release: page {free} is free"),
        (lambda: pool.release([held[1], held[1]]), "named twice"),
        (lambda: pool.share([held[0], free]), f"share: page {free} is free"),
        (lambda: pool.fence([free], "t"), f"fence: page {free} is free"),
        (lambda: pool.fence([held[0]], "t"), f"page {held[0]} is already fenced by t"),
        (lambda: pool.lift("other"), "no fence of other"),
        (lambda: pool.keep(held[:1]), f"keep: page {held[0]} is fenced"),
        (lambda: pool.forget([held[1]]), "not cached"),
        (lambda: pool.release([PageId(9)]), "outside the pool of 4"),
        (lambda: pool.release([PageId(-1)]), "outside the pool of 4"),
        (lambda: pool.allocate(-1), "-1 pages"),
    ):
        with pytest.raises(PageMisuse, match=message):
            call()
        pool.check_integrity()
        assert (pool.num_free, pool.num_fenced) == (2, 1)
        assert [pool.num_references(page) for page in held] == [1, 1]


def test_an_evictor_that_frees_too_little_is_an_error_and_no_page_is_allocated() -> None:
    pools = [PagePool(2), PagePool(2, evict=lambda count: pools[1].forget(range(count - 1)))]
    for pool in pools:
        pages = pool.allocate(2)
        pool.keep(pages)
        pool.release(pages)
    with pytest.raises(PageMisuse, match="cached pages without an evictor"):
        pools[0].allocate(1)
    with pytest.raises(PageMisuse, match="1 pages are free after an eviction, 2 asked for"):
        pools[1].allocate(2)
    pools[1].check_integrity()


def test_a_fences_age_counts_from_its_first_pages_and_the_oldest_is_reported() -> None:
    now_s = [0.0]
    pool = PagePool(4, clock=lambda: now_s[0])
    pages = pool.allocate(4)
    assert pool.oldest_fence_s is None
    for moment_s, page, key in ((1.0, 0, "a"), (2.0, 1, "b"), (3.0, 2, "a")):
        now_s[0] = moment_s
        pool.fence([pages[page]], key)
        assert pool.oldest_fence_s == 1.0
    pool.lift("a")
    assert pool.oldest_fence_s == 2.0
    pool.lift("b")
    assert pool.oldest_fence_s is None


def test_check_integrity_reports_a_lost_page() -> None:
    pool = PagePool(3)
    pages = pool.allocate(2)
    pool._refs[pages[1]] = 0  # the page is lost: neither free nor held
    with pytest.raises(AssertionError, match=f"page {pages[1]}: 0 references"):
        pool.check_integrity()


def test_a_pool_needs_at_least_one_page() -> None:
    with pytest.raises(ValueError, match="num_pages: 0"):
        PagePool(0)
