"""The HTTP port at which Prometheus scrapes one worker. It answers in its own thread, never on the step loop."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_IDLE_S = 5.0  # idle connections are closed after this long
_POLL_S = 0.05  # how often the thread looks whether it is to end: a flip and a restart wait for it


class MetricsPort:
    """Listens from its construction to `close`. Scrapers need no token, as a worker's metrics reveal nothing about
    requests.
    """

    def __init__(self, host: str, port: int, *collectors: Collector, last_port: int | None = None) -> None:
        """Listens on the first free port from `port` to `last_port`, on any if `port` is 0. Raises ConfigError if none
        is free.
        """
        registry = CollectorRegistry()
        for collector in collectors:
            registry.register(collector)
        ProcessCollector(registry=registry)
        server_type = _Ipv6Server if ":" in host else _Server
        tried = range(port, (last_port or port) + 1)
        for number in tried:
            try:
                self._server = make_server(host, number, _make_app(registry), server_type, _Handler)
                break
            except OSError as error:
                if number == tried[-1]:
                    ports = str(port) if len(tried) == 1 else f"{port} to {number}"
                    raise ConfigError(
                        f"metrics_port = {ports}: cannot listen on {host}: {error.strerror}; give another"
                    ) from error
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening. Blocks for at most `_POLL_S`."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _make_app(registry: CollectorRegistry) -> WSGIApplication:
    """Answers every scraper in the text format, as routers do.

    The library's own app would answer Prometheus in OpenMetrics, where escaping replaces the colon in names: it would
    store `penstock:worker_steps_total` as `penstock_worker_steps_total`, which no dashboard knows.
    """

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        body = generate_latest(registry)
        start_response("200 OK", [("Content-Type", CONTENT_TYPE_LATEST), ("Content-Length", str(len(body)))])
        return [body]

    return answer


class _Server(ThreadingWSGIServer):
    block_on_close = False  # a slow scraper must not delay the worker's shutdown


class _Ipv6Server(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = _IDLE_S

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing, because scrapes are not worth a line."""
