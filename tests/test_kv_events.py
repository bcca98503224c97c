"""The event log: a follower that reads in any rhythm holds the worker's cache exactly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.kv_events import KvEventBatch, KvEventKind, KvEventLog, decode_events, encode_events
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


def test_a_new_follower_starts_with_a_snapshot_and_one_within_the_window_does_not() -> None:
    log = KvEventLog(window=2)
    for number in range(4):
        log.stored([page(number)])
    assert log.read(0).snapshot
    assert log.read(1).snapshot  # fell out of the window
    assert [event.hashes for event in log.read(3).events] == [(page(2),), (page(3),)]
    assert log.read(99).snapshot  # of another incarnation


def test_nothing_is_no_event() -> None:
    log = KvEventLog()
    log.stored([])
    assert log.next_seq == 1
