"""Tests the prefix cache over its pool: matching, eviction order, events, and random histories of both."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from engine.cache.page_pool import OutOfPages, PageMisuse, PagePool, PageState
from engine.cache.prefix_cache import PrefixCache
from penstock.kv.events import KvEventKind, KvEventLog
from penstock.kv.page_hash import hash_pages
from penstock.types import PageHash, PageId
from tests.support.suite.examples import examples

SALT = b"0123456789abcdef"


def hashes_of(*tokens: int) -> list[PageHash]:
    """Returns the hashes of a chain of pages with one token each."""
    return hash_pages(tokens, 1, SALT)


def make(num_pages: int) -> tuple[PagePool, PrefixCache, KvEventLog]:
    events = KvEventLog()
    cache = PrefixCache(num_pages, 1, events)
    return cache.pool, cache, events


def cached_by_events(events: KvEventLog) -> set[PageHash]:
    """Returns the pages cached according to all events. None lacks its parent, so routers may bisect."""
    assert events.read(1).num_strays == 0
    cached: set[PageHash] = set()
    for event in events.read(1).events:
        if event.kind is KvEventKind.STORED:
            cached |= set(event.hashes)
        else:
            cached -= set(event.hashes)
    return cached


def test_match_returns_the_longest_cached_prefix_and_a_reference_on_each_page() -> None:
    pool, cache, _ = make(8)
    pages = pool.allocate(3)
    assert cache.insert(hashes_of(1, 2, 3), pages) == 3
    pool.release(pages)
    assert [pool.state(page) for page in pages] == [PageState.EVICTABLE] * 3
    assert cache.peek(hashes_of(1, 2, 9)) == 2
    assert cache.match(hashes_of(1, 2, 9)) == pages[:2]
    assert [pool.num_references(page) for page in pages] == [1, 1, 0]
    assert cache.match(hashes_of(2, 3)) == []
    cache.check_integrity()


def test_eviction_takes_the_least_recently_used_chain_leaf_first() -> None:
    pool, cache, events = make(6)
    old, new = pool.allocate(3), pool.allocate(3)
    cache.insert(hashes_of(1, 2, 3), old)
    cache.insert(hashes_of(4, 5, 6), new)
    pool.release(old)
    pool.release(new)
    assert pool.allocate(2) == [old[2], old[1]]
    assert events.read(1).events[-1].hashes == tuple(hashes_of(1, 2, 3)[:0:-1])
    touched = cache.match(hashes_of(1))
    pool.release(touched)
    assert pool.allocate(1) == [new[2]]  # the older chain's head has been used since
    cache.check_integrity()


def test_pulled_pages_wait_for_those_before_them() -> None:
    pool, cache, events = make(8)
    hashes = hashes_of(1, 2, 3, 4, 5)
    pulled = pool.allocate(3)
    assert not cache.graft(hashes[3], hashes[2], pulled[0]), "nobody awaits it"
    cache.await_pages(hashes[1:])
    for index, page in zip((3, 4, 2), pulled, strict=True):
        assert cache.graft(hashes[index], hashes[index - 1], page)
    pool.release(pulled)
    cache.check_integrity()
    assert (cache.peek(hashes), cache.num_present(hashes), cache.num_lacking(hashes)) == (0, 3, 2)
    assert cached_by_events(events) == set()
    pages = pool.allocate(6)  # evicts the first of them, and with it those that follow it
    assert cache.num_present(hashes) == 0
    cache.check_integrity()
    pool.release(pages)


def test_a_prompt_continues_with_pulled_pages_and_the_others_are_forgotten() -> None:
    pool, cache, events = make(8)
    hashes, other = hashes_of(1, 2, 3, 4), hashes_of(9, 8)
    pages = pool.allocate(4)
    cache.await_pages(hashes)
    cache.await_pages(other)
    pulled = pool.allocate(3)
    assert cache.graft(hashes[2], hashes[1], pulled[0])
    assert cache.graft(hashes[3], hashes[2], pulled[1])
    assert cache.graft(other[1], other[0], pulled[2])
    pool.release(pulled)
    assert cache.swap_in(hashes, pages, 0) == 0
    cache.insert(hashes[:2], pages)
    assert (cache.peek(hashes), cache.swap_in(hashes, pages, 2)) == (4, 2)
    assert pages[2:] == pulled[:2]
    for awaited in (hashes, other):
        cache.unawait(awaited)
    cache.check_integrity()
    assert (cache.num_cached, pool.state(pulled[2])) == (4, PageState.FREE)
    assert cached_by_events(events) == set(hashes)
    pool.release(pages)


def test_peek_does_not_change_the_order_of_eviction() -> None:
    pool, cache, _ = make(2)
    first, second = pool.allocate(1), pool.allocate(1)
    cache.insert(hashes_of(1), first)
    cache.insert(hashes_of(2), second)
    pool.release(first)
    pool.release(second)
    assert cache.peek(hashes_of(1)) == 1
    assert pool.allocate(1) == first


def test_the_first_page_with_a_hash_stays_and_its_owner_frees_the_duplicate() -> None:
    pool, cache, events = make(4)
    first, second = pool.allocate(2), pool.allocate(2)
    assert cache.insert(hashes_of(1, 2), first) == 2
    assert cache.insert(hashes_of(1, 2), second) == 0
    assert len(events.read(1).events) == 1
    pool.release(second)
    assert [pool.state(page) for page in second] == [PageState.FREE] * 2
    assert cache.match(hashes_of(1, 2)) == first
    cache.check_integrity()


def test_inserting_a_duplicate_counts_as_a_use_of_the_cached_page() -> None:
    pool, cache, _ = make(5)
    first, other = pool.allocate(2), pool.allocate(1)
    cache.insert(hashes_of(1, 2), first)
    cache.insert(hashes_of(3), other)
    pool.release(first)
    pool.release(other)
    duplicate = pool.allocate(2)
    cache.insert(hashes_of(1, 2), duplicate)
    assert pool.allocate(2) == [other[0], first[1]]
    cache.check_integrity()


def test_evicting_a_parent_uncaches_children_in_use_which_keep_their_holder() -> None:
    pool, cache, events = make(4)
    first, other = pool.allocate(1), pool.allocate(3)
    cache.insert(hashes_of(1), first)
    cache.insert(hashes_of(1, 2, 3), other)  # a child of the first writer's page
    pool.release(first)
    assert pool.num_available == 1
    assert pool.allocate(1) == first
    assert [pool.state(page) for page in other] == [PageState.OWNED] * 3
    assert cache.num_cached == 0
    assert events.read(1).events[-1].hashes == tuple(reversed(hashes_of(1, 2, 3)))
    cache.check_integrity()


def test_chains_released_root_first_are_still_evicted_leaf_first() -> None:
    pool, cache, events = make(3)
    pages = pool.allocate(3)
    cache.insert(hashes_of(1, 2, 3), pages)
    for page in pages:
        pool.release([page])
    assert pool.num_available == 3
    assert len(pool.allocate(3)) == 3
    assert events.read(1).events[-1].hashes == tuple(reversed(hashes_of(1, 2, 3)))
    cache.check_integrity()


def test_insert_from_a_start_restores_a_chain_whose_head_was_evicted() -> None:
    pool, cache, _ = make(4)
    first, other = pool.allocate(1), pool.allocate(3)
    cache.insert(hashes_of(1), first)
    cache.insert(hashes_of(1, 2), other)
    pool.release(first)
    pool.allocate(1)
    assert cache.num_cached == 0
    assert cache.insert(hashes_of(1, 2, 3), other, start=2) == 3
    assert cache.match(hashes_of(1, 2, 3)) == other
    cache.check_integrity()


def test_inserting_page_by_page_equals_inserting_at_once() -> None:
    pool, cache, _ = make(4)
    pages = pool.allocate(4)
    chain = hashes_of(1, 2, 3, 4)
    for end in range(1, 5):
        assert cache.insert(chain[:end], pages, start=end - 1) == 1
    assert cache.match(chain) == pages
    cache.check_integrity()


def test_last_pages_of_many_chains_become_one_event() -> None:
    pool, cache, events = make(9)
    chains = [hashes_of(1, 2), hashes_of(3), hashes_of(4, 5), hashes_of(4, 5)]
    pages = [pool.allocate(len(chain)) for chain in chains]
    cache.insert(chains[0][:1], pages[0])
    cache.insert(chains[3][:1], pages[3])
    before = events.read(1).next_seq
    cache.insert_last([(chain, mine, "") for chain, mine in zip(chains[:2], pages, strict=False)])
    assert [set(event.hashes) for event in events.read(before).events] == [{chains[0][1], chains[1][0]}]
    assert events.read(1).next_seq == before + 1
    # By now the third chain's parent is another sequence's page, and the fourth chain was computed twice.
    cache.insert_last([(chains[2], pages[2], ""), (chains[3], pages[3], "")])
    assert cache.match(chains[2]) == [pages[3][0], pages[2][1]]
    # A chain whose head is no longer cached is inserted again from its head.
    cache.clear()
    cache.insert_last([(chains[0], pages[0], ""), (chains[1], pages[1], "")])
    assert cached_by_events(events) == {*chains[0], *chains[1]}
    cache.check_integrity()


def test_insert_refuses_pages_that_must_not_be_cached() -> None:
    pool, cache, events = make(6)
    pages = pool.allocate(3)
    pool.fence(pages[1:2], "t")
    with pytest.raises(PageMisuse, match=f"page {pages[1]} is fenced"):
        cache.insert(hashes_of(1, 2), pages)
    pool.lift("t")
    cache.insert(hashes_of(1, 2), pages)
    with pytest.raises(PageMisuse, match=f"page {pages[0]} is cached under another hash"):
        cache.insert(hashes_of(7), pages)
    with pytest.raises(PageMisuse, match="fence"):
        pool.fence(pages[:1], "t")
    with pytest.raises(PageMisuse, match="is free"):
        cache.insert(hashes_of(8), [PageId(next(page for page in range(6) if page not in pages))])
    with pytest.raises(PageMisuse, match="2 hashes for 1 pages"):
        cache.insert(hashes_of(8, 9), pages[:1])
    with pytest.raises(PageMisuse, match="named twice"):
        cache.insert(hashes_of(8, 9), [pages[2], pages[2]])
    assert cached_by_events(events) == set(hashes_of(1, 2))
    cache.check_integrity()


def test_clear_forgets_everything_but_leaves_pages_in_use_to_their_holders() -> None:
    pool, cache, events = make(4)
    pages = pool.allocate(4)
    cache.insert(hashes_of(1, 2), pages)
    cache.insert(hashes_of(3, 4), pages[2:])
    pool.release(pages[2:])
    cache.clear()
    assert (cache.num_cached, pool.num_free) == (0, 2)
    assert cached_by_events(events) == set()
    cache.check_integrity()


def test_a_disabled_cache_finds_and_keeps_nothing() -> None:
    cache = PrefixCache(2, 1, None, enabled=False)
    pool = cache.pool
    pages = pool.allocate(2)
    assert cache.insert(hashes_of(1, 2), pages) == 0
    assert cache.match(hashes_of(1, 2)) == []
    pool.release(pages)
    assert pool.num_free == 2


NUM_PAGES = 12
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=5)  # few tokens, so that chains share prefixes and branch


class PoolHistory(RuleBasedStateMachine):
    """Runs sequences that hold pages, transfers that fence them and a cache, against a model of plain counts."""

    held = Bundle("held")  # (token ids, pages); each is released once
    pulls = Bundle("pulls")  # hashes of awaited pages
    fences = Bundle("fences")  # transfer keys

    def __init__(self) -> None:
        super().__init__()
        self.events = KvEventLog(window=100_000)
        self.cache = PrefixCache(NUM_PAGES, 1, self.events)
        self.pool = self.cache.pool
        self.refs = [0] * NUM_PAGES
        self.fenced: dict[int, list[PageId]] = {}
        self.next_key = 0

    def _fenced_pages(self) -> set[PageId]:
        return {page for pages in self.fenced.values() for page in pages}

    @rule(target=held, tokens=TOKENS)
    def start_sequence(self, tokens: list[int]) -> object:
        hashes = hash_pages(tokens, 1, SALT)
        matched = self.cache.match(hashes)
        assert len(matched) <= len(tokens)
        for page in matched:
            assert page not in self._fenced_pages()
            self.refs[page] += 1
        missing = len(tokens) - len(matched)
        before = self.pool.num_available
        try:
            fresh = self.pool.allocate(missing)
        except OutOfPages:
            assert missing > before == self.pool.num_available
            self.pool.release(matched)
            for page in matched:
                self.refs[page] -= 1
            return multiple()
        assert missing <= before
        for page in fresh:
            assert self.refs[page] == 0
            assert page not in self._fenced_pages()
            self.refs[page] = 1
        return (tokens, matched + fresh)

    @rule(sequence=held, data=st.data())
    def insert(self, sequence: tuple[list[int], list[PageId]], data: st.DataObject) -> None:
        tokens, pages = sequence
        hashes = hash_pages(tokens, 1, SALT)[: data.draw(st.integers(0, len(tokens)))]
        start = data.draw(st.integers(0, len(hashes)))
        before = self.cache.num_cached
        if any(page in self._fenced_pages() for page in pages[: len(hashes)]):
            try:
                stored = self.cache.insert(hashes, pages, start)
            except PageMisuse:
                assert self.cache.num_cached == before
                return
        else:
            stored = self.cache.insert(hashes, pages, start)
        assert self.cache.peek(hashes) == len(hashes)
        assert self.cache.num_cached == before + stored

    @rule(target=held, sequence=held)
    def share(self, sequence: tuple[list[int], list[PageId]]) -> object:
        self.pool.share(sequence[1])
        for page in sequence[1]:
            self.refs[page] += 1
        return sequence

    @rule(sequence=consumes(held), backwards=st.booleans())
    def release(self, sequence: tuple[list[int], list[PageId]], backwards: bool) -> None:
        pages = sequence[1]
        if backwards:
            self.pool.release(pages)
        else:  # page by page from the root, the worst order for the cache
            for page in pages:
                self.pool.release([page])
        for page in pages:
            self.refs[page] -= 1

    @rule(target=pulls, tokens=TOKENS, data=st.data())
    def pull(self, tokens: list[int], data: st.DataObject) -> list[PageHash]:
        """Awaits pages, and caches some that follow the first of them, the last ones first."""
        hashes = hash_pages(tokens, 1, SALT)
        self.cache.await_pages(hashes)
        stop = len(hashes)
        while stop and data.draw(st.booleans()):
            first = data.draw(st.integers(0, stop - 1))
            batch = [(hashes[index], hashes[index - 1] if index else None) for index in range(first, stop)]
            lacking = self.cache.lacking(batch)
            if len(lacking) > self.pool.num_available:
                break
            pages = self.pool.allocate(len(lacking))
            for index, page in zip(lacking, pages, strict=True):
                assert self.cache.graft(*batch[index], page)
            self.pool.release(pages)
            stop = first
        return hashes

    @rule(hashes=consumes(pulls))
    def end_pull(self, hashes: list[PageHash]) -> None:
        self.cache.unawait(hashes)

    @rule(sequence=held, data=st.data())
    def swap_in(self, sequence: tuple[list[int], list[PageId]], data: st.DataObject) -> None:
        """Computes some pages of a sequence, and takes those that follow them from the cache."""
        tokens, pages = sequence
        hashes = hash_pages(tokens, 1, SALT)
        first = data.draw(st.integers(0, len(tokens)))
        if not self._fenced_pages().isdisjoint(pages) or any(self.pool.is_cached(page) for page in pages[first:]):
            return
        if any(self.refs[page] > 1 for page in pages[first:]):
            return  # the model counts references, not who has them
        self.cache.insert(hashes[:first], pages)
        num_lacking, before = self.cache.num_lacking(hashes[first:]), list(pages)
        num_taken = self.cache.swap_in(hashes, pages, first)
        assert bool(num_taken) == (num_lacking == 0 and first < len(tokens))
        for old, new in zip(before, pages, strict=True):
            if old != new:
                self.refs[old] -= 1
                self.refs[new] += 1

    @rule(target=fences, sequence=held)
    def fence(self, sequence: tuple[list[int], list[PageId]]) -> object:
        pages = sequence[1]
        if any(self.pool.is_cached(page) for page in pages):
            with pytest.raises(PageMisuse):
                self.pool.fence(pages, -1)
            return multiple()
        self.next_key += 1
        self.pool.fence(pages, self.next_key)
        self.fenced[self.next_key] = list(pages)
        return self.next_key

    @rule(key=consumes(fences))
    def lift(self, key: int) -> None:
        self.pool.lift(key)
        del self.fenced[key]
        with pytest.raises(PageMisuse):
            self.pool.lift(key)

    @precondition(lambda self: any(count == 0 for count in self.refs))
    @rule(data=st.data())
    def release_an_unreferenced_page(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from([PageId(page) for page in range(NUM_PAGES) if self.refs[page] == 0]))
        with pytest.raises(PageMisuse):
            self.pool.release([page])

    @rule()
    def allocate_everything(self) -> None:
        """Allocates every available page."""
        fenced = self._fenced_pages()
        pages = self.pool.allocate(self.pool.num_available)
        assert all(self.refs[page] == 0 and page not in fenced for page in pages)
        assert self.pool.num_available == 0
        with pytest.raises(OutOfPages):
            self.pool.allocate(1)
        self.pool.release(pages)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        assert self.cache.num_cached == len(list(self.pool.evictable())) == 0

    @invariant()
    def check_counts(self) -> None:
        self.cache.check_integrity()
        fenced = self._fenced_pages()
        for page in map(PageId, range(NUM_PAGES)):
            assert self.pool.num_references(page) == self.refs[page]
            state = self.pool.state(page)
            if page in fenced:
                assert state is PageState.FENCED
            elif self.refs[page]:
                assert state is (PageState.OWNED if self.refs[page] == 1 else PageState.SHARED)
            else:
                assert state is (PageState.EVICTABLE if self.pool.is_cached(page) else PageState.FREE)
        rooted = {page_hash for page_hash, node in self.cache._chains.nodes.items() if node.is_rooted}
        assert cached_by_events(self.events) == rooted


PoolHistory.TestCase.settings = examples(50, stateful_step_count=40)
TestPoolHistory = PoolHistory.TestCase
