"""Tests the export of traces to real receivers over gRPC and HTTP, and without any receiver."""

from __future__ import annotations

import http.server
import queue
import socket
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from penstock.config import TracingConfig
from penstock.errors import ConfigError
from router.tracing import tracer
from router.tracing.request_trace import RequestTrace
from router.tracing.start import start_tracer
from tests.router.api.test_grpc_service import collect, request
from tests.support.router.router_fakes import FakeWorker, running_router

TIMEOUT_S = 60.0


@dataclass
class Received:
    """Collects the spans that a collector has received."""

    url: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    exports: queue.Queue[trace_service_pb2.ExportTraceServiceRequest] = field(default_factory=queue.Queue)

    def add(self, headers: dict[str, str], export: trace_service_pb2.ExportTraceServiceRequest) -> None:
        self.headers |= headers
        self.exports.put(export)


class GrpcCollector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, received: Received) -> None:
        self._received = received

    def Export(
        self, export: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self._received.add(dict(context.invocation_metadata()), export)
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def over_grpc() -> Iterator[Received]:
    received = Received()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(GrpcCollector(received), server)
    received.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield received
    server.stop(None).wait(TIMEOUT_S)


@pytest.fixture
def over_http() -> Iterator[Received]:
    received = Received()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            headers = {name.lower(): value for name, value in self.headers.items()}
            received.add(headers, trace_service_pb2.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Does not log."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield received
    server.shutdown()
    server.server_close()
    thread.join(TIMEOUT_S)


@pytest.fixture(params=["grpc", "http"])
def collector(request: pytest.FixtureRequest) -> tuple[str, Received]:
    return request.param, request.getfixturevalue(f"over_{request.param}")


async def test_a_collector_receives_every_span_with_the_headers(
    collector: tuple[str, Received], tmp_path: Path
) -> None:
    protocol, received = collector
    headers = tmp_path / "headers"
    headers.write_text("X-Api-Key: a-key of two words\n\nx-other: 2\n")
    headers.chmod(0o600)
    settings = {
        "endpoint": received.url,
        "protocol": protocol,
        "sample_ratio": 1.0,
        "headers_file": str(headers),
        "service_name": "writers",
    }
    worker = await FakeWorker().start()
    async with running_router(worker, tracing=settings) as router:
        await collect(router.stub.Generate(request("hello", max_tokens=3)))
        counts = router.server.context.metrics
    export = received.exports.get(timeout=TIMEOUT_S)
    assert (received.headers["x-api-key"], received.headers["x-other"]) == ("a-key of two words", "2")
    (resource,) = export.resource_spans
    named = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert named["service.name"] == "writers"
    spans = [span for scope in resource.scope_spans for span in scope.spans]
    (root,) = [span for span in spans if not span.parent_span_id]
    assert {span.trace_id for span in spans} == {root.trace_id}
    assert {span.parent_span_id for span in spans} <= {b"", *(span.span_id for span in spans)}
    assert {span.name for span in spans} >= {"tokenize", "placement", "decode worker", "prefill", "decode"}
    assert 'penstock:traces_total{model_name="penstock-tiny",result="exported"} 1.0' in counts.render().decode()


@pytest.fixture
def silent() -> Iterator[str]:
    """Returns the URL of a collector that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("is_silent", [True, False], ids=["silent", "refused"])
def test_without_a_collector_the_queue_is_bounded_and_closing_does_not_wait(
    protocol: str, is_silent: bool, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracer, "MAX_QUEUED", 8)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed = f"http://127.0.0.1:{listener.getsockname()[1]}"
    counted: dict[str, int] = {}

    def count(result: str, num_requests: int) -> None:
        counted[result] = counted.get(result, 0) + num_requests

    config = TracingConfig.model_validate(
        {"endpoint": silent if is_silent else closed, "protocol": protocol, "sample_ratio": 1.0}
    )
    made = start_tracer(config, "m", "r", count)
    assert made is not None
    for _ in range(200):
        call = made.begin({})
        assert call is not None
        RequestTrace(call, "chat", time.monotonic()).fail("CANCELLED")
    ending = threading.Thread(target=made.close, daemon=True)
    ending.start()
    ending.join(TIMEOUT_S)  # far less than the exporter's own timeout over 200 calls
    assert not ending.is_alive()
    assert counted["dropped"] > 0
    assert "exported" not in counted


@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [
        ("no header here", 0o600, r"line 1 \(not shown\) is not a header; write `name: value`"),
        ("a: b", 0o644, r"everybody may read it \(mode 644\); chmod 600 it"),
    ],
)
def test_a_bad_header_file_is_reported(tmp_path: Path, text: str, mode: int, problem: str) -> None:
    path = tmp_path / "headers"
    path.write_text(text)
    path.chmod(mode)
    config = TracingConfig(endpoint="http://127.0.0.1:1", headers_file=str(path))
    with pytest.raises(ConfigError, match=problem):
        start_tracer(config, "m", "r", lambda result, count: None)
