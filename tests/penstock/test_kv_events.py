"""Tests the event log: a follower that reads at any rate holds the worker's cache exactly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.events import (
    KvEvent,
    KvEventBatch,
    KvEventKind,
    KvEventLog,
    decode_events,
    encode_events,
    split_snapshot,
)
from penstock.kv.page_places import NUM_RANKS, ROOT, PagePlaces
from penstock.types import PageHash


def page(number: int) -> PageHash:
    return PageHash(number.to_bytes(16, "little"))


def apply(held: set[PageHash], batch: KvEventBatch) -> set[PageHash]:
    held = set() if batch.snapshot else held
    for event in decode_events(encode_events(batch.events)):
        held = held | set(event.hashes) if event.kind is KvEventKind.STORED else held - set(event.hashes)
    return held


@given(
    moves=st.lists(st.tuples(st.sampled_from(["store", "remove", "read"]), st.integers(0, 8)), max_size=60),
    window=st.integers(1, 8),
)
def test_a_follower_holds_the_cache(moves: list[tuple[str, int]], window: int) -> None:
    log, cached = KvEventLog(window), set[PageHash]()
    held, next_seq = set[PageHash](), 0
    for action, number in [*moves, ("read", 0)]:
        if action == "store":
            log.stored([page(number), page(number + 1)])
            cached |= {page(number), page(number + 1)}
        elif action == "remove":
            log.removed([page(number)])
            cached -= {page(number)}
        else:
            batch = log.read(next_seq)
            held, next_seq = apply(held, batch), batch.next_seq
            assert held == cached
            assert next_seq == log.next_seq


def test_a_new_follower_starts_with_a_snapshot_but_one_within_the_window_does_not() -> None:
    log = KvEventLog(window=2)
    for number in range(4):
        log.stored([page(number)])
    assert log.read(0).snapshot
    assert log.read(1).snapshot  # it fell out of the window
    batch = log.read(3)
    assert [event.hashes for event in batch.events] == [(page(2), page(3))]  # adjacent events of one kind are merged
    assert (batch.num_merged, batch.next_seq) == (1, 5)
    assert log.read(99).snapshot  # of another epoch


def test_an_empty_change_is_no_event() -> None:
    log = KvEventLog()
    log.stored([])
    log.removed([page(1)])
    assert log.next_seq == 1
    log.stored([page(1)])
    log.stored([page(1)])
    assert log.next_seq == 2


def test_a_move_between_tiers_is_an_event_and_a_snapshot_holds_tiers() -> None:
    log = KvEventLog()
    log.stored([page(1), page(2), page(3)], ROOT)
    log.moved([page(2), page(3)], KvEventKind.ON_HOST)
    log.moved([page(3)], KvEventKind.ON_DISK)
    assert [(event.kind.name, len(event.hashes)) for event in log.read(2).events] == [("ON_HOST", 2), ("ON_DISK", 1)]
    whole = log.read(0)
    assert whole.events == (
        KvEvent(KvEventKind.STORED, (page(1),)),
        KvEvent(KvEventKind.ON_HOST, (page(2),)),
        KvEvent(KvEventKind.ON_DISK, (page(3),)),
    )
    assert whole.num_strays == 0
    log.removed([page(2)])
    assert log.read(4).num_strays == 1
    log.stored([page(1), page(2)], ROOT)
    assert log.read(0).num_strays == 0


def test_a_page_without_a_known_parent_counts_as_a_stray() -> None:
    log = KvEventLog()
    log.stored([page(1), page(2)])
    assert log.read(0).num_strays == 1


@given(
    moves=st.lists(st.tuples(st.integers(0, 14), st.integers(0, NUM_RANKS)), max_size=60),
    unknown=st.sets(st.integers(0, 14), max_size=3),
)
def test_counted_strays_equal_those_found_by_scanning_every_page(
    moves: list[tuple[int, int]], unknown: set[int]
) -> None:
    """Pages 0 to 14 form a binary tree: the children of page n are 2n + 1 and 2n + 2."""
    places, ranks = PagePlaces(), dict[int, int]()

    def parent(number: int) -> PageHash | None:
        if number in unknown:
            return None
        return page((number - 1) // 2) if number else ROOT

    for number, rank in moves:
        changed = places.put(page(number), rank, parent(number))
        assert changed == (ranks.get(number, NUM_RANKS) != rank)
        ranks[number] = rank
        places.check_integrity()
        strays = 0
        for child, below in ranks.items():
            above = 0 if child == 0 else ranks.get((child - 1) // 2, NUM_RANKS)
            strays += below < (NUM_RANKS if child in unknown else above)
        assert places.num_strays == strays
    held = {number for number, rank in ranks.items() if rank < NUM_RANKS}
    assert {page for pages in places.by_rank() for page in pages} == {page(number) for number in held}


@given(pages=st.lists(st.integers(0, 30), unique=True), at_once=st.integers(1, 9))
def test_the_parts_of_a_snapshot_add_up_to_it(pages: list[int], at_once: int) -> None:
    log = KvEventLog()
    log.stored([page(number) for number in pages])
    log.moved([page(number) for number in pages[::3]], KvEventKind.ON_HOST)
    whole = log.read(0)
    parts = list(split_snapshot(whole, at_once))
    assert [part.part for part in parts] == list(range(len(parts)))
    assert [part.more for part in parts] == [True] * (len(parts) - 1) + [False]
    assert all(len(event.hashes) <= at_once for part in parts for event in part.events)
    received = [(event.kind, hash_) for part in parts for event in part.events for hash_ in event.hashes]
    assert received == [(event.kind, hash_) for event in whole.events for hash_ in event.hashes]
