"""Samples requests and exports their spans on a separate thread. Imported only if tracing is on.

The event loop never waits for an export: it reads the caller's context, and puts the trace of a sampled request into a
bounded queue when the request is over. A slow or failing collector costs only dropped traces.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Mapping

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from router.tracing.request_trace import RequestTrace, SampledCall
from router.tracing.spans import SpanBuilder

log = logging.getLogger(__name__)

MAX_QUEUED = 2048  # requests waiting to be exported; each takes a few kilobytes
_MAX_BATCH = 64  # requests in one export, of about ten spans each
_GATHER_S = 1.0  # the longest wait to fill a batch
_DRAIN_S = 0.5  # to export what is queued when the router stops
_ABORT_S = 0.3  # for an interrupted export to end
_TRACE_PARENT = "traceparent"
_FIELDS = (_TRACE_PARENT, "tracestate")


class RequestTracer:
    """Owns the queue, the thread and the exporter. `begin` and `close` are called on the event loop's thread."""

    def __init__(
        self,
        exporter: SpanExporter,
        spans: SpanBuilder,
        sample_ratio: float,
        count: Callable[[str, int], None],
    ) -> None:
        """`count` takes a result (`exported`, `failed` or `dropped`) and a number of requests."""
        self._exporter = exporter
        self._spans = spans
        self._count = count
        self._sampler = TraceIdRatioBased(sample_ratio)
        self._propagator = TraceContextTextMapPropagator()
        self._queue: queue.Queue[RequestTrace | None] = queue.Queue(MAX_QUEUED)
        self._closing = threading.Event()
        self._is_failing = False
        self._thread = threading.Thread(target=self._export_all, name="traces", daemon=True)
        self._thread.start()

    def begin(self, headers: Mapping[str, str | bytes]) -> SampledCall | None:
        """Returns the trace of a call with these headers or metadata, or None if the call is not sampled.

        A caller's own trace context decides whether it is; without one, the ratio does.
        """
        if headers.get(_TRACE_PARENT) is None:
            return self._begin_here()
        carrier = {name: value for name in _FIELDS if isinstance(value := headers.get(name), str)}
        parent = self._propagator.extract(carrier, Context())
        caller = otel.get_current_span(parent).get_span_context()
        if not caller.is_valid:
            return self._begin_here()
        return SampledCall(caller.trace_id, parent, self._submit) if caller.trace_flags.sampled else None

    def _begin_here(self) -> SampledCall | None:
        trace_id = random.getrandbits(128)
        is_sampled = trace_id & TraceIdRatioBased.TRACE_ID_LIMIT < self._sampler.bound
        return SampledCall(trace_id, Context(), self._submit) if is_sampled else None

    def close(self) -> None:
        """Ends the thread, which exports what it can in the meantime. Blocks for a second at most."""
        self._closing.set()
        with contextlib.suppress(queue.Full):  # the thread is busy, and checks the event next anyway
            self._queue.put_nowait(None)
        self._thread.join(_DRAIN_S)
        self._exporter.shutdown()  # interrupts an export that waits for a retry
        self._thread.join(_ABORT_S)
        self._drop_queued()

    def _submit(self, trace: RequestTrace) -> None:
        try:
            self._queue.put_nowait(trace)
        except queue.Full:
            self._count("dropped", 1)

    def _drop_queued(self) -> None:
        while True:
            try:
                if self._queue.get_nowait() is not None:
                    self._count("dropped", 1)
            except queue.Empty:
                return

    def _export_all(self) -> None:
        while not (self._closing.is_set() and self._queue.empty()):
            batch = self._take_batch()
            if batch:
                self._export(batch)

    def _take_batch(self) -> list[RequestTrace]:
        """Waits for a request, then for more until the batch is full or `_GATHER_S` has passed."""
        batch: list[RequestTrace] = []
        until_s = None
        while len(batch) < _MAX_BATCH:
            try:
                taken = self._queue.get(timeout=None if until_s is None else max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                break
            if taken is None:  # the router stops
                break
            batch.append(taken)
            until_s = until_s or time.monotonic() + (0.0 if self._closing.is_set() else _GATHER_S)
        return batch

    def _export(self, batch: list[RequestTrace]) -> None:
        try:
            spans = [span for trace in batch for span in self._spans.build(trace)]
            worked = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception:  # must not end the thread, or every later trace would be lost silently
            log.exception("%d traces were not exported", len(batch))
            worked = False
        self._count("exported" if worked else "failed", len(batch))
        if worked is self._is_failing:
            self._is_failing = not worked
            log.log(*_TURNS[worked])


_TURNS = {
    True: (logging.INFO, "the collector accepts traces again"),
    False: (logging.WARNING, "the collector refuses traces; they are lost until it accepts them, see tracing.endpoint"),
}
