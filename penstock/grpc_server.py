"""One way to make a gRPC server and a channel: health, reflection, keepalive, limits, tidy errors.

A peer that is killed closes its sockets at once; a frozen one shows only by unanswered pings, so both ends ping.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from penstock.config import MAX_MESSAGE_BYTES
from penstock.errors import (
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    PenstockError,
    to_status,
)
from penstock.v1 import worker_pb2

log = logging.getLogger(__name__)

StartT = TypeVar("StartT", worker_pb2.PrefillCommand, worker_pb2.AdoptCommand, worker_pb2.TakeCommand)

_PING_INTERVAL_MS = 1000
_PING_TIMEOUT_MS = 1000  # a frozen peer is noticed within about 2 s; grpc's default is 60 s
LIVE = "live"  # the health service's name for whether the process answers at all; "" is whether it takes work
_START_TIMEOUT_S = 10.0  # from opening a call to its first command
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
]
_KEEPALIVE: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", _PING_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
_PING_POLICY: list[tuple[str, int]] = [
    ("grpc.http2.min_ping_interval_without_data_ms", _PING_INTERVAL_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second listener
]


Dial = Callable[[str], grpc.aio.Channel]  # an address to a channel that calls may go over


def make_channel(
    address: str, credentials: grpc.ChannelCredentials | None = None, options: Iterable[tuple[str, str]] = ()
) -> grpc.aio.Channel:
    """A channel that notices a frozen peer; insecure without credentials."""
    # A worker that restarts on its old port must not meet the dead subchannel of its predecessor.
    every = [*_OPTIONS, *_KEEPALIVE, ("grpc.use_local_subchannel_pool", 1), *options]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=every)
    return grpc.aio.secure_channel(address, credentials, options=every)


def log_level(error: Exception) -> int:
    """Of a peer that is out of reach: they come and go, but one that refuses us will do so until somebody mends it."""
    refused = isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
    return logging.WARNING if refused else logging.INFO


class GrpcServer:
    """A grpc.aio server with the health service (NOT_SERVING until told otherwise) and reflection."""

    def __init__(
        self,
        services: Sequence[ServiceDescriptor],
        *,
        keepalive: bool = True,
        credentials: grpc.ServerCredentials | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        limits: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`keepalive` pings callers; off for the public port, whose callers may sit behind proxies.

        `credentials` turn TLS on. `limits` are gRPC's own options, over those that hold everywhere.
        """
        options = dict([*_OPTIONS, *_PING_POLICY, *(_KEEPALIVE if keepalive else [])]) | dict(limits)
        self.server = grpc.aio.server(interceptors=interceptors, options=list(options.items()))
        self._credentials = credentials
        self._names = [service.full_name for service in services]
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection([*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self.server)
        self.port = 0

    async def start(self, host: str, port: int, key: str = "port") -> int:
        """Listens; returns the port. Raises ConfigError that names `key` where the port is taken."""
        try:
            self.port = self._listen(f"{host}:{port}")
        except RuntimeError as error:
            raise ConfigError(f"{key} = {port}: cannot listen on {host}:{port}; free it or choose another") from error
        await self.set_serving(False)
        await self._health.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
        await self.server.start()
        return self.port

    def _listen(self, address: str) -> int:
        if self._credentials is None:
            return self.server.add_insecure_port(address)
        return self.server.add_secure_port(address, self._credentials)

    def add_control_port(self, host: str) -> int:
        """One more port, before `start`, without TLS: for whoever supervises this process on its own machine."""
        return self.server.add_insecure_port(f"{host}:0")

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ["", *self._names]:
            await self._health.set(name, status)

    async def stop(self, grace_s: float = 0.5) -> None:
        """New calls are refused at once; those under way have `grace_s` to end."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


async def abort(context: grpc.aio.ServicerContext, error: PenstockError) -> NoReturn:
    """Ends a call with the google.rpc status of `error`."""
    status = to_status(error)
    metadata = (("grpc-status-details-bin", status.SerializeToString()),)
    await context.abort(error.code, status.message, trailing_metadata=metadata)
    raise AssertionError("context.abort returned")


async def read_start(commands: AsyncIterator[StartT]) -> StartT:
    """The first command of a call. Raises InvalidInput, or DeadlineExceeded where none comes."""
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            command = await anext(commands)
    except StopAsyncIteration:
        raise InvalidInput("command", "is missing; the call must begin with start") from None
    except TimeoutError:
        raise DeadlineExceeded(f"no start command within {_START_TIMEOUT_S:g} s") from None
    if command.WhichOneof("command") != "start":
        raise InvalidInput("command", f"is {command.WhichOneof('command')}; the call must begin with start")
    return command


@dataclass(frozen=True, slots=True)
class Shown:
    """What a caller shows of itself."""

    authorization: str | None
    subjects: list[str]  # names in its certificate, which TLS has verified
    encrypted: bool


def credentials(context: grpc.aio.ServicerContext) -> Shown:
    metadata = context.invocation_metadata() or ()
    authorization = next((value for key, value in metadata if key == "authorization"), None)
    verified = context.auth_context()
    names = [*verified.get("x509_subject_alternative_name", ()), *verified.get("x509_common_name", ())]
    encrypted = b"ssl" in verified.get("transport_security_type", ())
    return Shown(authorization, [name.decode(errors="replace") for name in names], encrypted)


@contextlib.asynccontextmanager
async def typed_errors(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Turns a PenstockError inside the block into the call's status, and a fault of ours into a plain INTERNAL."""
    try:
        yield
    except PenstockError as error:
        await abort(context, error)
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        log.exception("a handler failed")
        await abort(context, InternalError(f"internal error: {type(error).__name__}"))
