"""Queues a target's events for the source of the pages that it receives in a migration or a hand-over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

EventT = TypeVar("EventT")


class CallEvents(Generic[EventT]):
    """Carries one call's events from any thread to the event loop that created this object."""

    def __init__(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[EventT | None] = asyncio.Queue()
        self.closed = False  # whether the source has confirmed that it has stopped writing

    def end(self) -> None:
        """Ends `events` after the queued ones."""
        self._send(None)

    async def events(self) -> AsyncIterator[EventT]:
        """Yields events until `end`. It needs no deadline: the source ends every call, and keepalive pings detect a
        dead source.
        """
        while (event := await self._events.get()) is not None:
            yield event

    def _send(self, event: EventT | None) -> None:
        self._event_loop.call_soon_threadsafe(self._events.put_nowait, event)
