"""Configures the client's channels, and keeps the channels to decode workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from penstock.client.retry import Failure
from penstock.errors import PenstockError
from penstock.rpc.failed_call import failed_call, is_answered
from penstock.v1 import inference_pb2
from penstock.wire import MAX_MESSAGE_BYTES

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_retries", 0),  # the client retries itself, as it knows whether a token has arrived
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    # While a channel waits before it reconnects, calls fail at once; gRPC's default limit of 120 s outlasts any
    # restart.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # bounds the time to connect: gRPC's default of 20 s looks like a hang
)
# gRPC has no code for a refused connection, only these messages. A failed TLS handshake begins the same way but is
# permanent.
_NOT_CONNECTED = "failed to connect to all addresses"
_REFUSED = ("Connection refused", "Connection reset", "timed out before receiving SETTINGS", "Connection timed out")
# With lookaside, the client itself must notice a frozen worker; otherwise its router does.
_WORKER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # also bounds the time to connect
)
_NO_LOOKASIDE = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.FAILED_PRECONDITION)


def has_no_lookaside(error: grpc.RpcError) -> bool:
    """Returns whether `Route` failed because the deployment has lookaside turned off."""
    return error.code() in _NO_LOOKASIDE  # type: ignore[attr-defined]


def is_unreachable(error: grpc.RpcError) -> bool:
    return error.code() is grpc.StatusCode.UNAVAILABLE  # type: ignore[attr-defined]


def failure_of(error: grpc.RpcError) -> Failure:
    """Returns how far a failed call got. Penstock's servers send details with every error."""
    if not is_unreachable(error) or is_answered(error):
        return Failure.ANSWERED
    text = error.details() or ""  # type: ignore[attr-defined]
    is_refused = text.startswith(_NOT_CONNECTED) and any(reason in text for reason in _REFUSED)
    return Failure.REFUSED if is_refused else Failure.BROKEN


def error_of(error: grpc.RpcError, targets: Sequence[str]) -> PenstockError:
    """Returns the typed error of a failed call to one of these routers."""
    return failed_call(error, " or ".join(targets), "give a router's gRPC address (host:port, by default port 50051)")


def worker_address(route: inference_pb2.RouteResponse, router: str) -> str:
    """Returns the address of the routed worker; without a host it is on the router's host."""
    if not route.address.startswith(":"):
        return route.address
    scheme, separator, rest = router.rpartition("/")
    host, colon, _ = rest.rpartition(":")
    return f"{scheme}{separator}{host if colon else rest}{route.address}"


def worker_options(options: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Returns the options of channels to routers, with pings that notice a frozen worker."""
    return list((dict(options) | dict(_WORKER_OPTIONS)).items())


class WorkerChannels:
    """A client's channels to decode workers, opened on first use. A channel with a broken call closes after its last
    user.

    Thread-safe.
    """

    def __init__(self, connect: Callable[[str], Any]) -> None:
        self._connect = connect
        self._channels: dict[str, tuple[Any, int]] = {}  # channel and number of calls by address
        self._lock = threading.RLock()  # a finalizer may release a channel while this thread holds the lock

    def acquire(self, address: str) -> Any:
        with self._lock:
            channel, users = self._channels.get(address) or (self._connect(address), 0)
            self._channels[address] = (channel, users + 1)
            return channel

    def release(self, address: str, *, broken: bool) -> Any | None:
        """Returns the channel if the caller must close it now."""
        with self._lock:
            channel, users = self._channels[address]
            if users == 1 and broken:
                del self._channels[address]
                return channel
            self._channels[address] = (channel, users - 1)
            return None

    def remove_all(self) -> list[Any]:
        """Returns all channels, which the caller must close."""
        with self._lock:
            channels, self._channels = [channel for channel, _ in self._channels.values()], {}
            return channels
