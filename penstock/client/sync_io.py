"""Holds the differences of the blocking client from the asyncio one, for which `async_io` has the same names."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from penstock.errors import Cancelled

CLOSED = "the stream was closed"

Event = threading.Event
sleep = time.sleep


def connect(target: str, credentials: grpc.ChannelCredentials | None, options: Sequence[tuple[str, Any]]) -> Any:
    """Returns a channel, which connects on first use."""
    if credentials is None:
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, credentials, options=options)


def start(method: Any, request: Any, **options: Any) -> Any:
    """Starts a unary call without waiting for its answer."""
    return method.future(request, **options)


def answer(call: Any) -> Any:
    """Returns the answer of a started unary call. Raises RpcError, or Cancelled if it was cancelled."""
    try:
        return call.result()
    except grpc.FutureCancelledError:
        raise Cancelled(CLOSED) from None


def next_message(call: Any, messages: Iterator[Any], closed: Event) -> Any:
    """Returns the next message of `call`. Raises RpcError, StopIteration, or Cancelled once it is closed."""
    try:
        return next(messages)
    except grpc.RpcError:
        if closed.is_set():
            raise Cancelled(CLOSED) from None
        raise


def wait(event: Event, timeout_s: float) -> bool:
    """Waits for the event. Returns False after `timeout_s`."""
    return event.wait(timeout_s)
