"""Logs the events of a worker's prefix cache for routers: sequence numbers, a replay window, snapshots.

`KvEventLog` is the worker's side and owns the numbering; `router.routing.index.prefix_index` is the reader.
Thread-safe, because the step loop appends while the server's event loop reads.

An event states where pages are from then on, not how they got there. So a reader may apply events twice, and adjacent
events of one kind may be sent as one.
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

from penstock.kv.page_places import NUM_RANKS, PagePlaces
from penstock.kv.page_texts import PageText, PageTexts, TextSource
from penstock.types import PageHash

_HASH_BYTES = 16


class KvEventKind(IntEnum):
    """The best tier that holds a page now."""

    STORED = 1  # on the device
    REMOVED = 2  # on no tier
    ON_HOST = 3
    ON_DISK = 4

    @property
    def rank(self) -> int:
        """The rank of the tier, 0 for the best; see `penstock.kv.page_places`."""
        return _RANKS[self]


_RANKS = (NUM_RANKS, 0, NUM_RANKS, 1, 2)  # by kind
_KINDS = {int(kind): kind for kind in KvEventKind}
_HELD_KINDS = (KvEventKind.STORED, KvEventKind.ON_HOST, KvEventKind.ON_DISK)  # by rank


class KvEvent(NamedTuple):
    """A run of full pages of one worker's prefix cache."""

    kind: KvEventKind
    hashes: tuple[PageHash, ...]


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """Events from `first_seq` on, or with `snapshot` the whole cache as it was just before `first_seq`."""

    first_seq: int
    events: tuple[KvEvent, ...]
    snapshot: bool = False
    num_merged: int = 0  # events that were merged into another one of `events`
    part: int = 0  # index of this part of a snapshot
    more: bool = False  # another part follows
    num_strays: int | None = None  # strays after these events (see `PagePlaces`); None: not counted

    @property
    def next_seq(self) -> int:
        return self.first_seq if self.snapshot else self.first_seq + len(self.events) + self.num_merged


def encode_events(events: Iterable[KvEvent]) -> bytes:
    """Returns msgpack `[[kind, hashes end to end], ...]`."""
    return msgpack.packb([[int(event.kind), b"".join(event.hashes)] for event in events])


def decode_events(payload: bytes) -> tuple[KvEvent, ...]:
    """Decodes the output of `encode_events`. Raises ValueError for any other payload."""
    try:
        return tuple(KvEvent(_KINDS[kind], _split(joined)) for kind, joined in msgpack.unpackb(payload))
    except (KeyError, TypeError, struct.error) as error:
        raise ValueError(f"not a list of kinds and hashes: {error!r}") from error


def _split(joined: bytes) -> tuple[PageHash, ...]:
    return _splitter(len(joined) // _HASH_BYTES).unpack(joined)  # type: ignore[return-value]


@functools.lru_cache(maxsize=256)
def _splitter(count: int) -> struct.Struct:
    """Returns a struct that splits a run of hashes in one C call."""
    return struct.Struct(f"{_HASH_BYTES}s" * count)


def split_snapshot(batch: KvEventBatch, max_pages: int) -> Iterator[KvEventBatch]:
    """Yields a snapshot in parts small enough for a reader's event loop, and any other batch unchanged."""
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
    """Numbers events, and keeps the last `window` of them and the tier of every page."""

    def __init__(self, window: int = 4096) -> None:
        self._lock = threading.Lock()
        self._events: deque[KvEvent] = deque(maxlen=window)
        self._next_seq = 1
        self._places = PagePlaces()
        self._texts: PageTexts | None = None

    @property
    def next_seq(self) -> int:
        return self._next_seq

    def keep_texts(self, page_size: int) -> None:
        """Starts to remember the tokens of pages that `note_texts` and `note_held_texts` name."""
        if self._texts is None:
            self._texts = PageTexts(page_size)

    def note_texts(self, source: TextSource, hashes: Sequence[PageHash], first: int = 0) -> None:
        """Remembers the tokens of the pages `hashes[first:]`, which the caller is about to store. Does nothing unless
        `keep_texts` was called.
        """
        if self._texts is None:
            return
        with self._lock:
            self._restate(self._texts.note(source, hashes, first))

    def note_held_texts(self, source: TextSource, hashes: Sequence[PageHash]) -> None:
        """Does the same for leading pages of a prompt, of which some are held. Forgets the tokens of those that are
        not.
        """
        if self._texts is None:
            return
        with self._lock:
            new = self._texts.note(source, hashes, 0)
            self._texts.forget([page for page in new if self._places.rank_of(page) == NUM_RANKS])
            self._restate(new)

    def _restate(self, pages: Iterable[PageHash]) -> None:
        """Records held pages again, since readers that need the tokens could not use the first event."""
        by_rank: list[list[PageHash]] = [[] for _ in range(NUM_RANKS + 1)]
        for page in pages:
            by_rank[self._places.rank_of(page)].append(page)
        for kind, held in zip(_HELD_KINDS, by_rank, strict=False):
            self._append(kind, held)

    def texts_of(self, pages: Iterable[PageHash]) -> dict[PageHash, PageText]:
        """Returns the known texts of pages that are held now."""
        with self._lock:
            texts = self._texts
            return {} if texts is None else {page: text for page in pages if (text := texts.get(page)) is not None}

    def stored(self, hashes: Sequence[PageHash], parent: PageHash | None = None) -> None:
        """Records a run of pages on the device, each the child of the previous one.

        `parent` is the first page's parent: ROOT if the page begins a prompt, None if unknown, which slows readers
        down.
        """
        with self._lock:
            self._append(KvEventKind.STORED, self._places.put_run(hashes, parent))

    def stored_runs(self, runs: Iterable[tuple[Sequence[PageHash], PageHash]]) -> None:
        """Records runs of pages on the device as one event; each run is given with its first page's parent."""
        with self._lock:
            new = [self._places.put_run(hashes, parent) for hashes, parent in runs]
            self._append(KvEventKind.STORED, new[0] if len(new) == 1 else list(itertools.chain.from_iterable(new)))

    def moved(self, hashes: Sequence[PageHash], kind: KvEventKind) -> None:
        """Records that stored pages have moved to another tier."""
        with self._lock:
            self._append(kind, [page for page in hashes if self._places.put(page, kind.rank)])

    def removed(self, hashes: Sequence[PageHash]) -> None:
        """Records that no tier holds the pages any more."""
        with self._lock:
            self._append(KvEventKind.REMOVED, self._places.drop(hashes))

    def _append(self, kind: KvEventKind, hashes: Sequence[PageHash]) -> None:
        if hashes:
            self._events.append(KvEvent(kind, tuple(hashes)))
            self._next_seq += 1
            if self._texts is not None and kind is KvEventKind.REMOVED:
                self._texts.forget(hashes)

    def read(self, next_seq: int) -> KvEventBatch:
        """Returns all events from `next_seq` on, or a snapshot if the window does not reach back to it."""
        with self._lock:
            strays = self._places.num_strays
            oldest = self._next_seq - len(self._events)
            if oldest <= next_seq <= self._next_seq:
                count = self._next_seq - next_seq
                if not count:
                    return KvEventBatch(next_seq, (), num_strays=strays)
                events = [self._events[index] for index in range(-count, 0)]
                merged = _merge(events)
                return KvEventBatch(next_seq, merged, num_merged=count - len(merged), num_strays=strays)
            by_rank = self._places.by_rank()
            whole = tuple(
                KvEvent(kind, tuple(pages)) for kind, pages in zip(_HELD_KINDS, by_rank, strict=True) if pages
            )
            return KvEventBatch(self._next_seq, whole, snapshot=True, num_strays=strays)


def _merge(events: Iterable[KvEvent]) -> tuple[KvEvent, ...]:
    """Joins adjacent events of one kind."""
    return tuple(
        KvEvent(kind, tuple(itertools.chain.from_iterable(event.hashes for event in group)))
        for kind, group in itertools.groupby(events, key=lambda event: event.kind)
    )
