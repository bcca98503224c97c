"""Tracks the calls in flight that other calls can cancel, by tenant and response id."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TypeVar

from penstock.errors import Cancelled

ItemT = TypeVar("ItemT")
Key = tuple[str, str]  # a tenant's name and a response's id


class _RunningCall:
    """Reads the outputs of one call. `cancel` interrupts the task that waits for the next output."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self._is_cancelled = False
        self._reader: asyncio.Task[object] | None = None

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._reader is not None:
            self._reader.cancel()

    async def next(self, outputs: AsyncGenerator[ItemT, None]) -> ItemT:
        """Returns the next output. Raises Cancelled once the call is cancelled."""
        if self._is_cancelled:
            raise Cancelled("another call cancelled this one")
        self._reader = reader = asyncio.current_task()
        assert reader is not None
        try:
            return await anext(outputs)
        except asyncio.CancelledError:
            if self._is_cancelled and reader.uncancel() == 0:  # above 0, the client has disconnected as well
                raise Cancelled("another call cancelled this one") from None
            raise
        finally:
            self._reader = None


class RunningCalls:
    """Holds the calls that can be cancelled. The routes that generate and those that cancel share it."""

    def __init__(self) -> None:
        self._calls: dict[Key, _RunningCall] = {}

    async def guarded(self, key: Key, outputs: AsyncGenerator[ItemT, None]) -> AsyncGenerator[ItemT, None]:
        """Yields the outputs of a call. Until the last one, `cancel` can end the call."""
        call = self._calls[key] = _RunningCall()
        try:
            async with contextlib.aclosing(outputs):
                while True:
                    try:
                        item = await call.next(outputs)
                    except StopAsyncIteration:
                        return
                    yield item
        finally:
            del self._calls[key]
            call.ended.set()

    async def cancel(self, key: Key, timeout_s: float) -> bool:
        """Ends a call and waits until its workers are released. Returns whether it was in flight.

        Raises TimeoutError if that takes longer; the call then ends as soon as its client reads.
        """
        call = self._calls.get(key)
        if call is None:
            return False
        call.cancel()
        async with asyncio.timeout(timeout_s):
            await call.ended.wait()
        return True
