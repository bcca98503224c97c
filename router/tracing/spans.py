"""Builds the spans of one request from its `RequestTrace`. Imported only if tracing is on.

The root is the router's span. Its children are the stages at the router, and for each completion one span for each leg,
linked to the previous one. The stages at workers are children of the last leg's span. `attributes` describes them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import zip_longest

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from router.tracing.attributes import Attributes, choice_attributes, completion_attributes, request_attributes
from router.tracing.request_trace import RequestTrace
from router.tracing.stages import AT_ROUTER, CompletionStage, EndedCompletion, LegCause, Stage, WorkerLeg, stages_of

_AT_WORKERS = tuple(stage for stage in Stage if stage not in AT_ROUTER)


class SpanBuilder:
    """Builds the spans of one request at a time, on one thread."""

    def __init__(self, service_name: str, instance: str, model: str) -> None:
        self._model = model
        self._ids = _ChosenTraceId()
        self._collected = _SpanCollector()
        identity = Resource.create({"service.name": service_name, "service.instance.id": instance})
        provider = TracerProvider(ALWAYS_ON, identity, shutdown_on_exit=False, id_generator=self._ids)
        provider.add_span_processor(self._collected)
        self._tracer = provider.get_tracer("penstock")

    def build(self, trace: RequestTrace) -> list[ReadableSpan]:
        """Returns the request's spans, the root last."""
        self._ids.trace_id = trace.call.trace_id
        clock = _Clock(trace.accepted_s)
        root = self._tracer.start_span(
            f"{trace.operation} {self._model}",
            trace.call.parent,
            otel.SpanKind.SERVER,
            request_attributes(trace, self._model),
            start_time=clock.unix_ns(trace.accepted_s),
        )
        inside = otel.set_span_in_context(root, Context())
        if trace.completions:
            for stage in stages_of(trace.completions[0]):
                if stage.name in (Stage.TOKENIZE, Stage.ADMISSION):
                    self._add_stage(stage, inside, clock)
        for ended in trace.completions:
            self._add_completion(ended, inside, clock)
        self._add_legs(trace.lost_legs, trace.ended_s, {}, inside, clock)
        if trace.error:
            root.set_status(otel.StatusCode.ERROR)
        root.end(clock.unix_ns(trace.ended_s))
        return self._collected.take()

    def _add_completion(self, ended: EndedCompletion, inside: Context, clock: _Clock) -> None:
        stages = {stage.name: stage for stage in stages_of(ended)}
        placement = self._add_stage(stages[Stage.PLACEMENT], inside, clock, choice_attributes(ended.choices))
        end_s = ended.accepted_s + ended.end_ms / 1e3
        last = self._add_legs(ended.legs, end_s, completion_attributes(ended), inside, clock, placement)
        within = otel.set_span_in_context(last or placement, Context())
        for name in _AT_WORKERS:
            if name in stages:
                preempted_ms = ended.preempted_ms if name is Stage.DECODE else []
                self._add_stage(stages[name], within, clock, preempted_ms=preempted_ms)

    def _add_legs(
        self,
        legs: Sequence[WorkerLeg],
        end_s: float,
        last_attributes: Attributes,
        inside: Context,
        clock: _Clock,
        before: otel.Span | None = None,
    ) -> otel.Span | None:
        """Adds a span for each leg, linked to that of the previous leg, or to `before`; returns the last one."""
        last = None
        for leg, following in zip_longest(legs, legs[1:]):
            attributes: Attributes = {"penstock.worker.id": leg.worker, "penstock.cause": leg.cause.value}
            if leg.weight_version:
                attributes["penstock.weight_version"] = leg.weight_version
            last = self._tracer.start_span(
                "decode worker",
                inside,
                attributes=attributes if following else attributes | last_attributes,
                links=[otel.Link(before.get_span_context())] if before else [],
                start_time=clock.unix_ns(leg.sent_s),
            )
            left_ns = clock.unix_ns(leg.lost_s or (following.sent_s if following else end_s))
            if leg.lost_s:
                last.set_attribute("error.type", leg.error)
                last.set_status(otel.StatusCode.ERROR)
            elif following and following.cause is LegCause.MIGRATED:
                last.add_event("migrated", {"penstock.worker.id": following.worker}, left_ns)
            last.end(left_ns)
            before = last
        return last

    def _add_stage(
        self,
        stage: CompletionStage,
        inside: Context,
        clock: _Clock,
        attributes: Attributes | None = None,
        preempted_ms: Sequence[float] = (),
    ) -> otel.Span:
        worker: Attributes = {"penstock.worker.id": stage.worker} if stage.worker else {}
        start_ns = clock.after_ms(stage.start_ms)
        span = self._tracer.start_span(
            stage.name.value, inside, attributes=worker | (attributes or {}), start_time=start_ns
        )
        if stage.name is Stage.DECODE:
            span.add_event("first token", timestamp=start_ns)
        for at_ms in preempted_ms:
            span.add_event("preempted", timestamp=clock.after_ms(at_ms))
        span.end(clock.after_ms(stage.end_ms))
        return span


class _Clock:
    """Converts monotonic times to Unix time."""

    def __init__(self, accepted_s: float) -> None:
        self._accepted_s = accepted_s
        self._accepted_ns = time.time_ns() - round((time.monotonic() - accepted_s) * 1e9)

    def unix_ns(self, moment_s: float) -> int:
        return self._accepted_ns + round((moment_s - self._accepted_s) * 1e9)

    def after_ms(self, milliseconds: float) -> int:
        return self._accepted_ns + round(milliseconds * 1e6)


class _ChosenTraceId(RandomIdGenerator):
    """Gives a trace the id with which it was sampled."""

    def __init__(self) -> None:
        self.trace_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id


class _SpanCollector(SpanProcessor):
    def __init__(self) -> None:
        self._ended: list[ReadableSpan] = []

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Does nothing: spans are collected when they end."""

    def on_end(self, span: ReadableSpan) -> None:
        self._ended.append(span)

    def take(self) -> list[ReadableSpan]:
        taken, self._ended = self._ended, []
        return taken
