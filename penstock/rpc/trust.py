"""Authenticates the processes of one deployment to each other: a token in each call, certificates in TLS.

The token is derived from the cluster secret. Secret and certificates are read again when their files change. A process
without them trusts every caller, which is only safe on loopback. Health and reflection answer everybody, since they
reveal nothing about requests.
"""

from __future__ import annotations

import functools
import hmac
from collections.abc import Callable, Collection, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor

from penstock.config.security import SecurityConfig, TlsConfig
from penstock.errors import Unauthenticated
from penstock.rpc.reload import FileWatcher, WatchedFiles
from penstock.rpc.renewed_channel import RenewedChannel
from penstock.rpc.secret import PEER, ClusterSecrets
from penstock.rpc.server import GrpcServer, abort, make_channel
from penstock.rpc.tls import CertificateFiles, ClientTls, ServerCertificate

_OPEN_SERVICES = ("/grpc.health.", "/grpc.reflection.")
_REFUSAL = "authorization: this port accepts only the deployment's own tokens; call models at the router's ports"

Accept = Callable[[str], Collection[str]]  # maps a method to its accepted tokens


class Trust:
    """A process's credentials, read from files that may change while it runs. Its creator awaits `watcher.follow` in a
    task. Raises ConfigError if they cannot be read.
    """

    def __init__(
        self,
        config: SecurityConfig | None = None,
        on_read: Callable[[WatchedFiles[Any]], None] = lambda files: None,
    ) -> None:
        """`on_read` is called after files were read again or refused."""
        config = config or SecurityConfig()
        self.watcher = FileWatcher(on_read)
        self._tls = config.tls
        self._secrets: WatchedFiles[ClusterSecrets] | None = None
        self._channel_credentials: WatchedFiles[grpc.ChannelCredentials] | None = None
        if config.secret_file:
            name = "security.secret_file"
            read = functools.partial(ClusterSecrets.read, config.secret_file, name)
            self._secrets = self.watcher.watch(name, (config.secret_file,), read)
        if config.tls is not None:
            tls = config.tls
            self._certificate = ServerCertificate(tls, "security.tls", self.watcher)
            paths = (tls.ca_file, tls.cert_file, tls.key_file)
            self._channel_credentials = self.watcher.watch("security.tls (calls)", paths, lambda: _to_call_with(tls))

    @property
    def secrets(self) -> ClusterSecrets | None:
        """The cluster secrets as they were read last; None if the process has none."""
        return self._secrets.value if self._secrets is not None else None

    def tokens(self, use: str) -> tuple[str, ...]:
        """Returns the accepted tokens of one use of the cluster secret, none without a secret."""
        return self.secrets.tokens(use) if self.secrets is not None else ()

    def channel(self, address: str, use: str = PEER) -> grpc.aio.Channel:
        """Opens a channel to another process of the deployment; its calls carry the token of this use."""
        channel = self._connect(address)
        secrets = self._secrets
        return TokenChannel(channel, lambda: secrets.value.current.token(use)) if secrets is not None else channel

    def _connect(self, address: str) -> grpc.aio.Channel:
        if self._tls is None or self._channel_credentials is None:
            return make_channel(address)
        options, credentials = ClientTls.from_config(self._tls).options(), self._channel_credentials
        return RenewedChannel(
            lambda: make_channel(address, credentials.value, options), version=lambda: credentials.version
        )

    def server(self, services: Sequence[ServiceDescriptor], accept: Accept | None = None) -> GrpcServer:
        """Makes a server for other processes. `accept` lets methods accept tokens other than the peer token."""
        credentials = self._certificate.grpc_credentials() if self._tls else None
        interceptors = []
        if self._secrets is not None:
            interceptors.append(TokenGate(accept or (lambda method: self.tokens(PEER))))
        return GrpcServer(services, credentials=credentials, interceptors=interceptors)


def _to_call_with(tls: TlsConfig) -> grpc.ChannelCredentials:
    """Returns the credentials for calls. Raises ConfigError if the files cannot be used."""
    CertificateFiles.read(tls, "security.tls")
    return ClientTls.from_config(tls).credentials()


class TokenGate(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # untyped base
    """Refuses calls whose method does not accept their token."""

    def __init__(self, accept: Accept) -> None:
        self._accept = accept

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith(_OPEN_SERVICES):
            return handler
        presented = next((value for key, value in details.invocation_metadata or () if key == "authorization"), "")
        if any(
            hmac.compare_digest(_bytes(presented), _bytes(f"Bearer {token}")) for token in self._accept(details.method)
        ):
            return handler
        return _refusing(handler)


class TokenChannel(grpc.aio.Channel):  # type: ignore[misc]  # untyped base
    """Adds a token to every call. gRPC's own call credentials require TLS, and its interceptors slow every message
    down.
    """

    def __init__(self, channel: grpc.aio.Channel, token: Callable[[], str]) -> None:
        """`token` returns the token to present now."""
        self._channel = channel
        self._token = token

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return self._with_token(self._channel.unary_unary(*args, **options))

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return self._with_token(self._channel.unary_stream(*args, **options))

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return self._with_token(self._channel.stream_unary(*args, **options))

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return self._with_token(self._channel.stream_stream(*args, **options))

    def _with_token(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, metadata: Sequence[tuple[str, str]] | None = None, **options: Any) -> Any:
            own = ("authorization", f"Bearer {self._token()}")
            return begin(*args, metadata=(*(metadata or ()), own), **options)

        return call

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def __aenter__(self) -> TokenChannel:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *exception: Any) -> None:
        await self._channel.__aexit__(*exception)


def _refusing(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    """Returns a handler of the same kind that refuses calls; gRPC reads a unary message before it calls a handler."""

    async def refuse(request: object, context: grpc.aio.ServicerContext) -> None:
        await abort(context, Unauthenticated(_REFUSAL))

    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(refuse)


def _bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()
