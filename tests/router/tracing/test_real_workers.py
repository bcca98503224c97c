"""Tests the spans of requests that real workers serve in this process, through the router and by ticket."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from penstock import AsyncClient
from penstock.types import Role
from router.fleet import tickets
from router.tracing import start
from tests.system.test_lookaside import LONG, config, route, setting

pytestmark = pytest.mark.processes

NOTHING_BY_ITSELF = {"endpoint": "http://127.0.0.1:1", "sample_ratio": 0.0}
NAMES = {
    "tokenize",
    "admission",
    "placement",
    "decode worker",
    "queue",
    "prefill",
    "transfer",
    "decode queue",
    "decode",
}


@pytest.mark.parametrize("lookaside", [False, True], ids=["through the router", "lookaside"])
async def test_a_remote_prefill_is_part_of_the_callers_trace(lookaside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(start, "_make_exporter", lambda tracing: exporter)
    configs = (
        config(Role.PREFILL, "prefill-0"),
        config(Role.DECODE, "decode-0", decode={"placement": "remote"}),
    )
    tracer = TracerProvider().get_tracer("caller")
    async with setting(*configs, tracing=NOTHING_BY_ITSELF) as made:
        async with AsyncClient(made.address, lookaside=lookaside) as client:
            with tracer.start_as_current_span("its own work") as active:
                await client.complete(LONG, max_tokens=6, temperature=0.0, ignore_eos=True)
        await made.nothing_is_held()
    spans = exporter.get_finished_spans()
    by_name = {span.name: span for span in spans}
    assert set(by_name) == {*NAMES, "text_completion penstock-tiny"}
    root = by_name["text_completion penstock-tiny"]
    assert root.parent is not None
    assert (root.parent.span_id, root.kind) == (active.get_span_context().span_id, SpanKind.SERVER)
    assert root.attributes["gen_ai.usage.output_tokens"] == 6
    assert by_name["prefill"].attributes["penstock.worker.id"] == "prefill-0"
    decode = by_name["decode worker"]
    assert (decode.attributes["penstock.worker.id"], decode.attributes["penstock.prefill.place"]) == (
        "decode-0",
        "remote",
    )
    assert decode.attributes["penstock.pages_moved"] > 0
    assert decode.start_time <= by_name["queue"].start_time <= by_name["prefill"].start_time
    assert by_name["prefill"].end_time <= by_name["decode"].end_time


async def test_an_unused_ticket_is_a_failed_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(start, "_make_exporter", lambda tracing: exporter)
    monkeypatch.setattr(tickets, "SKEW_S", 0.2)
    monkeypatch.setattr(tickets, "_LAG_S", 0.2)
    tracing = {**NOTHING_BY_ITSELF, "sample_ratio": 1.0}
    async with setting(config(Role.DECODE, "decode-0"), tracing=tracing, ticket_lifetime_s=0.1) as made:
        await route(made, LONG, max_tokens=4)
        await made.nothing_is_held()
    (root,) = exporter.get_finished_spans()
    assert root.attributes["error.type"] == "UNUSED_TICKET"
