"""What a worker tells routers about its prefix cache: events with sequence numbers, a replay window, snapshots.

`KvEventLog` is the worker's side and owns the numbering; `router/prefix_index.py` is the reader. Thread-safe,
because the step loop appends while the server's event loop reads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import msgpack

from penstock.types import PageHash


class KvEventKind(IntEnum):
    STORED = 1
    REMOVED = 2


@dataclass(frozen=True, slots=True)
class KvEvent:
    """Full pages that entered or left one worker's prefix cache, its lower tiers included."""

    kind: KvEventKind
    hashes: tuple[PageHash, ...]


@dataclass(frozen=True, slots=True)
class KvEventBatch:
    """Events `first_seq .. first_seq + len(events) - 1`, or with `snapshot` the whole cache before `first_seq`."""

    first_seq: int
    events: tuple[KvEvent, ...]
    snapshot: bool = False

    @property
    def next_seq(self) -> int:
        return self.first_seq if self.snapshot else self.first_seq + len(self.events)


def encode_events(events: Iterable[KvEvent]) -> bytes:
    """msgpack `[[kind, hash, hash, ...], ...]`."""
    return msgpack.packb([[int(event.kind), *event.hashes] for event in events])


def decode_events(payload: bytes) -> tuple[KvEvent, ...]:
    """Raises ValueError on a payload that is not of `encode_events`' form."""
    rows = msgpack.unpackb(payload, use_list=True)
    return tuple(KvEvent(KvEventKind(row[0]), tuple(PageHash(page) for page in row[1:])) for row in rows)


class KvEventLog:
    """Numbers events, keeps the last `window` of them and the set of pages now cached."""

    def __init__(self, window: int = 4096) -> None:
        self._lock = threading.Lock()
        self._events: deque[KvEvent] = deque(maxlen=window)
        self._next_seq = 1
        self._cached: dict[PageHash, None] = {}

    @property
    def next_seq(self) -> int:
        return self._next_seq

    def stored(self, hashes: Sequence[PageHash]) -> None:
        self._append(KvEvent(KvEventKind.STORED, tuple(hashes)))

    def removed(self, hashes: Sequence[PageHash]) -> None:
        self._append(KvEvent(KvEventKind.REMOVED, tuple(hashes)))

    def _append(self, event: KvEvent) -> None:
        if not event.hashes:
            return
        with self._lock:
            self._events.append(event)
            self._next_seq += 1
            for page in event.hashes:
                if event.kind is KvEventKind.STORED:
                    self._cached[page] = None
                else:
                    self._cached.pop(page, None)

    def read(self, next_seq: int) -> KvEventBatch:
        """Everything from `next_seq` on; a snapshot where the window no longer (or never) reached it."""
        with self._lock:
            oldest = self._next_seq - len(self._events)
            if oldest <= next_seq <= self._next_seq:
                events = tuple(self._events)[next_seq - oldest :]
                return KvEventBatch(next_seq, events)
            whole = (KvEvent(KvEventKind.STORED, tuple(self._cached)),) if self._cached else ()
            return KvEventBatch(self._next_seq, whole, snapshot=True)
