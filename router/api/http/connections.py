"""Bounds the number of connections to the HTTP port and the time that one may take to send a request's headers.

uvicorn bounds neither. It creates our protocol for each connection, which counts the connection, watches it until a
request begins, and refuses it with an error that names the exceeded limit. Over TLS, the protocol also adds the names
in the client's certificate to each request's scope, which uvicorn does not expose.
"""

from __future__ import annotations

import asyncio
import functools
import http
import ipaddress
import json
import logging
import socket
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from penstock.config.limits import LimitsConfig
from penstock.errors import InvalidInput, Overloaded, PenstockError, Unavailable
from penstock.rpc.tls import ServerCertificate
from router.api.limits import UnreadRequest
from router.api.openai.responses import error_json
from router.metrics.metrics import RouterMetrics

# Keys of a request's scope.
SUBJECTS = "penstock.subjects"  # the names in the client certificate that TLS verified
ABORT = "penstock.abort"  # a function that closes the connection at once, without sending what is buffered

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0
_OTHER_FILES = 512  # open files of a router that are not client connections: workers, peers, the model, logs


def peer_of(address: str) -> str:
    """Returns what counts as one peer: an IPv4 address, or an IPv6 address's /64 network, which one host can own."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return address


def connections_for(max_files: int, limits: LimitsConfig) -> int:
    """Returns how many connections each of the two public ports may have if `max_files` files may be open."""
    allowed = max(1, (max_files - _OTHER_FILES) // 2)
    if allowed < limits.connections:
        log.warning(
            "the limit of %d open files allows %d connections to each port, less than limits.connections = %d; raise "
            "it (ulimit -Hn)",
            max_files,
            allowed,
            limits.connections,
        )
    return min(limits.connections, allowed)


class ConnectionCounts:
    """Counts the open connections to the HTTP port, in total and by peer."""

    def __init__(self, limits: LimitsConfig, max_connections: int, metrics: RouterMetrics) -> None:
        self.limits = limits
        self.metrics = metrics
        self._max_connections = max_connections
        self._by_peer: Counter[str] = Counter()
        self.num_open = 0

    def enter(self, peer: str) -> None:
        """Counts a connection; `leave` must follow. Raises Unavailable or Overloaded if it exceeds a limit."""
        if self.num_open >= self._max_connections:
            self.metrics.limited("connections")
            problem = f"this port has reached its limit of {self.num_open} connections (limits.connections)"
            raise Unavailable(f"{problem}; try another router", _RETRY_AFTER_S)
        if self._by_peer[peer] >= self.limits.connections_per_peer:
            self.metrics.limited("connections_per_peer")
            problem = (
                f"{peer} has reached the limit of {self._by_peer[peer]} connections (limits.connections_per_peer); "
                "reuse its connections"
            )
            raise Overloaded(problem, _RETRY_AFTER_S)
        self.num_open += 1
        self._by_peer[peer] += 1

    def leave(self, peer: str) -> None:
        self.num_open -= 1
        self._by_peer[peer] -= 1
        if not self._by_peer[peer]:
            del self._by_peer[peer]


class HttpConnection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # chosen by uvicorn when it is imported
    """A connection. Adds `SUBJECTS` and `ABORT` to the scope of its requests."""

    app: ASGIApp

    def __init__(self, counts: ConnectionCounts, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counts = counts
        self._peer: str | None = None  # None unless the connection is counted
        self._headers_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        peer = peer_of(self.client[0]) if self.client else ""
        try:
            self._counts.enter(peer)
        except PenstockError as error:
            self._refuse(error)
            return
        self._peer = peer
        extra: dict[str, Any] = {ABORT: transport.abort}
        connection = transport.get_extra_info("ssl_object")
        if connection is not None and (subjects := _subjects_of(connection.getpeercert())):
            extra[SUBJECTS] = subjects
        self.app = _with_scope(self.app, extra)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        if self._headers_timer is None and not self._is_serving:
            self._await_headers()
        super().data_received(data)
        if self._is_serving:
            self._stop_timer()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        if isinstance(error, TimeoutError):  # raised by the kernel, see `bound_unread`
            self._counts.metrics.limited("write_stall_s")
            log.warning("closed a connection from %s: its client does not read (limits.write_stall_s)", self._peer)
        if self._peer is not None:
            self._counts.leave(self._peer)
            self._peer = None
        super().connection_lost(error)

    def send_400_response(self, problem: str) -> None:
        """Refuses a request that uvicorn cannot parse. uvicorn calls this while it handles its parser's error."""
        if self._is_serving:  # the response of this or an earlier request may have begun
            super().send_400_response(problem)
        elif getattr(sys.exception(), "error_status_hint", 400) == 431:  # h11: headers too long
            limit = self._counts.limits.header_bytes
            self._counts.metrics.limited("header_bytes")
            self._refuse(UnreadRequest("headers", f"are too long; send {limit} bytes or fewer", 431))
        else:
            self._refuse(InvalidInput("request", "is not valid HTTP/1.1; send a valid one"))

    @property
    def _is_serving(self) -> bool:
        """Returns whether a request has begun and its response is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _await_headers(self) -> None:
        self._headers_timer = self.loop.call_later(self._counts.limits.header_timeout_s, self._on_headers_late)

    def _stop_timer(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None

    def _on_headers_late(self) -> None:
        self._headers_timer = None
        limit_s = self._counts.limits.header_timeout_s
        self._counts.metrics.limited("header_timeout_s")
        self._refuse(UnreadRequest("headers", f"did not arrive within {limit_s:g} s; send them faster", 408))

    def _refuse(self, error: PenstockError) -> None:
        """Sends an error before any request has begun, and closes the connection."""
        self._stop_timer()
        log.info("refused a connection from %s: %s", self.client, error.message)
        body = json.dumps(error_json(error)).encode()
        status = http.HTTPStatus(error.http_status)
        head = [
            f"HTTP/1.1 {status.value} {status.phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            "connection: close",
        ]
        if isinstance(error, Unavailable):
            head.append(f"retry-after: {_RETRY_AFTER_S:g}")
        self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
        self.transport.close()


def http_protocol(counts: ConnectionCounts) -> Any:
    """Returns the factory that uvicorn creates its connections with."""
    return functools.partial(HttpConnection, counts)


def bound_unread(listener: socket.socket, limits: LimitsConfig) -> None:
    """Makes the kernel close connections of the listener whose client receives nothing for `write_stall_s`.

    This process's writes end in the kernel's buffer, so the kernel detects a stalled client earlier. It also does so
    after this process has written everything and closed the connection.
    """
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None:  # Linux
        listener.setsockopt(socket.IPPROTO_TCP, option, int(limits.write_stall_s * 1e3))


def _with_scope(app: ASGIApp, extra: dict[str, Any]) -> ASGIApp:
    """Returns the app with `extra` in the scope of its requests. Requests whose body has no certain end are refused."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope.get("headers", ())}
        if b"content-length" in names and b"transfer-encoding" in names:
            await _two_lengths()(scope, receive, send)
            return
        await app({**scope, **extra}, receive, send)

    return call


def _two_lengths() -> JSONResponse:
    """Answers a request with two lengths, which a proxy ahead of this router may have read differently (RFC 9112, 6.1).

    The connection ends with the answer, so that nothing of the body is taken for another request.
    """
    problem = "have both content-length and transfer-encoding, which disagree about the body; send one of them"
    return JSONResponse(error_json(InvalidInput("headers", problem)), 400, {"connection": "close"})


def tls_settings(certificate: ServerCertificate | None, *, asks_for_certificate: bool) -> dict[str, Any]:
    """Returns the keyword arguments for uvicorn that make it serve with this certificate."""
    if certificate is None:
        return {}
    context = certificate.ssl_context(asks_for_certificate=asks_for_certificate)
    return {"ssl_context_factory": lambda config, default: context}


def _subjects_of(certificate: Mapping[str, Any] | None) -> list[str]:
    """Returns the alternative names, then the common names, in a certificate that `SSLObject.getpeercert` returned."""
    if not certificate:
        return []
    names = [value for _, value in certificate.get("subjectAltName", ())]
    common = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return names + common
