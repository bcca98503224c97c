"""Tests the order of eviction: exactly least recently used without hints, and each page once after any history."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.retention.eviction_order import EvictionKey, EvictionOrder, Rank
from engine.cache.retention.page_retention import PageRetention
from penstock.config.retention import RetentionConfig
from penstock.types import PageId

NUM_PAGES = 12
_PAGES = st.lists(st.integers(0, NUM_PAGES - 1), unique=True, min_size=1, max_size=5)
_HISTORY = st.lists(st.tuples(st.sampled_from(["release", "use", "evict"]), _PAGES), max_size=80)


@given(_HISTORY)
@settings(max_examples=200, deadline=None)
def test_without_hints_the_least_recently_used_page_is_evicted_first(history: list[tuple[str, list[int]]]) -> None:
    retention = PageRetention(NUM_PAGES)
    expected: OrderedDict[int, None] = OrderedDict()
    for now, (operation, numbers) in enumerate(history):
        if operation == "release":
            for number in numbers:
                expected.pop(number, None)
                expected[number] = None
            retention.on_evictable([PageId(number) for number in numbers], float(now))
        elif operation == "use":
            for number in numbers:
                if number in expected:
                    del expected[number]
                    retention.order.remove(PageId(number))
        else:
            taken = [page for _, page in zip(numbers, retention.to_evict(float(now)), strict=False)]
            assert taken == [expected.popitem(last=False)[0] for _ in taken]
            for page in taken:
                retention.order.remove(page)
        assert list(retention.order) == list(expected)
        assert len(retention.order) == len(expected)


def test_entries_of_pages_in_constant_use_are_bounded() -> None:
    order = EvictionOrder(4)
    for number in range(50_000):
        order.add([PageId(0), PageId(1)], "a", EvictionKey(Rank.CACHED, float(number)))
    assert order._num_entries <= 2 * 4 + 1024
    assert list(order) == [0, 1]


_OWNED = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(list(Rank)), st.floats(0, 9), st.integers(1, 3)), max_size=12
)


@given(_OWNED, st.dictionaries(st.sampled_from("abc"), st.integers(1, 4)))
@settings(max_examples=200, deadline=None)
def test_pages_of_owners_beyond_their_shares_are_evicted_first_and_all_others_by_key(
    groups: list[tuple[str, Rank, float, int]], excess: dict[str, int]
) -> None:
    order, number = EvictionOrder(64), 0
    owner_of: dict[PageId, str] = {}
    key_of: dict[PageId, EvictionKey] = {}
    for owner, rank, value, count in groups:
        pages = [PageId(number + index) for index in range(count)]
        number += count
        order.add(pages, owner, EvictionKey(rank, value))
        owner_of |= dict.fromkeys(pages, owner)
        key_of |= dict.fromkeys(pages, EvictionKey(rank, value))
    taken = list(order.take(excess))
    assert sorted(taken) == sorted(owner_of)
    in_excess = {owner: min(count, sum(o == owner for o in owner_of.values())) for owner, count in excess.items()}
    num_first = sum(in_excess.values())
    first, rest = taken[:num_first], taken[num_first:]
    assert {owner: sum(owner_of[page] == owner for page in first) for owner in in_excess} == in_excess
    assert [key_of[page] for page in rest] == sorted(key_of[page] for page in rest)


def test_owners_have_orders_of_their_own_only_if_shares_can_bind() -> None:
    for share, num_owners in ((1.0, 1), (0.5, 3)):
        retention = PageRetention(6, RetentionConfig(cached_share=share))
        for number, owner in enumerate("abcabc"):
            retention.on_cached([PageId(number)], owner)
            retention.on_evictable([PageId(number)], float(number))
        assert len(retention.order._owners) == num_owners
        assert list(retention.to_evict(9.0)) == list(range(6))
