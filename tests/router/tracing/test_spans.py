"""Tests the spans of requests that a router serves over fake workers, with an exporter in memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode

from penstock import AsyncClient
from penstock.config import RouterConfig, TracingConfig
from penstock.errors import ConfigError, Unavailable
from router.tracing import start
from tests.router.api.test_grpc_service import collect, failure, read_tokens, request
from tests.router.dispatch.test_migrated_streams import moved_to, pair
from tests.support.router.router_fakes import MODEL, FakeWorker, running_router, until

ROOT = Path(__file__).resolve().parents[3]
ALL = {"endpoint": "http://127.0.0.1:1", "sample_ratio": 1.0}
NONE = {"endpoint": "http://127.0.0.1:1", "sample_ratio": 0.0}
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{flags}"
PROMPT = "a secret that no span holds"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Replaces the exporter to a collector."""
    made = InMemorySpanExporter()
    monkeypatch.setattr(start, "_make_exporter", lambda config: made)
    yield made
    for span in made.get_finished_spans():  # checked for every test
        assert span.end_time >= span.start_time
        assert not any("secret" in str(value) for value in span.attributes.values())
        assert not any("secret" in str(event.attributes) for event in span.events)


def named(spans: Sequence[ReadableSpan], name: str) -> list[ReadableSpan]:
    return [span for span in spans if span.name == name]


def root_of(spans: Sequence[ReadableSpan]) -> ReadableSpan:
    (root,) = [span for span in spans if span.kind is SpanKind.SERVER]
    return root


async def test_a_request_is_a_tree_from_the_router_to_its_workers(exporter: InMemorySpanExporter) -> None:
    workers = await FakeWorker("prefill-0", epoch=7, role="prefill").start(), await FakeWorker().start()
    async with running_router(*workers, tracing=ALL) as router:
        messages = await collect(router.stub.Generate(request(PROMPT, max_tokens=5)))
    spans = exporter.get_finished_spans()
    root, (decode,) = root_of(spans), named(spans, "decode worker")
    assert (root.name, root.parent) == ("text_completion penstock-tiny", None)
    below = {
        root.context.span_id: ["tokenize", "admission", "placement", "decode worker"],
        decode.context.span_id: ["queue", "prefill", "decode"],
    }
    for parent, names in below.items():
        children = [span for span in spans if span.parent is not None and span.parent.span_id == parent]
        assert sorted(span.name for span in children) == sorted(names)
        assert [span.name for span in sorted(children, key=lambda span: span.start_time)] == names
    assert {span.context.trace_id for span in spans} == {root.context.trace_id}
    (stream,) = named(spans, "decode")
    assert [event.name for event in stream.events] == ["first token"]
    assert root.start_time <= decode.start_time
    assert decode.end_time <= root.end_time
    assert decode.attributes["penstock.worker.id"] == "decode-0"
    (prefill,) = named(spans, "prefill")
    assert prefill.attributes["penstock.worker.id"] == messages[-1].timing.prefill_worker
    assert root.resource.attributes["service.name"] == "penstock"


async def test_attributes_follow_the_conventions_for_generative_ai(exporter: InMemorySpanExporter) -> None:
    worker = await FakeWorker().start()
    async with running_router(worker, tracing=ALL) as router:
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5, "temperature": 0.5, "n": 2}
        async with httpx.AsyncClient(base_url=router.http_url, timeout=60) as http:
            answer = (await http.post("/v1/chat/completions", json=body)).json()
    root = root_of(exporter.get_finished_spans())
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    assert {name for name in root.attributes if name.startswith("gen_ai.")} <= known
    assert root.name == "chat penstock-tiny"
    wanted = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": "penstock-tiny",
        "gen_ai.response.id": answer["id"],
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.finish_reasons": tuple(choice["finish_reason"] for choice in answer["choices"]),
        "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": answer["usage"]["completion_tokens"],
    }
    assert wanted.items() <= dict(root.attributes).items()
    assert root.attributes["gen_ai.response.time_to_first_chunk"] > 0
    placed = named(exporter.get_finished_spans(), "placement")
    assert [span.attributes["penstock.decode.worker"] for span in placed] == ["decode-0", "decode-0"]


@pytest.mark.parametrize(("flags", "sampling", "count"), [("01", NONE, 1), ("00", ALL, 0)])
async def test_the_callers_context_decides_about_sampling(
    exporter: InMemorySpanExporter, flags: str, sampling: dict[str, object], count: int
) -> None:
    worker = await FakeWorker().start()
    headers = {"traceparent": CALLER.format(flags=flags), "tracestate": "vendor=1"}
    async with running_router(worker, tracing=sampling) as router:
        async with httpx.AsyncClient(base_url=router.http_url, timeout=60) as http:
            await http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2}, headers=headers)
        metadata = tuple(headers.items())
        await collect(router.stub.Generate(request(PROMPT, max_tokens=2), metadata=metadata))
    roots = [span for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER]
    assert len(roots) == 2 * count
    for root in roots:
        assert f"{root.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
        assert root.parent is not None
        assert f"{root.parent.span_id:016x}" == "b7ad6b7169203331"
        assert root.context.trace_state.get("vendor") == "1"


@pytest.mark.parametrize("header", ["", "junk", CALLER.format(flags="zz"), f"00-{'0' * 32}-{'0' * 16}-01"])
async def test_an_invalid_context_is_ignored(exporter: InMemorySpanExporter, header: str) -> None:
    worker = await FakeWorker().start()
    async with running_router(worker, tracing=NONE) as router:
        async with httpx.AsyncClient(base_url=router.http_url, timeout=60) as http:
            body = {"prompt": PROMPT, "max_tokens": 2}
            answer = await http.post("/v1/completions", json=body, headers={"traceparent": header})
    assert (answer.status_code, exporter.get_finished_spans()) == (200, ())


async def test_the_python_client_passes_the_active_span_on(exporter: InMemorySpanExporter) -> None:
    worker = await FakeWorker().start()
    tracer = TracerProvider().get_tracer("caller")
    async with running_router(worker, tracing=NONE) as router, AsyncClient(router.grpc_address) as client:
        with tracer.start_as_current_span("its own work") as active:
            await client.complete(PROMPT, max_tokens=2)
        await client.complete(PROMPT, max_tokens=2)  # without an active span, the ratio decides
    root = root_of(exporter.get_finished_spans())
    assert root.parent is not None
    assert root.parent.span_id == active.get_span_context().span_id
    assert otel.get_current_span() is otel.INVALID_SPAN


async def test_a_failover_is_a_second_span_linked_to_the_lost_one(exporter: InMemorySpanExporter) -> None:
    workers = [await FakeWorker(f"decode-{number}", epoch=number + 1, pause_at=3).start() for number in range(2)]
    async with running_router(*workers, tracing=ALL) as router:
        call = router.stub.Generate(request(PROMPT, max_tokens=6))
        await read_tokens(call, 3)
        victim, survivor = workers if workers[0].submits else workers[::-1]
        for worker in workers:
            worker.pause_at = None
        await victim.stop()
        survivor.resume.set()
        await collect(call)
    spans = exporter.get_finished_spans()
    first, second = sorted(named(spans, "decode worker"), key=lambda span: span.start_time)
    assert first.attributes["penstock.worker.id"] == victim.worker_id
    assert (first.status.status_code, first.attributes["error.type"]) == (StatusCode.ERROR, Unavailable.reason)
    assert second.attributes["penstock.cause"] == "re-dispatched"
    assert [link.context.span_id for link in second.links] == [first.context.span_id]
    assert root_of(spans).status.status_code is StatusCode.UNSET


async def test_a_migration_is_an_event_and_a_linked_span(exporter: InMemorySpanExporter) -> None:
    source, target = await pair()
    source.move_to, target.pause_at = moved_to(target, 2), None
    async with running_router(source, target, tracing=ALL) as router:
        await collect(router.stub.Generate(request(PROMPT, max_tokens=12)))
    first, second = sorted(named(exporter.get_finished_spans(), "decode worker"), key=lambda span: span.start_time)
    assert [(event.name, event.attributes["penstock.worker.id"]) for event in first.events] == [
        ("migrated", "decode-1")
    ]
    assert second.attributes["penstock.cause"] == "migrated"
    assert [link.context.span_id for link in second.links] == [first.context.span_id]


async def test_refused_and_cancelled_requests_have_a_span_with_the_reason(exporter: InMemorySpanExporter) -> None:
    worker = await FakeWorker(pause_at=1).start()
    async with running_router(worker, tracing=ALL) as router:
        await failure(router.stub.Generate(request(PROMPT, temperature=-1.0)))
        call = router.stub.Generate(request(PROMPT, max_tokens=4))
        await read_tokens(call, 1)
        call.cancel()
        await until(lambda: bool(worker.cancelled))
        worker.resume.set()
    refused, cancelled = [span for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER]
    assert (refused.attributes["error.type"], refused.status.status_code) == ("INVALID_INPUT", StatusCode.ERROR)
    assert cancelled.attributes["error.type"] == "CANCELLED"
    (decode,) = named(exporter.get_finished_spans(), "decode worker")
    assert decode.parent is not None
    assert decode.parent.span_id == cancelled.context.span_id


async def test_without_an_endpoint_nothing_is_traced() -> None:
    worker = await FakeWorker().start()
    async with running_router(worker) as router:
        assert router.server.context.tracer is None
        metadata = (("traceparent", CALLER.format(flags="01")),)
        await collect(router.stub.Generate(request(PROMPT, max_tokens=2), metadata=metadata))
        (ended,) = router.server.context.metrics.recent.find(worker.submits[0].request_id)
    assert ended.trace_id == ""


@pytest.mark.processes
def test_neither_the_client_nor_a_router_without_tracing_imports_opentelemetry() -> None:
    code = (
        "import sys, penstock\n"
        "penstock.Client('localhost:1').generate('x')\n"
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)\n"
        "import router.server\n"  # FastAPI itself imports the bare API
        "assert not any(name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter')) for name in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"tracing.endpoint = 'http://a:1'.*pip install 'penstock\[tracing\]'"):
        start.start_tracer(TracingConfig(endpoint="http://a:1"), "m", "r", lambda result, count: None)


def test_an_endpoint_must_be_a_url() -> None:
    with pytest.raises(ValueError, match=r"is not a URL; give one such as http://collector:4317"):
        RouterConfig.model_validate({"model": str(MODEL), "tracing": {"endpoint": "collector:4317"}})
