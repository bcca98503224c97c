"""Starts tracing if it is configured, and imports OpenTelemetry only then."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from penstock.config.tracing import TracingConfig
from penstock.errors import ConfigError
from penstock.rpc.secret import read_private

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from router.tracing.tracer import RequestTracer

_TIMEOUT_S = 10.0  # for one export, including retries
_HTTP_PATH = "/v1/traces"
_HEADER = re.compile(r"([A-Za-z0-9_-]+)\s*:\s*([ -~]*)")


def start_tracer(
    config: TracingConfig, model: str, instance: str, count: Callable[[str, int], None]
) -> RequestTracer | None:
    """Returns a tracer whose export thread has started, to be closed by the caller; None if tracing is off.

    `instance` names this router, and `count` is described at `RequestTracer`. Raises ConfigError.
    """
    if not config.endpoint:
        return None
    try:
        from router.tracing.spans import SpanBuilder
        from router.tracing.tracer import RequestTracer

        exporter = _make_exporter(config)
    except ImportError as error:
        raise ConfigError(
            f"tracing.endpoint = {config.endpoint!r}: {error.name} is not installed; "
            "pip install 'penstock[tracing]', or leave the endpoint out"
        ) from error
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # RequestTracer counts and logs failures
    return RequestTracer(exporter, SpanBuilder(config.service_name, instance, model), config.sample_ratio, count)


def _make_exporter(config: TracingConfig) -> SpanExporter:
    headers = read_headers(config.headers_file) if config.headers_file else {}
    if config.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        lower = tuple((name.lower(), value) for name, value in headers.items())  # required by gRPC
        return OTLPSpanExporter(config.endpoint, headers=lower, timeout=_TIMEOUT_S)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpanExporter

    parts = urlsplit(config.endpoint)
    endpoint = config.endpoint if parts.path.strip("/") else parts._replace(path=_HTTP_PATH).geturl()
    return HttpSpanExporter(endpoint, headers=headers, timeout=_TIMEOUT_S)


def read_headers(path: str) -> dict[str, str]:
    """Returns the headers in a file. Raises ConfigError, whose message shows no value."""
    headers = {}
    for number, line in enumerate(read_private(path, "tracing.headers_file").splitlines(), 1):
        if not line.strip():
            continue
        found = _HEADER.fullmatch(line.strip())
        if found is None:
            raise ConfigError(
                f"tracing.headers_file = {path}: line {number} (not shown) is not a header; write `name: value`"
            )
        headers[found[1]] = found[2]
    return headers
