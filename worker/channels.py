"""Keeps one channel to each other worker, shared by all calls to it. Runs on the server's event loop.

Workers come and go, so of the channels without a call only the most recently used are kept.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from penstock.rpc.server import Dial

MAX_IDLE = 64  # more than the workers usually called; reconnecting takes a round trip or two


class Channels:
    def __init__(self, dial: Dial, max_idle: int = MAX_IDLE) -> None:
        self._dial = dial
        self._max_idle = max_idle
        self._channels: dict[str, grpc.aio.Channel] = {}  # idle channels are in the order of their last use
        self._num_calls: dict[str, int] = {}  # calls of each channel in use

    def __len__(self) -> int:
        return len(self._channels)

    @asynccontextmanager
    async def use(self, address: str) -> AsyncIterator[grpc.aio.Channel]:
        """Yields the channel to an address, which stays open until the block ends. Afterwards closes the least recently
        used idle channels beyond `max_idle`.
        """
        if address not in self._channels:
            self._channels[address] = self._dial(address)
        self._num_calls[address] = self._num_calls.get(address, 0) + 1
        try:
            yield self._channels[address]
        finally:
            self._num_calls[address] -= 1
            if not self._num_calls[address]:
                del self._num_calls[address]
                if address in self._channels:
                    self._channels[address] = self._channels.pop(address)
                await self._close_surplus()

    async def _close_surplus(self) -> None:
        idle = [address for address in self._channels if address not in self._num_calls]
        surplus = [self._channels.pop(address) for address in idle[: max(0, len(idle) - self._max_idle)]]
        for channel in surplus:
            await channel.close()

    async def close(self) -> None:
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()
