"""Bounds the connections to the HTTP port: how many there are, and how long one may take to send a request's headers.

The server library bounds neither. It hands each connection to a protocol of ours, which counts it, watches it until its
request has begun, and refuses what is over a limit with an error that names it. Over TLS, a request also learns the
names in its client's certificate, which the library does not expose.
"""

from __future__ import annotations

import asyncio
import functools
import http
import ipaddress
import json
import logging
import socket
from collections import Counter
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from penstock.config.limits import LimitsConfig
from penstock.errors import Overloaded, PenstockError, Unavailable
from penstock.rpc.tls import ServerCertificate
from router.api.limits import UnreadRequest
from router.api.openai.responses import error_json
from router.metrics.metrics import RouterMetrics

SUBJECTS = "penstock.subjects"  # key of a request's scope: names in the client certificate that TLS has verified
ABORT = "penstock.abort"  # key of a request's scope: closes its connection at once, whatever is unsent

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0
_FILES_BESIDE = 512  # open files of a router besides its clients' connections: workers, peers, the model, logs


def peer_of(address: str) -> str:
    """Returns what counts as one peer: an IPv4 address, or the /64 network of an IPv6 address, which one host owns."""
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
    """Returns how many connections each of the two public ports may have with so many open files."""
    allowed = max(1, (max_files - _FILES_BESIDE) // 2)
    if allowed < limits.connections:
        log.warning(
            "%d open files allow %d connections to a port, and limits.connections = %d; raise the limit (ulimit -Hn)",
            max_files,
            allowed,
            limits.connections,
        )
    return min(limits.connections, allowed)


class ConnectionCounts:
    """The open connections to the HTTP port, in all and by peer."""

    def __init__(self, limits: LimitsConfig, max_connections: int, metrics: RouterMetrics) -> None:
        self.limits = limits
        self.metrics = metrics
        self._max_connections = max_connections
        self._by_peer: Counter[str] = Counter()
        self.num_open = 0

    def enter(self, peer: str) -> None:
        """Counts a connection; `leave` must follow. Raises Overloaded or Unavailable if it is one too many."""
        if self.num_open >= self._max_connections:
            self.metrics.limited("connections")
            problem = f"this port has {self.num_open} connections, its limit (limits.connections); try another router"
            raise Unavailable(problem, _RETRY_AFTER_S)
        if self._by_peer[peer] >= self.limits.connections_per_peer:
            self.metrics.limited("connections_per_peer")
            problem = (
                f"{peer} has {self._by_peer[peer]} connections, the limit (limits.connections_per_peer); reuse them"
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
    """A connection. Its requests find its certificate's names and the way to abort it in their scope."""

    app: ASGIApp

    def __init__(self, counts: ConnectionCounts, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counts = counts
        self._peer: str | None = None  # while it is counted
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
        if isinstance(error, TimeoutError):  # of the kernel, see `bound_unread`
            self._counts.metrics.limited("write_stall_s")
            log.warning("a connection from %s is cut off: its client does not read (limits.write_stall_s)", self._peer)
        if self._peer is not None:
            self._counts.leave(self._peer)
            self._peer = None
        super().connection_lost(error)

    @property
    def _is_serving(self) -> bool:
        """Returns whether a request has begun whose response is not complete."""
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
        """Answers without a request to answer, and closes the connection."""
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
    """Returns what uvicorn makes its connections with."""
    return functools.partial(HttpConnection, counts)


def bound_unread(listener: socket.socket, limits: LimitsConfig) -> None:
    """Lets the kernel end connections of the listener whose peer takes nothing for `write_stall_s`.

    It notices before this process does, whose writes go into the kernel's buffer, and also once everything is written
    and the connection is closed, but not read.
    """
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None:  # Linux
        listener.setsockopt(socket.IPPROTO_TCP, option, int(limits.write_stall_s * 1e3))


def _with_scope(app: ASGIApp, extra: dict[str, Any]) -> ASGIApp:
    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, **extra}, receive, send)

    return call


def tls_settings(certificate: ServerCertificate | None, *, asks_for_certificate: bool) -> dict[str, Any]:
    """Returns keyword arguments for uvicorn."""
    if certificate is None:
        return {}
    context = certificate.ssl_context(asks_for_certificate=asks_for_certificate)
    return {"ssl_context_factory": lambda config, default: context}


def _subjects_of(certificate: Mapping[str, Any] | None) -> list[str]:
    """Returns the alternative names, then the common names, of what `SSLObject.getpeercert` returns."""
    if not certificate:
        return []
    names = [value for _, value in certificate.get("subjectAltName", ())]
    common = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return names + common
