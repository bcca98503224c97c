"""Holds the differences of the asyncio client from the blocking one, for which `sync_io` has the same names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio

from penstock.errors import Cancelled

CLOSED = "the stream was closed"

Event = asyncio.Event
sleep = asyncio.sleep


def connect(target: str, credentials: grpc.ChannelCredentials | None, options: Sequence[tuple[str, Any]]) -> Any:
    """Returns a channel, which connects on first use."""
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)


def start(method: Any, request: Any, **options: Any) -> Any:
    """Starts a unary call without waiting for its answer."""
    return method(request, **options)


async def answer(call: Any) -> Any:
    """Returns the answer of a started unary call. Raises RpcError, or Cancelled if it was cancelled."""
    return await call


async def next_message(call: Any, messages: AsyncIterator[Any], closed: Event) -> Any:
    """Returns the next message of `call`. Raises RpcError, StopAsyncIteration, or Cancelled once it is closed."""
    try:
        return await anext(messages)
    except asyncio.CancelledError:
        if closed.is_set():
            raise Cancelled(CLOSED) from None
        call.cancel()  # the reading task was cancelled
        raise


async def wait(event: Event, timeout_s: float) -> bool:
    """Waits for the event. Returns False after `timeout_s`."""
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return False
    return True
