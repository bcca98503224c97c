"""Settings of traces: where spans go and how many requests are sampled."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from penstock.config.base import FrozenConfig


class TracingConfig(FrozenConfig):
    """Traces of requests, sent to an OpenTelemetry collector. docs/tracing.md describes their content."""

    endpoint: str = ""
    """URL of the collector, such as http://collector:4317; empty turns traces off, and then they cost nothing."""
    protocol: Literal["grpc", "http"] = "grpc"
    """OTLP over gRPC, or as protobuf over HTTP."""
    sample_ratio: float = Field(0.01, ge=0, le=1)
    """Share of requests that are traced unless the caller has decided by sending a `traceparent`."""
    headers_file: str = ""
    """File with headers for every export, such as an API key, one `name: value` per line; read at the start."""
    service_name: str = "penstock"
    """Name under which the deployment's spans appear."""

    @field_validator("endpoint")
    @classmethod
    def _check_endpoint(cls, endpoint: str) -> str:
        parts = urlsplit(endpoint)
        if endpoint and not (parts.scheme in ("http", "https") and parts.hostname):
            raise ValueError("is not a URL; give one such as http://collector:4317, or https:// for TLS")
        return endpoint
