"""Provides a channel that connects with the latest credentials. Used on the event loop.

gRPC reads a channel's certificates only once. Running calls keep the channel they were made on, which closes after the
last of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from penstock.process.task_set import TaskSet


class RenewedChannel(grpc.aio.Channel):  # type: ignore[misc]  # untyped base
    def __init__(self, dial: Callable[[], grpc.aio.Channel], version: Callable[[], int]) -> None:
        """`dial` opens a channel with the current credentials, whose `version` rises when they change."""
        self._dial = dial
        self._version = version
        self._opened = version()
        self._channel = dial()
        self._num_calls: dict[grpc.aio.Channel, int] = {self._channel: 0}  # the current channel and those still in use
        self._closing = TaskSet()

    @property
    def num_open(self) -> int:
        return len(self._num_calls)

    def _current(self) -> grpc.aio.Channel:
        if self._version() != self._opened:
            before, self._opened, self._channel = self._channel, self._version(), self._dial()
            self._num_calls[self._channel] = 0
            self._close_if_unused(before)
        return self._channel

    def _close_if_unused(self, channel: grpc.aio.Channel) -> None:
        if channel is not self._channel and not self._num_calls.get(channel, 1):
            del self._num_calls[channel]
            self._closing.start(channel.close())

    def _method(self, kind: str, args: tuple[Any, ...], options: dict[str, Any]) -> Callable[..., Any]:
        bound: tuple[grpc.aio.Channel, Callable[..., Any]] | None = None

        def call(*call_args: Any, **call_options: Any) -> Any:
            nonlocal bound
            channel = self._current()
            if bound is None or bound[0] is not channel:
                bound = channel, getattr(channel, kind)(*args, **options)
            started = bound[1](*call_args, **call_options)
            self._num_calls[channel] += 1
            started.add_done_callback(lambda _: self._on_done(channel))
            return started

        return call

    def _on_done(self, channel: grpc.aio.Channel) -> None:
        if channel in self._num_calls:
            self._num_calls[channel] -= 1
            self._close_if_unused(channel)

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return self._method("unary_unary", args, options)

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return self._method("unary_stream", args, options)

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return self._method("stream_unary", args, options)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return self._method("stream_stream", args, options)

    async def close(self, grace: float | None = None) -> None:
        channels = list(self._num_calls)
        self._num_calls.clear()
        await asyncio.gather(*(channel.close(grace) for channel in channels), self._closing.wait())

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current().channel_ready()

    async def __aenter__(self) -> RenewedChannel:
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self.close()
