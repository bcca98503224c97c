"""One attempt at a lookaside stream, in the place of a Generate call: Route at the router, then Stream at the worker.

`penstock.routed_call_async` is its twin. Where the deployment has no lookaside it becomes a Generate call after all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from penstock.errors import Cancelled
from penstock.v1 import inference_pb2, inference_pb2_grpc

# The router sees to a worker that freezes under its own streams; under these the client has to.
PING_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 2_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # also how long connecting may take
)
_NO_LOOKASIDE = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.FAILED_PRECONDITION)


def has_no_lookaside(error: grpc.RpcError) -> bool:
    return error.code() in _NO_LOOKASIDE  # type: ignore[attr-defined]


def address_of(route: inference_pb2.RouteResponse, router: str) -> str:
    """Of the worker; one without a host is at the router's."""
    if not route.address.startswith(":"):
        return route.address
    scheme, separator, rest = router.rpartition("/")
    host, colon, _ = rest.rpartition(":")
    return f"{scheme}{separator}{host if colon else rest}{route.address}"


def channel_options(options: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Those of the channels to routers, with pings that notice a frozen worker."""
    return list((dict(options) | dict(PING_OPTIONS)).items())


class WorkerChannels:
    """A client's channels to decode workers, made on first use. One whose call broke is closed once nobody uses it."""

    def __init__(self, connect: Callable[[str], Any]) -> None:
        self._connect = connect
        self._channels: dict[str, tuple[Any, int]] = {}  # by address, with the number of calls
        self._lock = threading.RLock()  # garbage is collected wherever memory is asked for, and gives back too

    def take(self, address: str) -> Any:
        with self._lock:
            channel, users = self._channels.get(address) or (self._connect(address), 0)
            self._channels[address] = (channel, users + 1)
            return channel

    def give_back(self, address: str, *, broken: bool) -> Any | None:
        """The channel, where it is to be closed now."""
        with self._lock:
            channel, users = self._channels[address]
            if users == 1 and broken:
                del self._channels[address]
                return channel
            self._channels[address] = (channel, users - 1)
            return None

    def take_all(self) -> list[Any]:
        """To close them."""
        with self._lock:
            channels, self._channels = [channel for channel, _ in self._channels.values()], {}
            return channels


class RoutedCall:
    """Reads like the call that it replaces. Sends `Route` at once, and waits for nothing before the first read."""

    def __init__(
        self,
        router: str,
        stub: inference_pb2_grpc.InferenceStub,
        channels: WorkerChannels,
        request: inference_pb2.GenerateRequest,
        timeout_s: float | None,
        metadata: tuple[tuple[str, str], ...],
    ) -> None:
        self._router = router
        self._stub = stub
        self._channels = channels
        self._request = request
        self._timeout_s = timeout_s
        self._metadata = metadata
        self._route = stub.Route.future(request, timeout=timeout_s, metadata=metadata)
        self._stream: Any = None
        self._address = ""
        self._lock = threading.Lock()
        self._cancelled = False
        self._has_answered = False

    def __next__(self) -> inference_pb2.GenerateResponse:
        """Raises RpcError, of whichever call failed, and Cancelled."""
        if self._stream is None:
            self._begin()
        try:
            message: inference_pb2.GenerateResponse = next(self._stream)
        except StopIteration:
            self._leave(broken=False)
            raise
        except grpc.RpcError as error:
            self._leave(broken=error.code() is grpc.StatusCode.UNAVAILABLE)  # type: ignore[attr-defined]
            raise
        self._has_answered = True
        return message

    def _begin(self) -> None:
        try:
            route = self._route.result()
        except grpc.FutureCancelledError:
            raise Cancelled("the stream was closed") from None
        except grpc.RpcError as error:
            if not has_no_lookaside(error):
                raise
            self._open(lambda: self._stub.Generate(self._request, timeout=self._timeout_s, metadata=self._metadata))
            return
        address = address_of(route, self._router)
        self._open(lambda: self._stream_at(address, route.ticket))

    def _stream_at(self, address: str, ticket: bytes) -> Any:
        self._address = address
        stub = inference_pb2_grpc.LookasideStub(self._channels.take(address))
        return stub.Stream(inference_pb2.StreamRequest(ticket=ticket), timeout=self._timeout_s)

    def _open(self, start: Callable[[], Any]) -> None:
        with self._lock:
            if self._cancelled:
                raise Cancelled("the stream was closed")
            self._stream = start()

    @property
    def has_failed_there(self) -> bool:
        """It was routed, and no token came."""
        return self._stream is not None and not self._has_answered

    def _leave(self, *, broken: bool) -> None:
        with self._lock:
            address, self._address = self._address, ""
        closing = self._channels.give_back(address, broken=broken) if address else None
        if closing is not None:
            closing.close()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
        self._route.cancel()
        if self._stream is not None:
            self._stream.cancel()
            self._leave(broken=False)

    def is_active(self) -> bool:
        return self._stream is None or bool(self._stream.is_active())

    def trailing_metadata(self) -> list[tuple[str, str | bytes]]:
        """Of both calls: the router tells its decision with the route."""
        return [*(self._route.trailing_metadata() or ()), *(self._stream.trailing_metadata() or ())]

    def __del__(self) -> None:
        if self._stream is not None:
            self._leave(broken=False)
