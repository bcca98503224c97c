"""What a worker tells routers about its prefix cache: events with sequence numbers, a replay window, snapshots.

`KvEventLog` is the worker's side and owns the numbering; `router/prefix_index.py` is the reader. Thread-safe,
because the step loop appends while the server's event loop reads.

An event says where pages are from then on, never how they came there. Hence a reader may apply a batch again that it
knows the beginning of, and neighbouring events of one kind may travel as one.
"""

from __future__ import annotations

import functools
import itertools
import struct
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import msgpack

from penstock.page_places import NUM_RANKS, PagePlaces
from penstock.types import PageHash

_HASH_BYTES = 16


class KvEventKind(IntEnum):
    """The best tier that has a page now."""

    STORED = 1  # the device
    REMOVED = 2  # none
    ON_HOST = 3
    ON_DISK = 4

    @property
    def rank(self) -> int:
        """0 is the best; see `penstock.page_places`."""
        return _RANKS[self]


_RANKS = (NUM_RANKS, 0, NUM_RANKS, 1, 2)  # by kind
_KINDS = {int(kind): kind for kind in KvEventKind}
_HELD_KINDS = (KvEventKind.STORED, KvEventKind.ON_HOST, KvEventKind.ON_DISK)  # by rank


class KvEvent(NamedTuple):
    """Full pages of one worker's prefix cache."""

    kind: KvEventKind
    hashes: tuple[PageHash, ...]


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """Events from `first_seq` on, or with `snapshot` the whole cache before `first_seq`."""

    first_seq: int
    events: tuple[KvEvent, ...]
    snapshot: bool = False
    num_merged: int = 0  # events that travel within another of `events`
    part: int = 0  # of a snapshot
    more: bool = False  # another part follows
    num_strays: int | None = None  # after these events, as `PagePlaces` counts them; None: the worker does not tell

    @property
    def next_seq(self) -> int:
        return self.first_seq if self.snapshot else self.first_seq + len(self.events) + self.num_merged


def encode_events(events: Iterable[KvEvent]) -> bytes:
    """msgpack `[[kind, hashes end to end], ...]`."""
    return msgpack.packb([[int(event.kind), b"".join(event.hashes)] for event in events])


def decode_events(payload: bytes) -> tuple[KvEvent, ...]:
    """Raises ValueError on a payload that is not of `encode_events`' form."""
    try:
        return tuple(KvEvent(_KINDS[kind], _split(joined)) for kind, joined in msgpack.unpackb(payload))
    except (KeyError, TypeError, struct.error) as error:
        raise ValueError(f"not a list of kinds and hashes: {error!r}") from error


def _split(joined: bytes) -> tuple[PageHash, ...]:
    return _splitter(len(joined) // _HASH_BYTES).unpack(joined)  # type: ignore[return-value]


@functools.lru_cache(maxsize=256)
def _splitter(count: int) -> struct.Struct:
    """One call of C cuts a whole run of hashes."""
    return struct.Struct(f"{_HASH_BYTES}s" * count)


def split_snapshot(batch: KvEventBatch, max_pages: int) -> Iterator[KvEventBatch]:
    """A snapshot in parts that a reader applies without standing still; any other batch as it is."""
    if not batch.snapshot:
        yield batch
        return
    pieces = [
        KvEvent(event.kind, event.hashes[first : first + max_pages])
        for event in batch.events
        for first in range(0, len(event.hashes), max_pages)
    ]
    for part, piece in enumerate(pieces[:-1]):
        yield replace(batch, events=(piece,), part=part, more=True)
    yield replace(batch, events=tuple(pieces[-1:]), part=max(0, len(pieces) - 1))


class KvEventLog:
    """Numbers events, keeps the last `window` of them and where each page is now."""

    def __init__(self, window: int = 4096) -> None:
        self._lock = threading.Lock()
        self._events: deque[KvEvent] = deque(maxlen=window)
        self._next_seq = 1
        self._places = PagePlaces()

    @property
    def next_seq(self) -> int:
        return self._next_seq

    def stored(self, hashes: Sequence[PageHash], parent: PageHash | None = None) -> None:
        """A run of pages, each the child of the one before, is on the device.

        `parent`: of the first one; ROOT where it begins a prompt; None where the caller does not know, which costs
        readers a slower search.
        """
        with self._lock:
            new: list[PageHash] = []
            for page in hashes:
                if self._places.put(page, 0, parent):
                    new.append(page)
                parent = page
            self._append(KvEventKind.STORED, new)

    def stored_each(self, pages: Iterable[tuple[PageHash, PageHash]]) -> None:
        """Pages of different runs are on the device, each told with its parent: one event."""
        with self._lock:
            self._append(KvEventKind.STORED, [page for page, parent in pages if self._places.put(page, 0, parent)])

    def moved(self, hashes: Sequence[PageHash], kind: KvEventKind) -> None:
        """Pages that were stored before are on another tier."""
        with self._lock:
            self._append(kind, [page for page in hashes if self._places.put(page, kind.rank)])

    def removed(self, hashes: Sequence[PageHash]) -> None:
        """No tier has the pages any more."""
        self.moved(hashes, KvEventKind.REMOVED)

    def _append(self, kind: KvEventKind, hashes: Sequence[PageHash]) -> None:
        if hashes:
            self._events.append(KvEvent(kind, tuple(hashes)))
            self._next_seq += 1

    def read(self, next_seq: int) -> KvEventBatch:
        """Everything from `next_seq` on; a snapshot where the window no longer (or never) reached it."""
        with self._lock:
            strays = self._places.num_strays
            oldest = self._next_seq - len(self._events)
            if oldest <= next_seq <= self._next_seq:
                count = self._next_seq - next_seq
                events = [self._events[index] for index in range(-count, 0)]
                merged = _merge(events)
                return KvEventBatch(next_seq, merged, num_merged=count - len(merged), num_strays=strays)
            by_rank = self._places.by_rank()
            whole = tuple(
                KvEvent(kind, tuple(pages)) for kind, pages in zip(_HELD_KINDS, by_rank, strict=True) if pages
            )
            return KvEventBatch(self._next_seq, whole, snapshot=True, num_strays=strays)


def _merge(events: Iterable[KvEvent]) -> tuple[KvEvent, ...]:
    """Neighbours of one kind as one."""
    return tuple(
        KvEvent(kind, tuple(itertools.chain.from_iterable(event.hashes for event in group)))
        for kind, group in itertools.groupby(events, key=lambda event: event.kind)
    )
