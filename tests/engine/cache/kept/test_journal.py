"""Tests that a journal counts only complete entries, wherever its owner was killed while writing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.cache.kept.journal import ENTRY_BYTES, POOL_ID_BYTES, JournalWriter, SealedPage, read_journal
from penstock.types import PageHash, PageId
from tests.support.suite.examples import examples

POOL_ID = bytes(range(POOL_ID_BYTES))
NUM_PAGES = 4
_HASHES = st.binary(min_size=16, max_size=16).filter(any).map(PageHash)
_ENTRIES = st.tuples(st.integers(0, NUM_PAGES - 1).map(PageId), _HASHES, st.none() | _HASHES, st.integers(0, 2**64 - 1))


def written(entries: list[tuple[PageId, PageHash, PageHash | None, int]]) -> bytearray:
    table = bytearray(NUM_PAGES * ENTRY_BYTES)
    writer = JournalWriter(memoryview(table), POOL_ID)
    for entry in entries:
        writer.seal(*entry)
    return table


@examples(100)
@given(st.lists(_ENTRIES, max_size=8))
def test_the_last_entry_of_each_page_is_read_back(
    entries: list[tuple[PageId, PageHash, PageHash | None, int]],
) -> None:
    last = {entry[0]: SealedPage(entry[0], number, *entry[1:]) for number, entry in enumerate(entries, 1)}
    assert {sealed.page: sealed for sealed in read_journal(bytes(written(entries)), POOL_ID)} == last


@examples(100)
@given(_ENTRIES, _ENTRIES, st.data())
def test_a_write_that_stops_anywhere_leaves_one_complete_entry_or_none(
    first: tuple[PageId, PageHash, PageHash | None, int],
    second: tuple[PageId, PageHash, PageHash | None, int],
    data: st.DataObject,
) -> None:
    second = (first[0], *second[1:])
    old, new = written([first]), written([first, second])
    start = first[0] * ENTRY_BYTES
    # Any subset of the bytes may have been written, since a killed process copies in no particular order.
    arrived = data.draw(st.lists(st.booleans(), min_size=ENTRY_BYTES, max_size=ENTRY_BYTES))
    torn = bytearray(old)
    for index, is_there in enumerate(arrived):
        if is_there:
            torn[start + index] = new[start + index]
    complete = {SealedPage(first[0], 1, *first[1:]), SealedPage(second[0], 2, *second[1:])}
    assert set(read_journal(bytes(torn), POOL_ID)) <= complete


@examples(100)
@given(_ENTRIES, st.integers(0, 55), st.integers(1, 255))
def test_a_changed_byte_removes_the_entry(
    entry: tuple[PageId, PageHash, PageHash | None, int], place: int, change: int
) -> None:
    table = written([entry])
    table[entry[0] * ENTRY_BYTES + place] ^= change
    assert not list(read_journal(bytes(table), POOL_ID))


def test_cleared_moved_and_foreign_entries_do_not_count() -> None:
    entry = (PageId(1), PageHash(b"h" * 16), None, 7)
    table = written([entry])
    moved = bytes(table[ENTRY_BYTES:]) + bytes(ENTRY_BYTES)
    assert not list(read_journal(moved, POOL_ID))
    assert not list(read_journal(bytes(table), bytes(POOL_ID_BYTES)))
    JournalWriter(memoryview(table), POOL_ID).clear(PageId(1))
    assert not list(read_journal(bytes(table), POOL_ID))
