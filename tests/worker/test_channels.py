"""Tests that channels to former workers do not accumulate, and that a channel in use stays open."""

from __future__ import annotations

import contextlib
from typing import Any

from worker.channels import Channels


class FakeChannel:
    def __init__(self) -> None:
        self.is_closed = False

    async def close(self) -> None:
        self.is_closed = True


class Dialled:
    def __init__(self) -> None:
        self.made: dict[str, list[FakeChannel]] = {}

    def __call__(self, address: str) -> Any:
        self.made.setdefault(address, []).append(FakeChannel())
        return self.made[address][-1]

    def is_open(self, address: str) -> bool:
        return not self.made[address][-1].is_closed


async def call(channels: Channels, address: str) -> None:
    async with channels.use(address):
        pass


async def test_the_longest_unused_channels_are_closed() -> None:
    dialled = Dialled()
    channels = Channels(dialled, max_idle=2)
    for address in ("a", "b", "a", "c"):
        await call(channels, address)
    assert [dialled.is_open(address) for address in "abc"] == [True, False, True]
    await call(channels, "b")
    assert [len(dialled.made[address]) for address in "abc"] == [1, 2, 1]
    assert len(channels) == 2
    for number in range(1000):
        await call(channels, f"pod-{number}")
    assert len(channels) == 2
    assert sum(dialled.is_open(address) for address in dialled.made) == 2


async def test_a_channel_in_use_is_never_closed() -> None:
    dialled = Dialled()
    channels = Channels(dialled, max_idle=1)
    async with contextlib.AsyncExitStack() as calls:
        first = await calls.enter_async_context(channels.use("busy"))
        assert await calls.enter_async_context(channels.use("busy")) is first
        for number in range(5):
            await call(channels, f"pod-{number}")
            assert dialled.is_open("busy")
    assert len(channels) == 1
    assert dialled.is_open("busy")
    await channels.close()
    assert not any(dialled.is_open(address) for address in dialled.made)
