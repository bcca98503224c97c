"""Channels to other workers, one an address, kept for the life of the process. On the server's event loop."""

from __future__ import annotations

import grpc.aio

from penstock.grpc_server import Dial


class Channels:
    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._channels: dict[str, grpc.aio.Channel] = {}

    def get(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = self._dial(address)
        return self._channels[address]

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
