"""The HTTP port at which Prometheus reads one worker. It answers in a thread of its own, never on the step loop."""

from __future__ import annotations

import socket
import threading
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import ThreadingWSGIServer, make_wsgi_app
from prometheus_client.registry import Collector

from penstock.errors import ConfigError

_IDLE_S = 5.0  # without a byte, after which a connection is closed


class MetricsPort:
    """Listens from its construction to `close`. Scrapers need no token: a worker's metrics say nothing of requests."""

    def __init__(self, host: str, port: int, *collectors: Collector, last_port: int | None = None) -> None:
        """Takes the first port from `port` to `last_port` that is free; port 0 means any. Raises ConfigError if none
        is."""
        registry = CollectorRegistry()
        for collector in collectors:
            registry.register(collector)
        ProcessCollector(registry=registry)
        server_type = _Ipv6Server if ":" in host else _Server
        tried = range(port, (last_port or port) + 1)
        for number in tried:
            try:
                self._server = make_server(host, number, make_wsgi_app(registry), server_type, _Handler)
                break
            except OSError as error:
                if number == tried[-1]:
                    ports = str(port) if len(tried) == 1 else f"{port} to {number}"
                    raise ConfigError(
                        f"metrics_port = {ports}: cannot listen on {host}: {error.strerror}; give another"
                    ) from error
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening. Blocks for at most half a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingWSGIServer):
    block_on_close = False  # a scraper that reads slowly does not hold the worker's end up


class _Ipv6Server(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = _IDLE_S

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: a scrape is no event."""
