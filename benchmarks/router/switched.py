"""Runs a router whose metrics and traces a signal turns off and on: `python -m benchmarks.router.switched --config
FILE`.

A ratio between two processes also contains the effect of their different hashes and memory layouts, up to two percent.
One process that is measured in turns with and without observation avoids that. It switches to the n-th of `MODES` on
the signal `SIGRTMIN + n` and prints the mode's name once it applies; the router's configuration must turn traces on.
"""

from __future__ import annotations

import signal
import sys
import time
from typing import Any

from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

from penstock.metrics.families import BoundCounter, BoundHistogram
from penstock.types import Lane
from penstock.v1 import common_pb2
from router.__main__ import main
from router.admission.interface import RequestUsage
from router.api.prepare import RequestPreparer
from router.metrics.admission_metrics import AdmissionMetrics
from router.metrics.completion_counts import CompletionCounts
from router.metrics.request_metrics import RequestMetrics
from router.prepared_request import PreparedRequest

MODES = ("unobserved", "metrics", "1 % sampled", "all sampled")
_Replaced = tuple[type, str, Any]  # an attribute of a class, and its value
_SAMPLED = {"1 % sampled": 0.01, "all sampled": 1.0}


def _nothing(*_: object, **__: object) -> None:
    """Observes nothing."""


_NO_HISTOGRAM = BoundHistogram(())
_NO_HISTOGRAM.defer = _nothing


def _no_gaps(requests: RequestMetrics, lane: Lane, num_prompt_tokens: int, tenant: str) -> BoundHistogram:
    return _NO_HISTOGRAM


def _uncounted_first_token(counts: CompletionCounts, request: PreparedRequest, ttft_s: float) -> None:
    """Does what `CompletionCounts.first_token` does, except for Prometheus."""
    counts._demand.begin(len(request.token_ids), ttft_s)


def _uncounted_end(
    counts: CompletionCounts, request: PreparedRequest, usage: common_pb2.Usage, last: common_pb2.Timing | None
) -> RequestUsage:
    """Does what `CompletionCounts.request` does, except for Prometheus."""
    decode_s = last.decode_ms / 1e3 if last is not None else 0.0
    counts._retries.succeed(time.monotonic())
    counts._demand.end(usage, decode_s)
    return RequestUsage(usage.completion_tokens, usage.cached_tokens, decode_s)


_UNOBSERVED: tuple[_Replaced, ...] = (
    (BoundCounter, "inc", _nothing),
    (BoundHistogram, "observe", _nothing),
    (RequestMetrics, "gaps", _no_gaps),
    (AdmissionMetrics, "passed", _nothing),
    (AdmissionMetrics, "spent", _nothing),
    (CompletionCounts, "first_token", _uncounted_first_token),
    (CompletionCounts, "completion", _nothing),
    (CompletionCounts, "request", _uncounted_end),
)
_UNTRACED: tuple[_Replaced, ...] = ((RequestPreparer, "begin_trace", _nothing),)
_OBSERVED: tuple[_Replaced, ...] = tuple(
    (owner, name, getattr(owner, name)) for owner, name, _ in (*_UNOBSERVED, *_UNTRACED)
)


def switch(mode: str) -> None:
    """Switches to a mode, for all requests that arrive from now on."""
    replaced: tuple[_Replaced, ...] = _OBSERVED
    if mode == "unobserved":
        replaced = (*replaced, *_UNOBSERVED)
    if mode in _SAMPLED:
        bound = TraceIdRatioBased.get_bound_for_rate(_SAMPLED[mode])
        replaced = (*replaced, (TraceIdRatioBased, "bound", property(lambda sampler: bound)))
    else:
        replaced = (*replaced, *_UNTRACED)
    for owner, name, method in replaced:
        setattr(owner, name, method)
    print(mode, flush=True)


if __name__ == "__main__":
    for number, mode in enumerate(MODES):
        signal.signal(signal.SIGRTMIN + number, lambda *_, mode=mode: switch(mode))
    sys.exit(main())
