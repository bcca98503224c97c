"""Makes gRPC servers and channels: health, reflection, keepalive, limits, typed errors.

A killed peer closes its sockets at once, but a frozen one only leaves pings unanswered, so both ends ping.
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
from grpc_reflection.v1alpha import reflection, reflection_pb2

from penstock.errors import (
    STATUS_DETAILS,
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    PenstockError,
    to_status,
)
from penstock.v1 import worker_pb2
from penstock.wire import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)

StartT = TypeVar("StartT", worker_pb2.PrefillCommand, worker_pb2.MigrationCommand, worker_pb2.ReceivePagesCommand)

_PING_INTERVAL_MS = 1000
_PING_TIMEOUT_MS = 1000  # a frozen peer is noticed within about 2 s; grpc's default is 60 s
LIVE = "live"  # health service name: whether the process answers; "": whether it takes work
_REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
_START_TIMEOUT_S = 10.0  # limit from the start of a call to its first command
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
# Limits how often callers may ping any server.
PING_POLICY: list[tuple[str, int]] = [
    ("grpc.http2.min_ping_interval_without_data_ms", _PING_INTERVAL_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
]


Dial = Callable[[str], grpc.aio.Channel]  # opens a channel to an address


def make_channel(
    address: str, credentials: grpc.ChannelCredentials | None = None, options: Iterable[tuple[str, str]] = ()
) -> grpc.aio.Channel:
    """Opens a channel that notices a frozen peer; it uses plain text without credentials."""
    # With its own subchannel pool, a channel to a restarted worker does not get the dead subchannel of its predecessor.
    all_options = [*_OPTIONS, *_KEEPALIVE, ("grpc.use_local_subchannel_pool", 1), *options]
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=all_options)
    return grpc.aio.secure_channel(address, credentials, options=all_options)


def log_level(error: Exception) -> int:
    """Returns the log level for an unreachable peer: peers come and go, but a refused token needs an operator."""
    refused = isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
    return logging.WARNING if refused else logging.INFO


class GrpcServer:
    """A grpc.aio server with reflection and the health service, which reports NOT_SERVING until `set_serving`."""

    def __init__(
        self,
        services: Sequence[ServiceDescriptor],
        *,
        keepalive: bool = True,
        credentials: grpc.ServerCredentials | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        limits: Mapping[str, int] = MappingProxyType({}),
        max_calls: int | None = None,
        shares_port: bool = False,
        names: Sequence[str] = (),
        live_names: Sequence[str] = (),
    ) -> None:
        """`keepalive` pings callers; it is off for public ports, whose callers may be behind proxies. `credentials`
        turn TLS on. `limits` are gRPC options that override the common ones. Concurrent calls beyond `max_calls` are
        refused with RESOURCE_EXHAUSTED. With `shares_port` other servers may listen at the same port, and the system
        gives each new connection to one of them. The health service reports under `names` what it reports under the
        names of `services`, and under `live_names` that the process is alive.
        """
        options = dict([*_OPTIONS, *PING_POLICY, *(_KEEPALIVE if keepalive else [])]) | dict(limits)
        options["grpc.so_reuseport"] = int(shares_port)
        self.server = grpc.aio.server(
            interceptors=interceptors, options=list(options.items()), maximum_concurrent_rpcs=max_calls
        )
        self._credentials = credentials
        described = [service.full_name for service in services]
        self._names = [*described, *names]
        self._live_names = (LIVE, *live_names)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        _add_reflection(self.server, [*described, health.SERVICE_NAME])
        self.port = 0

    async def start(self, host: str, port: int, key: str = "port", also_on: str = "") -> int:
        """Listens on `host`, and on the host `also_on` at the same port, and returns the port. Raises ConfigError that
        names `key` if the port is taken."""
        self.port = port
        for each in (host, also_on) if also_on else (host,):
            try:
                self.port = self._listen(f"{each}:{self.port}")
            except RuntimeError as error:
                problem = f"{key} = {port}: cannot listen on {each}:{self.port}; free it or choose another"
                raise ConfigError(problem) from error
        await self.set_serving(False)
        for name in self._live_names:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        await self.server.start()
        return self.port

    def _listen(self, address: str) -> int:
        if self._credentials is None:
            return self.server.add_insecure_port(address)
        return self.server.add_secure_port(address, self._credentials)

    def add_control_port(self, host: str) -> int:
        """Adds a port without TLS for a supervisor on the same machine and returns it. Call it before `start`."""
        return self.server.add_insecure_port(f"{host}:0")

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ["", *self._names]:
            await self._health.set(name, status)

    async def stop(self, grace_s: float = 0.5) -> None:
        """Refuses new calls at once; calls in flight get `grace_s` to end."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


def _add_reflection(server: grpc.aio.Server, names: Sequence[str]) -> None:
    """Adds both versions of reflection, which have the same messages, since tools ask for one or the other."""
    names = [*names, _REFLECTION_V1, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server)
    handler = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(names).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_REFLECTION_V1, methods),))


async def abort(context: grpc.aio.ServicerContext, error: PenstockError) -> NoReturn:
    """Ends a call with the google.rpc status of `error`, or with a reset if its client does not read."""
    status = to_status(error)
    metadata = ((STATUS_DETAILS, status.SerializeToString()),)
    try:
        await context.abort(error.code, status.message, trailing_metadata=metadata)
    except grpc.aio.InternalError:  # earlier writes have not been read, or the client is gone
        log.info("reset a call whose client reads no status: %s", status.message)
        raise asyncio.CancelledError from None  # ends the call without a traceback
    raise AssertionError("context.abort returned")


async def read_start(commands: AsyncIterator[StartT]) -> StartT:
    """Reads the first command of a call. Raises InvalidInput, or DeadlineExceeded if none comes."""
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
class CallerCredentials:
    """The credentials of a caller."""

    authorization: str | None
    subjects: list[str]  # names in its verified certificate
    encrypted: bool


def read_credentials(context: grpc.aio.ServicerContext) -> CallerCredentials:
    metadata = context.invocation_metadata() or ()
    authorization = next((value for key, value in metadata if key == "authorization"), None)
    verified = context.auth_context()
    names = [*verified.get("x509_subject_alternative_name", ()), *verified.get("x509_common_name", ())]
    encrypted = b"ssl" in verified.get("transport_security_type", ())
    return CallerCredentials(authorization, [name.decode(errors="replace") for name in names], encrypted)


@contextlib.asynccontextmanager
async def typed_errors(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Turns a PenstockError in the block into the call's status, and any other error into a plain INTERNAL."""
    try:
        yield
    except PenstockError as error:
        await abort(context, error)
    except grpc.aio.AbortError:
        raise
    except grpc.aio.InternalError as error:  # a read or write after the client was gone
        log.info("a call ended while it was served: %s", error)
        raise asyncio.CancelledError from None
    except Exception as error:
        log.exception("a handler failed")
        await abort(context, InternalError(f"internal error: {type(error).__name__}"))
