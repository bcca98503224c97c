"""Compares the prefix index with a twin that looks at every page: holes, tiers, gaps, eviction, leaving, noted
pages."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.config import IndexConfig
from penstock.kv.events import (
    KvEvent,
    KvEventBatch,
    KvEventKind,
    KvEventLog,
    decode_events,
    encode_events,
    split_snapshot,
)
from penstock.kv.page_hash import hash_pages
from penstock.kv.page_places import ROOT
from penstock.types import PageHash, WorkerId
from router.routing.index.page_masks import Losses, bisect_masks, scan_masks
from router.routing.index.prefix_index import PrefixIndex
from router.routing.index.prefix_match import PrefixMatch
from tests.support.suite.examples import examples

WORKERS = [WorkerId(name) for name in ("a", "b", "c")]
PAGES = hash_pages(range(24), 1, b"salt")
DEVICE, HOST, DISK, GONE = KvEventKind.STORED, KvEventKind.ON_HOST, KvEventKind.ON_DISK, KvEventKind.REMOVED
Places = dict[PageHash, KvEventKind]


def event(kind: KvEventKind, *numbers: int) -> KvEvent:
    return KvEvent(kind, tuple(PAGES[number] for number in numbers))


def index_of(*workers: Sequence[KvEvent], **settings: object) -> PrefixIndex:
    index = PrefixIndex(IndexConfig.model_validate(settings))
    for worker, events in zip(WORKERS, workers, strict=False):
        assert index.apply(worker, KvEventBatch(1, tuple(events)))
    return index


def twin_match(held: dict[WorkerId, Places], prompt: Sequence[PageHash]) -> dict[WorkerId, PrefixMatch]:
    """Matches page by page, as an engine does."""
    found: dict[WorkerId, PrefixMatch] = {}
    for worker, places in held.items():
        kinds = [places.get(page, GONE) for page in prompt]
        ends = [
            next((at for at, kind in enumerate(kinds) if kind not in wanted), len(kinds))
            for wanted in ({DEVICE, HOST, DISK}, {DEVICE, HOST}, {DEVICE})
        ]
        if ends[0]:
            found[worker] = PrefixMatch(ends[0], ends[2], ends[1] - ends[2])
    return found


def test_a_hole_ends_the_prefix() -> None:
    index = index_of([event(DEVICE, 0, 1, 2, 3), event(GONE, 1)])
    assert index.match(PAGES[:4]) == {"a": PrefixMatch(1, 1)}


def test_each_worker_has_its_own_depth() -> None:
    index = index_of([event(DEVICE, 0, 1, 2)], [event(DEVICE, 0)], [event(DEVICE, 1, 2)])
    assert index.match(PAGES[:5]) == {"a": PrefixMatch(3, 3), "b": PrefixMatch(1, 1)}
    assert index.match([]) == {}


def test_pages_are_counted_by_tier() -> None:
    index = index_of([event(DEVICE, 0, 1, 2, 3, 4), event(HOST, 2), event(DISK, 3, 4)], [event(DISK, 0)])
    matched = index.match(PAGES)
    assert matched == {"a": PrefixMatch(5, 2, 1), "b": PrefixMatch(1, 0)}
    assert index.pages_by_tier(WORKERS[0]) == (2, 1, 2)
    index.apply(WORKERS[0], KvEventBatch(4, (event(DEVICE, 2, 3), event(GONE, 4))))
    assert index.match(PAGES)[WORKERS[0]] == PrefixMatch(4, 4)
    index.check_integrity()


def test_a_gap_is_refused_and_a_snapshot_repairs_it() -> None:
    index = index_of([event(DEVICE, 0)])
    assert not index.apply(WORKERS[0], KvEventBatch(4, (event(DEVICE, 1),)))
    assert not index.apply(WORKERS[0], KvEventBatch(4, (event(DEVICE, 1),)))
    assert index.next_seq(WORKERS[0]) == 2
    assert index.match(PAGES[:2]) == {"a": PrefixMatch(1, 1)}
    assert index.apply(WORKERS[0], KvEventBatch(5, (event(DEVICE, 3),), snapshot=True))
    assert index.match(PAGES[:2]) == {}
    assert index.next_seq(WORKERS[0]) == 5
    assert index.apply(WORKERS[0], KvEventBatch(5, (event(DEVICE, 0),)))
    assert index.match(PAGES[:1]) == {"a": PrefixMatch(1, 1)}
    assert (index.stats.gaps, index.stats.replays, index.stats.snapshots) == (1, 0, 1)


def test_a_gap_that_the_workers_window_covers_is_a_replay() -> None:
    index = index_of([event(DEVICE, 0)])
    assert not index.apply(WORKERS[0], KvEventBatch(3, (event(DEVICE, 2),)))
    assert index.apply(WORKERS[0], KvEventBatch(2, (event(DEVICE, 1), event(DEVICE, 2))))
    assert index.match(PAGES)[WORKERS[0]].num_pages == 3
    assert (index.stats.gaps, index.stats.replays, index.stats.snapshots) == (1, 1, 0)


def test_a_batch_that_overlaps_known_events_is_applied_whole() -> None:
    log = KvEventLog()
    for number in range(6):
        log.stored(PAGES[number : number + 1], PAGES[number - 1] if number else ROOT)
        if number == 2:
            index = PrefixIndex()
            assert index.apply(WORKERS[0], log.read(1))
    again = log.read(2)
    assert (len(again.events), again.num_merged) == (1, 4)
    assert index.apply(WORKERS[0], _wired(again))
    assert index.match(PAGES) == {"a": PrefixMatch(6, 6)}
    assert index.next_seq(WORKERS[0]) == 7


def test_a_snapshot_in_parts_counts_once_it_is_complete() -> None:
    index = index_of([event(DEVICE, 0)])
    log = KvEventLog()
    log.stored(PAGES[:7], ROOT)
    log.moved(PAGES[5:7], HOST)
    first, second, third, *rest = split_snapshot(log.read(0), max_pages=3)
    assert [batch.more for batch in (first, second, third)] == [True, True, False]
    assert not rest
    assert index.apply(WORKERS[0], first)
    assert not index.apply(WORKERS[0], third)  # the second part is missing
    assert index.apply(WORKERS[0], second)
    assert index.match(PAGES) == {"a": PrefixMatch(1, 1)}
    assert index.apply(WORKERS[0], third)
    assert index.match(PAGES) == {"a": PrefixMatch(7, 5, 2)}
    assert index.next_seq(WORKERS[0]) == log.next_seq
    while index.tidy():
        pass
    index.check_integrity()


def test_a_leaving_worker_is_unmatched_at_once_and_forgotten_in_pieces() -> None:
    pages = hash_pages(range(10_000), 1, b"salt")
    index = PrefixIndex()
    for worker in WORKERS[:2]:
        index.apply(worker, KvEventBatch(1, (KvEvent(DEVICE, tuple(pages)),)))
    index.drop(WORKERS[1])
    assert index.match(pages) == {"a": PrefixMatch(10_000, 10_000)}
    assert not index.pages_of(WORKERS[1])
    index.apply(WORKERS[1], KvEventBatch(1, (KvEvent(DEVICE, tuple(pages[:5])),)))  # it returns before all is forgotten
    assert index.match(pages)["b"] == PrefixMatch(5, 5)
    index.check_integrity()
    index.drop(WORKERS[0])
    num_calls = 0
    while index.tidy(max_pages=1000):
        num_calls += 1
        index.check_integrity()
    assert num_calls >= 10
    assert index.num_pages == 5
    index.check_integrity()


@given(
    depths=st.lists(st.tuples(st.integers(0, 24), st.integers(0, 24), st.integers(0, 24)), min_size=1, max_size=12),
    length=st.integers(1, 24),
)
@examples(100)
def test_bisection_agrees_with_scanning_every_page(depths: list[tuple[int, int, int]], length: int) -> None:
    """Covers masks without strays: on each tier, a worker holds a contiguous run of leading pages."""
    masks: dict[PageHash, int] = {}
    for slot, ends in enumerate(depths):
        for bit, end in enumerate(sorted(ends, reverse=True)):
            for page in PAGES[:end]:
                masks[page] = masks.get(page, 0) | 1 << (3 * slot + bit)
    alive = masks.get(PAGES[0], 0)
    found: list[dict[int, int]] = []
    for search in ("bisect", "scan"):
        losses: Losses = []
        if alive and search == "bisect":
            bisect_masks(masks.get, PAGES[:length], alive, losses)
        elif alive:
            scan_masks(masks.get, PAGES[:length], 0, alive, losses)
        found.append({bit: depth for bits, depth in losses for bit in range(bits.bit_length()) if bits >> bit & 1})
        assert sum(bits for bits, _ in losses) == alive
    assert found[0] == found[1]


class _Worker:
    """Holds a cache with its log, and the batches in flight to the index."""

    def __init__(self) -> None:
        self.log = KvEventLog(window=4)
        self.places: Places = {}
        self.delayed: list[KvEventBatch] = []

    def move(self, pages: Sequence[PageHash], kind: KvEventKind) -> None:
        pages = [page for page in pages if page in self.places]
        self.log.moved(pages, kind)
        for page in pages:
            if kind is GONE:
                del self.places[page]
            else:
                self.places[page] = kind


def _wired(batch: KvEventBatch) -> KvEventBatch:
    events = decode_events(encode_events(batch.events))
    return KvEventBatch(
        batch.first_seq, events, batch.snapshot, batch.num_merged, batch.part, batch.more, batch.num_strays
    )


# A small tree of prompts: all chains over two tokens.
_PROMPTS = [hash_pages([(number >> depth) & 1 for depth in range(5)], 1, b"salt") for number in range(32)]


class IndexHistory(RuleBasedStateMachine):
    """Delivers events with losses, repeats, delays and restarts; in the end the index equals the caches."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.workers = {worker: _Worker() for worker in WORKERS}

    @rule(worker=st.sampled_from(WORKERS), prompt=st.sampled_from(_PROMPTS), length=st.integers(1, 5))
    def store(self, worker: WorkerId, prompt: list[PageHash], length: int) -> None:
        cache = self.workers[worker]
        cache.log.stored(prompt[:length], ROOT)
        cache.places |= dict.fromkeys(prompt[:length], DEVICE)

    @rule(
        worker=st.sampled_from(WORKERS),
        prompt=st.sampled_from(_PROMPTS),
        first=st.integers(0, 4),
        kind=st.sampled_from([DEVICE, HOST, DISK, GONE]),
    )
    def move(self, worker: WorkerId, prompt: list[PageHash], first: int, kind: KvEventKind) -> None:
        """Moves the tail of one chain, whatever extends its middle, which makes holes and strays of every kind."""
        self.workers[worker].move(prompt[first:], kind)

    @rule(worker=st.sampled_from(WORKERS), prompt=st.sampled_from(_PROMPTS), at=st.integers(0, 4))
    def remove_one(self, worker: WorkerId, prompt: list[PageHash], at: int) -> None:
        self.workers[worker].move([prompt[at]], GONE)

    @rule(worker=st.sampled_from(WORKERS), max_pages=st.integers(1, 4), num_lost=st.integers(0, 2))
    def read(self, worker: WorkerId, max_pages: int, num_lost: int) -> None:
        batch = self.workers[worker].log.read(self.index.next_seq(worker))
        for part in list(split_snapshot(batch, max_pages))[num_lost:]:
            self.index.apply(worker, _wired(part))

    @rule(worker=st.sampled_from(WORKERS), back=st.integers(0, 4))
    def delay(self, worker: WorkerId, back: int) -> None:
        cache = self.workers[worker]
        cache.delayed.append(cache.log.read(max(1, self.index.next_seq(worker) - back)))

    @rule(worker=st.sampled_from(WORKERS), twice=st.booleans())
    def deliver_late(self, worker: WorkerId, twice: bool) -> None:
        cache = self.workers[worker]
        if cache.delayed:
            batch = cache.delayed[-1] if twice else cache.delayed.pop()
            self.index.apply(worker, _wired(batch))

    @rule(worker=st.sampled_from(WORKERS))
    def restart(self, worker: WorkerId) -> None:
        self.workers[worker] = _Worker()
        self.index.drop(worker)

    @rule(max_pages=st.integers(1, 5))
    def tidy(self, max_pages: int) -> None:
        self.index.tidy(max_pages=max_pages)

    @invariant()
    def check_integrity(self) -> None:
        self.index.check_integrity()

    @rule()
    def converge(self) -> None:
        for worker, cache in self.workers.items():
            batch = cache.log.read(self.index.next_seq(worker))
            assert self.index.apply(worker, _wired(batch))
            assert self.index.next_seq(worker) == cache.log.next_seq
        held = {worker: cache.places for worker, cache in self.workers.items()}
        for prompt in _PROMPTS:
            assert self.index.match(prompt) == twin_match(held, prompt)

    def teardown(self) -> None:
        self.converge()


TestIndexHistory = IndexHistory.TestCase
TestIndexHistory.settings = examples(40, stateful_step_count=40)


def test_events_without_a_stray_count_are_scanned_page_by_page() -> None:
    index = index_of([event(DEVICE, *range(20)), event(GONE, 3)])
    assert index.match(PAGES) == {"a": PrefixMatch(3, 3)}


def test_memory_is_bounded_in_all_and_the_largest_worker_loses_leaves_first() -> None:
    other = hash_pages(range(100, 103), 1, b"salt")
    index = index_of([event(DEVICE, *range(10))], [KvEvent(DEVICE, tuple(other))], max_pages=9)
    assert index.match(PAGES) == {"a": PrefixMatch(6, 6)}
    assert index.match(other) == {"b": PrefixMatch(3, 3)}
    assert index.stats.evicted_pages == 4
    index.check_integrity()


def test_new_and_recently_looked_up_pages_outlive_the_rest() -> None:
    cold, hot, new = (hash_pages(range(first, first + 8), 1, b"salt") for first in (100, 200, 300))
    index = index_of([KvEvent(DEVICE, tuple(cold)), KvEvent(DEVICE, tuple(hot))], max_pages=19)
    assert index.match(hot)[WORKERS[0]].num_pages == 8  # looked up
    index.apply(WORKERS[0], KvEventBatch(3, (KvEvent(DEVICE, tuple(new[:5])),), num_strays=0))
    depths = [index.match(prompt)[WORKERS[0]].num_pages for prompt in (cold, hot, new)]
    assert depths == [6, 8, 5]
    assert index.pages_of(WORKERS[0]) == 19
    index.check_integrity()


@given(data=st.data())
@examples(50)
def test_a_thinned_index_claims_no_page_that_the_worker_lacks(data: st.DataObject) -> None:
    index = PrefixIndex(IndexConfig(max_pages=data.draw(st.integers(1, 12))))
    workers = {worker: _Worker() for worker in WORKERS[:2]}
    for _ in range(data.draw(st.integers(1, 30))):
        worker = data.draw(st.sampled_from(WORKERS[:2]))
        cache, prompt = workers[worker], data.draw(st.sampled_from(_PROMPTS))
        if data.draw(st.booleans()):
            cache.log.stored(prompt, ROOT)
            cache.places |= dict.fromkeys(prompt, DEVICE)
        else:
            cache.move(prompt[data.draw(st.integers(0, 4)) :], data.draw(st.sampled_from([HOST, GONE])))
        index.apply(worker, _wired(cache.log.read(index.next_seq(worker))))
        index.check_integrity()
        assert sum(index.pages_of(name) for name in WORKERS) <= index._max_pages
        known = {page: mask for page, mask in index._masks.masks.items() if mask}
        for prompt in _PROMPTS:
            truth = twin_match({worker: cache.places for worker, cache in workers.items()}, prompt)
            for name, matched in index.match(prompt).items():
                assert matched.num_pages <= truth[name].num_pages
                assert all(page in known for page in prompt[: matched.num_pages])


def test_pages_sent_to_a_worker_without_events_count_as_cached_for_a_while() -> None:
    index = PrefixIndex(IndexConfig(approximate_ttl_s=80.0))
    index.note(WORKERS[0], PAGES[:6], now_s=1000.0)
    index.note(WORKERS[0], PAGES[:3], now_s=1050.0)
    assert index.match(PAGES) == {"a": PrefixMatch(6, 6)}
    index.tidy(now_s=1079.0)
    assert index.match(PAGES) == {"a": PrefixMatch(6, 6)}
    index.tidy(now_s=1091.0)
    assert index.match(PAGES) == {"a": PrefixMatch(3, 3)}
    index.check_integrity()
    index.tidy(now_s=1141.0)
    assert index.match(PAGES) == {}
    assert index.num_pages == 0
    index.note(WORKERS[0], PAGES[:2], now_s=1200.0)
    assert index.match(PAGES) == {"a": PrefixMatch(2, 2)}
    index.check_integrity()


@given(
    notes=st.lists(st.tuples(st.integers(0, 30), st.sampled_from(_PROMPTS), st.integers(1, 5)), max_size=30),
    max_pages=st.integers(1, 50),
)
@examples(50)
def test_noted_pages_expire_by_age_and_leave_no_hole(
    notes: list[tuple[int, list[PageHash], int]], max_pages: int
) -> None:
    index, now_s = PrefixIndex(IndexConfig(approximate_ttl_s=80.0)), 0.0
    last: dict[PageHash, float] = {}
    for after_s, prompt, length in notes:
        now_s += after_s
        while index.tidy(now_s=now_s, max_pages=max_pages):
            index.check_integrity()
        index.note(WORKERS[0], prompt[:length], now_s)
        last |= dict.fromkeys(prompt[:length], now_s)
        for prompt in _PROMPTS:
            depth = index.match(prompt).get(WORKERS[0], PrefixMatch(0, 0)).num_pages
            ages = [now_s - last.get(page, -1e9) for page in prompt]
            assert all(age < 80 * 9 / 8 for age in ages[:depth])
            assert depth == 5 or ages[depth] >= 80 or ages[depth] > 1e6


def test_the_index_estimates_its_memory() -> None:
    empty = PrefixIndex().num_bytes
    pages = hash_pages(range(5000), 1, b"salt")
    index = index_of([KvEvent(DEVICE, tuple(pages))])
    assert 100 < (index.num_bytes - empty) / 5000 < 400


@pytest.mark.parametrize(
    "payload", [b"\x01", b"\x91\x92\x01\xc4\x03abc", b"\x91\x92\x09\xc4\x00", b"\x91\xc0", b"\xc1"]
)
def test_a_malformed_payload_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError):
        decode_events(payload)
