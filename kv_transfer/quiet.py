"""Who waits until nothing of transfers that are over can be written any more, and when that is.

For wires on which our own polling writes what has come over a socket: what a sender had handed to its kernel may lie
there still, though the sender has given up, or died. It is quiet once everything that has come was read, and nothing
has come for a while since. Pure: the receiver (receiver.py) owns it, guards it with its lock, and looks at the sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

QUIET_LOOKS = 10  # in a row that find nothing unread, and what lies between two: longer than a way to the peer and back
QUIET_LOOK_S = 0.02


@dataclass(slots=True)
class _Waiter:
    then: Callable[[], None]
    next_look_s: float
    looks: int = 0  # in a row that found nothing unread


class Quiet:
    """Guarded by the receiver's lock."""

    def __init__(self) -> None:
        self._waiters: list[_Waiter] = []

    def __len__(self) -> int:
        return len(self._waiters)

    def wait(self, then: Callable[[], None], now_s: float) -> None:
        self._waiters.append(_Waiter(then, now_s + QUIET_LOOK_S))

    def is_due(self, now_s: float) -> bool:
        """Whether it is time to look at the sockets."""
        return any(one.next_look_s <= now_s for one in self._waiters)

    def look(self, nothing_unread: bool, now_s: float) -> list[Callable[[], None]]:
        """What a look found, made after `now_s`. Returns what is to be called for those that need not wait longer."""
        for one in self._waiters:
            if one.next_look_s <= now_s:
                one.looks, one.next_look_s = (one.looks + 1 if nothing_unread else 0), now_s + QUIET_LOOK_S
        quiet = [one.then for one in self._waiters if one.looks >= QUIET_LOOKS]
        self._waiters = [one for one in self._waiters if one.looks < QUIET_LOOKS]
        return quiet
