"""What the processes of one deployment prove themselves to each other with: a token in each call, certificates in TLS.

The token is made of the cluster secret and never is the secret itself. A process without either trusts everybody, as
one on loopback for a test may. Health and reflection answer everybody: they say nothing about requests.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor

from penstock.client_auth import ClientTls, read_pem
from penstock.errors import ConfigError, Unauthenticated
from penstock.grpc_server import GrpcServer, abort, make_channel
from penstock.secret import ClusterSecret
from penstock.security_config import SecurityConfig, TlsConfig

PEER = "peer token"  # use of the cluster secret: what routers, workers and the controller show each other
ADMIN = "admin token"  # and what an operator shows the Admin service
_OPEN_SERVICES = ("/grpc.health.", "/grpc.reflection.")
_REFUSAL = "authorization: this port takes the deployment's own tokens alone; models are called at the router's ports"

Accept = Callable[[str], Collection[str]]  # method to the tokens that open it


class Trust:
    """One process's means of proof. Raises ConfigError where they cannot be read."""

    def __init__(self, config: SecurityConfig | None = None) -> None:
        config = config or SecurityConfig()
        self.secret = ClusterSecret.of(config)
        self._tls = config.tls
        self._channel_credentials = _client_tls(config.tls).credentials() if config.tls else None

    def channel(self, address: str) -> grpc.aio.Channel:
        """To another process of the deployment."""
        options = _client_tls(self._tls).options() if self._tls else ()
        channel = make_channel(address, self._channel_credentials, options)
        return TokenChannel(channel, self.secret.token(PEER)) if self.secret else channel

    def server(self, services: Sequence[ServiceDescriptor], accept: Accept | None = None) -> GrpcServer:
        """For calls of other processes; `accept` where not every method opens to the peers' token."""
        credentials = server_credentials(self._tls, "security.tls") if self._tls else None
        interceptors = []
        if self.secret is not None:
            peer = (self.secret.token(PEER),)
            interceptors.append(TokenGate(accept or (lambda method: peer)))
        return GrpcServer(services, credentials=credentials, interceptors=interceptors)


class TokenGate(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # untyped base
    """Refuses calls that show no token that opens their method."""

    def __init__(self, accept: Accept) -> None:
        self._accept = accept

    async def intercept_service(self, continuation: Any, details: grpc.HandlerCallDetails) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith(_OPEN_SERVICES):
            return handler
        shown = next((value for key, value in details.invocation_metadata or () if key == "authorization"), "")
        if any(hmac.compare_digest(_bytes(shown), _bytes(f"Bearer {token}")) for token in self._accept(details.method)):
            return handler
        return _refusing(handler)


class TokenChannel(grpc.aio.Channel):  # type: ignore[misc]  # untyped base
    """Shows a token with every call. gRPC's own means for it want TLS, or an interceptor's detour for each message."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self._channel = channel
        self._metadata = (("authorization", f"Bearer {token}"),)

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return self._showing(self._channel.unary_unary(*args, **options))

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return self._showing(self._channel.unary_stream(*args, **options))

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return self._showing(self._channel.stream_unary(*args, **options))

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return self._showing(self._channel.stream_stream(*args, **options))

    def _showing(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, metadata: Sequence[tuple[str, str]] | None = None, **options: Any) -> Any:
            return begin(*args, metadata=(*(metadata or ()), *self._metadata), **options)

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


def server_credentials(tls: TlsConfig, setting: str) -> grpc.ServerCredentials:
    """Raises ConfigError that names the file."""
    key = read_pem(tls.key_file, f"{setting}.key_file")
    chain = read_pem(tls.cert_file, f"{setting}.cert_file")
    if key is None or chain is None:
        raise ConfigError(f"{setting}: cert_file or key_file is empty; give both")
    authority = read_pem(tls.ca_file, f"{setting}.ca_file")
    return grpc.ssl_server_credentials([(key, chain)], authority, require_client_auth=authority is not None)


def _client_tls(tls: TlsConfig) -> ClientTls:
    return ClientTls(tls.ca_file, tls.cert_file, tls.key_file, tls.server_name or None)


def _refusing(handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
    """A handler of the same shape: gRPC reads a unary call's message before it asks the handler."""

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
