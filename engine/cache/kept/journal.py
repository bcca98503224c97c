"""Keeps the journal of a page pool: the hash, the parent's hash and a checksum of each page that the prefix cache
holds.

The journal is a table in shared memory with one entry for each page of the pool, so it never grows and its owner writes
it without a system call. Another process reads it once the owner is dead, at whatever point the owner died: an entry
ends with a digest of its fields, its place and the pool's random id. So an entry that is half written, half
overwritten, of another pool or in another place does not count. An entry is cleared before its page can be written
again.

Entry, little-endian: number (8 bytes, rises with each entry, never 0), page hash (16), hash of the parent page (16,
zeros for the first page of a text), checksum of the page's bytes (8), digest (8), unused (8).
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterator
from typing import NamedTuple

import xxhash

from penstock.types import PageHash, PageId

ENTRY_BYTES = 64
POOL_ID_BYTES = 16
_FIELDS = struct.Struct("<Q16s16sQ")
_DIGEST = struct.Struct("<Q")
_SLOT = struct.Struct("<Q")
_NO_PARENT = bytes(16)
_EMPTY = bytes(ENTRY_BYTES)


class SealedPage(NamedTuple):
    """An entry: a page that was in its owner's prefix cache."""

    page: PageId
    number: int  # the order in which pages were sealed
    page_hash: PageHash
    parent: PageHash | None
    checksum: int


def new_pool_id() -> bytes:
    return secrets.token_bytes(POOL_ID_BYTES)


class JournalWriter:
    """Writes the table of one pool. Not thread-safe: the step loop owns it."""

    def __init__(self, table: memoryview, pool_id: bytes) -> None:
        """`table` is writable and zero, and has one entry for each page of the pool."""
        self._table = table
        self._pool_id = pool_id
        self._next_number = 1

    def seal(self, page: PageId, page_hash: PageHash, parent: PageHash | None, checksum: int) -> None:
        """Records that the page has this hash and is complete."""
        fields = _FIELDS.pack(self._next_number, page_hash, parent or _NO_PARENT, checksum)
        self._next_number += 1
        start = page * ENTRY_BYTES
        digest = _DIGEST.pack(_digest(self._pool_id, page, fields))
        self._table[start : start + len(fields) + len(digest)] = fields + digest

    def clear(self, page: PageId) -> None:
        """Removes the page's entry, after which the page may be written."""
        start = page * ENTRY_BYTES
        self._table[start : start + ENTRY_BYTES] = _EMPTY


def read_journal(table: bytes | memoryview, pool_id: bytes) -> Iterator[SealedPage]:
    """Yields the complete entries of a table whose writer has ended."""
    whole = bytes(table)
    for page in range(len(whole) // ENTRY_BYTES):
        start = page * ENTRY_BYTES
        end = start + _FIELDS.size
        [digest] = _DIGEST.unpack_from(whole, end)
        if not digest:
            continue
        fields = whole[start:end]
        number, page_hash, parent, checksum = _FIELDS.unpack(fields)
        if digest == _digest(pool_id, page, fields) and number:
            known = PageHash(parent) if parent != _NO_PARENT else None
            yield SealedPage(PageId(page), number, PageHash(page_hash), known, checksum)


def _digest(pool_id: bytes, page: int, fields: bytes) -> int:
    return xxhash.xxh3_64_intdigest(pool_id + _SLOT.pack(page) + fields) or 1
