"""The receiver's table of open transfers: which pages each may write, which have landed, and which transfers have
stalled.

Pure: no I/O, no thread, no clock except the `now_s` passed in. The receiver (receiver.py) owns the table and guards it
with its lock. Each transfer has its own lock, `TransferArrivals.writing`, which is taken before the receiver's lock and
never while that lock is held.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kv_transfer.transports.transport import Arrival
from penstock.errors import TransferError
from penstock.types import Epoch, PageId, TransferKey


@dataclass(slots=True, eq=False)
class TransferArrivals:
    """An open transfer. `writing` is held while a staging transport copies into its pages, and to set `closed`; every
    other field is written under the receiver's lock."""

    key: TransferKey
    pages: tuple[PageId, ...]
    timeout_s: float  # longest time without a page
    last_progress_s: float
    missing: set[int]  # indexes of pages that have not landed
    failed: bool = False
    closed: bool = False
    writing: threading.Lock = field(default_factory=threading.Lock)

    @property
    def due_s(self) -> float:
        """The time at which the transfer counts as stalled unless another page lands first."""
        return self.last_progress_s + self.timeout_s

    def fresh(self, arrival: Arrival) -> list[int]:
        """Returns the indexes of an arrival that have not landed before."""
        return [index for index in _indexes(arrival) if index in self.missing]

    def land(self, indexes: Iterable[int], now_s: float) -> None:
        self.missing.difference_update(indexes)
        self.last_progress_s = now_s


class ArrivalTable:
    """Open transfers by key. Guarded by the receiver's lock."""

    def __init__(self) -> None:
        self._open: dict[TransferKey, TransferArrivals] = {}

    def __len__(self) -> int:
        return len(self._open)

    def senders(self) -> set[Epoch]:
        """Returns the epochs whose transfers are open."""
        return {key.sender_epoch for key in self._open}

    def open(self, key: TransferKey, pages: Sequence[PageId], timeout_s: float, now_s: float) -> None:
        if key in self._open:
            raise TransferError(f"transfer {key.transfer_id}: already open")
        self._open[key] = TransferArrivals(key, tuple(pages), timeout_s, now_s, set(range(len(pages))))

    def close(self, key: TransferKey) -> TransferArrivals | None:
        return self._open.pop(key, None)

    def close_all(self) -> Collection[TransferArrivals]:
        closed, self._open = self._open.values(), {}
        return closed

    def find(self, arrival: Arrival) -> TransferArrivals | None:
        """Returns the transfer of an arrival; None if it is not open, has failed, or does not have these pages."""
        arrivals = self._open.get(arrival.key)
        if arrivals is None or arrivals.failed or _indexes(arrival).stop > len(arrivals.pages):
            return None
        return arrivals

    def arrive(self, arrival: Arrival, now_s: float) -> None:
        """Records pages that the peer has written on its own."""
        if (arrivals := self.find(arrival)) is not None:
            arrivals.land(_indexes(arrival), now_s)

    def fail(self, arrivals: TransferArrivals) -> bool:
        """Marks a transfer as failed. Returns False if it has failed before, is closed, or has all its pages."""
        if arrivals.failed or not arrivals.missing or self._open.get(arrivals.key) is not arrivals:
            return False
        arrivals.failed = True
        return True

    def stalled(self, now_s: float) -> list[TransferArrivals]:
        return [arrivals for arrivals in self._waiting() if now_s >= arrivals.due_s]

    def waiting_for(self, sender_epoch: Epoch) -> list[TransferArrivals]:
        return [arrivals for arrivals in self._waiting() if arrivals.key.sender_epoch == sender_epoch]

    def next_due_s(self) -> float:
        """Returns when the next transfer will count as stalled; infinity if none waits for pages."""
        return min((arrivals.due_s for arrivals in self._waiting()), default=math.inf)

    def last_progress_s(self) -> float | None:
        """Returns when a page last landed for a waiting transfer; None if no transfer waits."""
        return max((arrivals.last_progress_s for arrivals in self._waiting()), default=None)

    def _waiting(self) -> list[TransferArrivals]:
        return [arrivals for arrivals in self._open.values() if arrivals.missing and not arrivals.failed]


def _indexes(arrival: Arrival) -> range:
    return range(arrival.first_index, arrival.first_index + arrival.num_pages)
