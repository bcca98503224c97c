"""Streams to routers which runs the shared store holds, so that they count on them when they place prompts.

What workers write between two listings becomes known with the second one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

from penstock.types import PageHash
from penstock.v1 import worker_pb2

_AT_ONCE = 16_384  # hashes in one message, which a reader applies within milliseconds


class RunAnnouncer:
    """Holds the last listing and wakes its watchers. `publish` and `close` may be called from any thread."""

    def __init__(self) -> None:
        self._listed: frozenset[PageHash] = frozenset()
        self._is_closed = False
        self._lock = threading.Lock()  # of the watchers
        self._watchers: set[Callable[[], object]] = set()

    def publish(self, listed: frozenset[PageHash]) -> None:
        self._listed = listed
        self._wake()

    def close(self) -> None:
        """Ends every watch."""
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            for wake in self._watchers:
                wake()

    async def changes(self) -> AsyncIterator[worker_pb2.StoredRuns]:
        """Yields all runs of the last listing, then what each later listing adds and removes, until `close`."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        known: frozenset[PageHash] = frozenset()

        def wake() -> None:
            loop.call_soon_threadsafe(changed.set)

        with self._lock:
            self._watchers.add(wake)
        try:
            while not self._is_closed:
                changed.clear()
                listed = self._listed
                if listed is not known:
                    for message in await asyncio.to_thread(_messages, known, listed):
                        yield message
                    known = listed
                await changed.wait()
        finally:
            with self._lock:
                self._watchers.discard(wake)


def _messages(known: frozenset[PageHash], listed: frozenset[PageHash]) -> list[worker_pb2.StoredRuns]:
    """Splits the difference between two listings, of up to half a million runs each."""
    added, removed = list(listed - known), list(known - listed)
    return [
        worker_pb2.StoredRuns(
            added=b"".join(added[start : start + _AT_ONCE]), removed=b"".join(removed[start : start + _AT_ONCE])
        )
        for start in range(0, max(len(added), len(removed)), _AT_ONCE)
    ]
