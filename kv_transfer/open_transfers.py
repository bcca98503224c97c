"""The receiver's table of open transfers: which pages each may write, which have landed, and which has stalled.

Pure: no I/O, no thread, no clock but the `now_s` that is passed in. The receiver (receiver.py) owns it, and guards it
with its lock. One lock more is kept here for each transfer, `Incoming.writing`: it is taken before the receiver's, and
never while that is held.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kv_transfer.transport import Arrival
from penstock.errors import TransferError
from penstock.types import Epoch, PageId, TransferKey


@dataclass(slots=True, eq=False)
class Incoming:
    """One open transfer. `writing` is held while an emulated wire copies into its pages, and to set `closed`; all else
    is written under the receiver's lock."""

    key: TransferKey
    pages: tuple[PageId, ...]
    timeout_s: float  # without a page
    last_progress_s: float
    missing: set[int]  # indexes that have not landed
    failed: bool = False
    closed: bool = False
    writing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def due_s(self) -> float:
        """When it has stalled, unless a page comes."""
        return self.last_progress_s + self.timeout_s

    def fresh(self, arrival: Arrival) -> list[int]:
        """Indexes of its pages that have not landed before."""
        return [index for index in _indexes(arrival) if index in self.missing]

    def land(self, indexes: Iterable[int], now_s: float) -> None:
        self.missing.difference_update(indexes)
        self.last_progress_s = now_s


class OpenTransfers:
    """Guarded by the receiver's lock."""

    def __init__(self) -> None:
        self._open: dict[TransferKey, Incoming] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, key: TransferKey, pages: Sequence[PageId], timeout_s: float, now_s: float) -> None:
        if key in self._open:
            raise TransferError(f"transfer {key.transfer_id}: already open")
        self._open[key] = Incoming(key, tuple(pages), timeout_s, now_s, set(range(len(pages))))

    def close(self, key: TransferKey) -> Incoming | None:
        return self._open.pop(key, None)

    def close_all(self) -> Collection[Incoming]:
        closed, self._open = self._open.values(), {}
        return closed

    def find(self, arrival: Arrival) -> Incoming | None:
        """The transfer whose pages these are; None where it is not open, has failed, or has no such pages."""
        incoming = self._open.get(arrival.key)
        if incoming is None or incoming.failed or _indexes(arrival).stop > len(incoming.pages):
            return None
        return incoming

    def arrive(self, arrival: Arrival, now_s: float) -> None:
        """Of pages that the peer has written by itself."""
        if (incoming := self.find(arrival)) is not None:
            incoming.land(_indexes(arrival), now_s)

    def fail(self, incoming: Incoming) -> bool:
        """Whether it fails by this: once a transfer, and only while it is open and misses pages."""
        if incoming.failed or not incoming.missing or self._open.get(incoming.key) is not incoming:
            return False
        incoming.failed = True
        return True

    def stalled(self, now_s: float) -> list[Incoming]:
        return [incoming for incoming in self._waiting() if now_s >= incoming.due_s]

    def waiting_for(self, sender_epoch: Epoch) -> list[Incoming]:
        return [incoming for incoming in self._waiting() if incoming.key.sender_epoch == sender_epoch]

    def next_due_s(self) -> float:
        """When the first of them has stalled; infinite where none can."""
        return min((incoming.due_s for incoming in self._waiting()), default=math.inf)

    def last_progress_s(self) -> float | None:
        """When a page last came to one that waits; None: none waits."""
        return max((incoming.last_progress_s for incoming in self._waiting()), default=None)

    def _waiting(self) -> list[Incoming]:
        return [incoming for incoming in self._open.values() if incoming.missing and not incoming.failed]


def _indexes(arrival: Arrival) -> range:
    return range(arrival.first_index, arrival.first_index + arrival.num_pages)
