"""Tests the endpoint picker behind a real Envoy, and message by message as the Endpoint Picker Protocol defines it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import ValidationError

from penstock.config import RouterConfig
from penstock.rpc.secret import digest_of
from penstock.rpc.server import make_channel
from penstock.v1 import ext_proc_pb2 as pb
from router.api.limits import HeldBytes
from router.api.picker.exchange import PickExchange
from router.api.picker.picker import RouterPicker
from router.api.picker.service import EXTERNAL_PROCESSOR
from tests.support.router.engine_double import BLOCK, EngineDouble, expected, running_engines
from tests.support.router.envoy import running_envoy
from tests.support.router.router_fakes import FakeWorker, RunningRouter, running_router, until

PROMPT = [20 + i % 400 for i in range(5 * BLOCK)]
DESTINATION = "x-gateway-destination-endpoint"


@contextlib.asynccontextmanager
async def picking(*engines: EngineDouble, **settings: object) -> AsyncIterator[RunningRouter]:
    async with running_engines(*engines):
        named = {engine.name: engine.settings() for engine in engines}
        settings = {"endpoint_picker": {"port": 0}, **settings}
        async with running_router(engines=named, wait=False, **settings) as router:
            await until(lambda: sum(worker.takes_work for worker in router.server.fleet.followers) == len(engines))
            yield router


def completion(prompt: object = PROMPT, **fields: object) -> dict[str, object]:
    return {"model": "penstock-tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": True, **fields}


def endpoint(engine: EngineDouble) -> str:
    return engine.url.removeprefix("http://")


def tokens_of(text: str) -> list[int]:
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [token for event in events for choice in event["choices"] for token in choice["token_ids"]]


def num_inside(router: RunningRouter) -> int:
    return router.server.context.gate.admission.num_inside


# Through Envoy.


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["FULL_DUPLEX_STREAMED", "BUFFERED"])
async def test_a_gateway_sends_prompts_to_the_engine_that_has_them_cached(tmp_path: Path, mode: str) -> None:
    engines = [EngineDouble(f"engine-{number}") for number in range(3)]
    async with picking(*engines) as router:
        assert router.server.ports.picker is not None
        await engines[1]._cache(PROMPT, "")
        await until(lambda: router.server.fleet.index.pages_of("engine-1") == 5)  # type: ignore[arg-type]
        async with running_envoy(tmp_path, router.server.ports.picker, mode) as client:
            for _ in range(3):
                answer = await client.post("/v1/completions", json=completion([*PROMPT, 30]))
                assert answer.status_code == 200
                assert tokens_of(answer.text) == expected([*PROMPT, 30], 4)
            models = await client.get("/v1/models")
            assert models.status_code == 200
        assert [len(engine.bodies) for engine in engines] == [0, 3, 0]
        await until(lambda: num_inside(router) == 0)
        metrics = router.server._metrics.render().decode()
        assert 'penstock:endpoint_picks_total{how="placed",model_name="penstock-tiny"} 3.0' in metrics
        assert 'penstock:endpoint_picks_total{how="by load",model_name="penstock-tiny"} 1.0' in metrics


@pytest.mark.processes
async def test_a_slot_is_held_until_the_answer_ends_or_the_client_leaves(tmp_path: Path) -> None:
    engine = EngineDouble(pause_at=2)
    async with picking(engine) as router:
        assert router.server.ports.picker is not None
        async with running_envoy(tmp_path, router.server.ports.picker) as client:
            async with client.stream("POST", "/v1/completions", json=completion()) as answer:
                assert answer.status_code == 200
                await until(lambda: engine.num_running == 1)
                assert num_inside(router) == 1
            await until(lambda: num_inside(router) == 0)
            engine.resume.set()
            answer = await client.post("/v1/completions", json=completion())
            assert tokens_of(answer.text) == expected(PROMPT, 4)
            await until(lambda: num_inside(router) == 0)


@pytest.mark.processes
async def test_a_tenant_needs_its_key_and_its_pages_have_its_salt(tmp_path: Path) -> None:
    engine = EngineDouble()
    async with picking(engine, tenants={"acme": {"keys": [digest_of("acme-key")]}}, metrics_token_file="") as router:
        assert router.server.ports.picker is not None
        async with running_envoy(tmp_path, router.server.ports.picker) as client:
            refused = await client.post("/v1/completions", json=completion())
            assert refused.status_code == 401
            assert refused.json()["error"]["type"] == "authentication_error"
            headers = {"authorization": "Bearer acme-key"}
            unread = await client.post("/v1/completions", json=completion("x", n="many"), headers=headers)
            assert unread.status_code == 400
            assert "n" in unread.json()["error"]["message"]
            elsewhere = await client.post("/v1/embeddings", json={"input": "x"}, headers=headers)
            assert elsewhere.status_code == 400
            assert "cannot be charged to a tenant" in elsewhere.json()["error"]["message"]
            served = await client.post("/v1/completions", json=completion(cache_salt="own"), headers=headers)
            assert tokens_of(served.text) == expected(PROMPT, 4)
        (body,) = engine.bodies
        assert body["cache_salt"] not in ("own", "", None)
        assert body["prompt"] == PROMPT


# Message by message.


def headers_message(
    path: str = "/v1/completions", *, subset: list[str] | None = None, ends: bool = False
) -> pb.ProcessingRequest:
    message = pb.ProcessingRequest()
    for name, value in {":method": "POST", ":path": path}.items():
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    message.request_headers.end_of_stream = ends
    if subset is not None:
        hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        hint.update({"x-gateway-destination-endpoint-subset": subset})
    return message


def body_message(body: bytes, *, ends: bool = True) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=ends))


@contextlib.asynccontextmanager
async def process_calls(router: RunningRouter) -> AsyncIterator[grpc.aio.StreamStreamMultiCallable]:
    async with make_channel(f"127.0.0.1:{router.server.ports.picker}") as channel:
        yield channel.stream_stream(
            f"/{EXTERNAL_PROCESSOR}/Process",
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )


async def first_response(router: RunningRouter, *messages: pb.ProcessingRequest) -> pb.ProcessingResponse:
    async with process_calls(router) as process:
        call = process()
        for message in messages:
            await call.write(message)
        async with asyncio.timeout(60.0):
            response: pb.ProcessingResponse = await call.read()
        call.cancel()
        return response


def picked(response: pb.ProcessingResponse) -> list[str]:
    """Returns the picked endpoints, on which header and metadata must agree."""
    option = next(
        option
        for option in response.request_headers.response.header_mutation.set_headers
        if option.header.key == DESTINATION
    )
    metadata = response.dynamic_metadata.fields["envoy.lb"].struct_value.fields[DESTINATION].string_value
    assert option.header.raw_value.decode() == metadata
    return metadata.split(",")


async def test_only_endpoints_of_the_subset_are_picked() -> None:
    engines = [EngineDouble(f"engine-{number}") for number in range(3)]
    async with picking(*engines, endpoint_picker={"port": 0, "fallbacks": 2}) as router:
        body = body_message(json.dumps(completion()).encode())
        everywhere = picked(await first_response(router, headers_message(), body))
        assert sorted(everywhere) == sorted(map(endpoint, engines))
        two = [endpoint(engines[0]), endpoint(engines[2])]
        assert sorted(picked(await first_response(router, headers_message(subset=two), body))) == sorted(two)
        for subset in ([], ["10.9.9.9:80"]):
            refused = await first_response(router, headers_message(subset=subset), body)
            assert refused.immediate_response.status.code == 503
            assert b"no engine takes requests now among" in refused.immediate_response.body
        await until(lambda: num_inside(router) == 0)


async def test_unreadable_requests_are_left_to_an_engine() -> None:
    engines = [EngineDouble(f"engine-{number}") for number in range(2)]
    async with picking(*engines) as router:
        for path, body in (
            ("/v1/completions", b"{nonsense"),
            ("/v1/completions", json.dumps(completion(n="many")).encode()),
            ("/v1/completions", json.dumps(completion(model="an adapter of the engine's")).encode()),
            ("/v1/embeddings", b'{"input": "x"}'),
        ):
            found = picked(await first_response(router, headers_message(path), body_message(body)))
            assert set(found) <= set(map(endpoint, engines))
        assert len(picked(await first_response(router, headers_message("/v1/models", ends=True)))) == 1


async def test_a_body_in_pieces_is_passed_on_whole() -> None:
    async with picking(EngineDouble()) as router, process_calls(router) as process:
        raw = json.dumps(completion(metadata={"note": "x" * 150_000})).encode()
        call = process()
        await call.write(headers_message())
        await call.write(body_message(raw[:70_000], ends=False))
        await call.write(body_message(raw[70_000:]))
        async with asyncio.timeout(60.0):
            assert picked(await call.read())
            parts = []
            while not parts or not parts[-1].end_of_stream:
                response = await call.read()
                parts.append(response.request_body.response.body_mutation.streamed_response)
        assert b"".join(part.body for part in parts) == raw
        assert max(len(part.body) for part in parts) < 64 * 1024
        call.cancel()
        await until(lambda: num_inside(router) == 0)


async def test_a_stream_carries_one_request_and_frees_its_slot() -> None:
    """A second set of headers would replace the first pick, whose slot would then never be freed."""
    async with picking(EngineDouble()) as router, process_calls(router) as process:
        call = process()
        await call.write(headers_message())
        await call.write(body_message(json.dumps(completion()).encode()))
        async with asyncio.timeout(60.0):
            assert picked(await call.read())
            await call.read()  # its body
            assert num_inside(router) == 1
            await call.write(headers_message("/v1/models", ends=True))
            response = await call.read()
        assert response.immediate_response.status.code == 400
        assert b"are sent twice" in response.immediate_response.body
        await until(lambda: num_inside(router) == 0)


async def test_an_invalid_path_is_left_to_an_engine() -> None:
    async with picking(EngineDouble()) as router:
        assert len(picked(await first_response(router, headers_message("//[", ends=True)))) == 1


async def test_a_caller_without_a_key_is_refused_before_its_body() -> None:
    tenants = {"acme": {"keys": [digest_of("acme-key")]}}
    async with picking(EngineDouble(), tenants=tenants, metrics_token_file="") as router:
        refused = await first_response(router, headers_message())
        assert refused.immediate_response.status.code == 401


async def test_empty_parts_of_a_body_take_no_memory() -> None:
    async with picking(EngineDouble()) as router:
        limits = router.server.context.config.limits
        held_bytes = HeldBytes(limits, lambda limit: None)
        exchange = PickExchange(RouterPicker("127.0.0.1:1", 0, lambda: True), limits, held_bytes, {})
        for message in (headers_message(), *(body_message(b"", ends=False) for _ in range(100))):
            assert await exchange.responses(message) == []
        assert exchange._parts == []


async def test_too_large_a_body_is_refused_before_all_of_it_has_arrived() -> None:
    async with picking(EngineDouble(), limits={"request_bytes": 10_000}) as router:
        refused = await first_response(router, headers_message(), body_message(b"x" * 10_001, ends=False))
        assert refused.immediate_response.status.code == 413


async def test_a_body_that_never_arrives_ends_the_call() -> None:
    async with picking(EngineDouble(), limits={"body_timeout_s": 0.2}) as router, process_calls(router) as process:
        call = process()
        await call.write(headers_message())
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_health_uses_the_protocols_names() -> None:
    engine = EngineDouble()
    async with picking(engine) as router, make_channel(f"127.0.0.1:{router.server.ports.picker}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def serves(name: str) -> bool:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            return answer.status == health_pb2.HealthCheckResponse.SERVING

        assert await serves("liveness")
        for name in ("readiness", EXTERNAL_PROCESSOR):
            async with asyncio.timeout(60.0), make_channel(f"127.0.0.1:{router.server.ports.picker}") as other:
                watch = health_pb2_grpc.HealthStub(other).Watch(health_pb2.HealthCheckRequest(service=name))
                async for answer in watch:
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        break
                watch.cancel()


async def test_in_front_of_workers_a_router_is_picked() -> None:
    settings = {"port": 0, "router_endpoint": "10.0.0.5:8000", "fallbacks": 1}
    async with running_router(await FakeWorker().start(), endpoint_picker=settings) as router:
        body = body_message(json.dumps(completion()).encode())
        assert picked(await first_response(router, headers_message(), body)) == ["10.0.0.5:8000"]
        others = ["10.0.0.6:8000", "10.0.0.5:8000"]
        assert picked(await first_response(router, headers_message(subset=others), body)) == others[::-1]
        refused = await first_response(router, headers_message(subset=[]), body)
        assert refused.immediate_response.status.code == 503


def test_the_configuration_sets_what_is_picked() -> None:
    engine = {"url": "http://127.0.0.1:9"}
    for settings in (
        {"workers": ("127.0.0.1:1",), "endpoint_picker": {"port": 1}},
        {"engines": {"one": engine}, "endpoint_picker": {"port": 1, "router_endpoint": "127.0.0.1:8000"}},
    ):
        with pytest.raises(ValidationError, match="the picker picks routers if there are no engines"):
            RouterConfig.model_validate({"model": "m", **settings})
