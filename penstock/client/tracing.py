"""Propagates the caller's trace to the deployment as W3C Trace Context."""

from __future__ import annotations

import sys


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """Returns the metadata that makes a call part of the active OpenTelemetry span; empty without one.

    A program that has not imported OpenTelemetry has no span, so this never imports it.
    """
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())
