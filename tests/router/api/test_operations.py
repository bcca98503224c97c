"""Tests probes, version, load, the OpenAPI document, refusals of unserved calls, and calls from browser pages."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import httpx
import jsonschema
import pytest

from penstock.rpc.secret import digest_of
from router.api.http.error_answers import unserved
from router.api.http.openapi.page import render_page
from tests.support.router.router_fakes import FakeWorker, running_router

CALLS = re.compile(r'self\._(?:get|post|put|patch|delete|get_api_list)\(\s*(?:path_template\()?f?"(/[^"?]*)')


@pytest.fixture(name="router")
async def _router():
    async with running_router(await FakeWorker().start(), cors_origins=("https://chat.example",)) as router:
        yield router


@pytest.fixture(name="http")
async def _http(router):
    async with httpx.AsyncClient(base_url=router.http_url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("path", ["/health", "/health/ready", "/ready", "/health/live", "/live", "/version"])
async def test_every_caller_gets_the_state(http, path):
    answer = await http.get(path)
    assert answer.status_code == 200
    assert set(answer.json()) in ({"status"}, {"version"})


async def test_load_counts_the_requests_in_flight(http):
    assert (await http.get("/load")).json() == {"server_load": 0, "num_waiting": 0}
    body = {"prompt": "Hello", "max_tokens": 4, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.aiter_lines()
        await anext(lines)
        assert (await http.get("/load")).json()["server_load"] in (0, 1)  # the answer may already be complete
        async for _ in lines:
            pass
    assert (await http.get("/load")).json()["server_load"] == 0


async def test_the_metrics_port_lists_the_workers_with_their_own_metrics() -> None:
    workers = [
        await FakeWorker("decode-0", metrics_address="10.0.0.1:9100").start(),
        await FakeWorker("prefill-0", role="prefill", epoch=2, metrics_address="10.0.0.2:9100").start(),
        await FakeWorker("decode-1", epoch=3).start(),
    ]
    async with running_router(*workers, metrics_port=0) as router, httpx.AsyncClient(timeout=60) as http:
        port = router.server.ports.metrics
        answer = await http.get(f"http://127.0.0.1:{port}/metrics/targets")
        assert sorted(answer.json(), key=str) == [
            {"targets": [address], "labels": {"penstock_worker": name, "penstock_role": role}}
            for name, role, address in (
                ("decode-0", "decode", "10.0.0.1:9100"),
                ("prefill-0", "prefill", "10.0.0.2:9100"),
            )
        ]
        # Callers of the model do not get the list.
        assert (await http.get(f"{router.http_url}/metrics/targets")).status_code == 404


async def test_the_openapi_document_describes_every_call(http, router):
    document = (await http.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    generating = {"/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"}
    others = {"/v1/models", "/v1/messages/count_tokens", "/v1/responses/{response_id}", "/tokenize", "/detokenize"}
    assert generating | others | {"/health", "/load", "/metrics", "/version"} <= set(document["paths"])
    schemas = document["components"]["schemas"]
    for path, name in (("/v1/completions", "CompletionBody"), ("/v1/chat/completions", "ChatBody")):
        call = document["paths"][path]["post"]
        content = call["requestBody"]["content"]["application/json"]
        assert content["schema"] == {"$ref": f"#/components/schemas/{name}"}
        assert {"200", "400", "401", "429", "503", "504"} <= set(call["responses"])
        assert set(call["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
        jsonschema.Draft202012Validator.check_schema(schemas[name])
    assert "messages" in schemas["ChatBody"]["properties"]
    assert _references(document) <= {f"#/components/schemas/{name}" for name in schemas}


def _references(part: object) -> set[str]:
    if isinstance(part, dict):
        own = {part["$ref"]} if isinstance(part.get("$ref"), str) else set()
        return own.union(*map(_references, part.values()))
    return set().union(*map(_references, part)) if isinstance(part, list) else set()


async def test_the_document_accepts_valid_bodies_and_no_others(http):
    document = (await http.get("/openapi.json")).json()
    schema = {"$ref": "#/components/schemas/ChatBody", "components": document["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3})
    assert not validator.is_valid({"messages": "Hi"})
    assert not validator.is_valid({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": "three"})


async def test_the_page_shows_the_document(http):
    page = await http.get("/docs")
    assert page.status_code == 200
    document = (await http.get("/openapi.json")).json()
    for path, operations in document["paths"].items():
        for method in operations:
            assert f"<b>{method.upper()} {path}</b>" in page.text
    named = set(re.findall(r'href="#(\w+)"', page.text))
    assert "ChatBody" in named
    assert named <= set(re.findall(r'<details id="(\w+)"', page.text))  # every link has a target
    assert "<code>max_tokens</code>" in page.text


async def test_the_page_needs_no_other_host_and_no_script(http):
    page = await http.get("/docs")
    assert "<script" not in page.text
    assert not re.search(r'(?:src|href)="(?:https?:)?//', page.text)
    assert page.headers["content-security-policy"].startswith("default-src 'none'")


def test_text_from_the_document_is_escaped_on_the_page():
    schema = {"properties": {"<i>": {"enum": ["<b>"], "description": "<u>"}}, "required": ["<i>"]}
    operation = {"summary": "<em>", "responses": {"200": {"description": "<q>"}}}
    page = render_page(
        {
            "info": {"title": "<t>", "version": "1"},
            "paths": {"/<p>": {"get": operation}},
            "components": {"schemas": {"<s>": schema}},
        },
        "openapi.json",
    )
    for text in ("<i>", "<u>", "<em>", "<q>", "<t>", "<p>x", "<s>"):
        assert text not in page
    assert "<code>&lt;b&gt;</code>" in page
    assert "Required. &lt;u&gt;" in page


@pytest.mark.parametrize(
    ("method", "path", "status", "message", "code"),
    [
        ("POST", "/v1/embeddings", 404, "Penstock has no embeddings", "not_supported"),
        ("POST", "/v1/audio/speech", 404, "Penstock has no speech and transcription", "not_supported"),
        ("POST", "/rerank", 404, "Penstock has no reranking", "not_supported"),
        ("POST", "/v1/responses/compact", 405, "Penstock has no compaction", "not_supported"),
        ("GET", "/v1/chat/completions/chatcmpl-1", 404, "Penstock has no stored chat completions", "not_supported"),
        ("GET", "/nothing", 404, "GET /nothing: Not Found", "not_found"),
        ("GET", "/v1/completions", 405, "GET /v1/completions: Method Not Allowed", "method_not_allowed"),
    ],
)
async def test_unserved_calls_are_refused_with_a_reason(http, method, path, status, message, code):
    answer = await http.request(method, path)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")
    assert message in error["message"]


async def test_batches_of_messages_are_refused_in_anthropics_shape(http):
    answer = await http.post("/v1/messages/batches", json={"requests": []})
    assert answer.status_code == 404
    assert answer.json()["type"] == "error"
    assert "Penstock has no batches of messages" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("client", "prefix"), [("openai", "/v1"), ("anthropic", "")])
async def test_each_call_of_a_client_is_served_or_refused_by_name(http, client, prefix):
    """Reads the paths from the sources of the client's package, which take a second to read and three to import."""
    spec = importlib.util.find_spec(client)
    paths = set()
    for file in (Path(spec.origin).parent / "resources").rglob("*.py"):
        paths |= {prefix + path for path in CALLS.findall(file.read_text())}
    assert len(paths) > 20
    served = (await http.get("/openapi.json")).json()["paths"]
    routes = [re.compile(re.sub(r"\{[^}]*\}", "[^/]+", path) + "$") for path in served]
    for path in sorted(paths):
        is_served = any(route.match(path) for route in routes)
        assert is_served or unserved(path), path


async def test_a_page_of_an_allowed_origin_may_call(http):
    question = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    allowed = await http.options("/v1/completions", headers={"origin": "https://chat.example", **question})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
    refused = await http.options("/v1/completions", headers={"origin": "https://evil.example", **question})
    assert refused.status_code == 400
    answer = await http.get("/v1/models", headers={"origin": "https://chat.example"})
    assert answer.headers["access-control-allow-origin"] == "https://chat.example"
    assert "x-request-id" in answer.headers["access-control-expose-headers"]


async def test_without_origins_no_page_may_call():
    async with running_router(await FakeWorker().start()) as router, httpx.AsyncClient() as client:
        answer = await client.get(f"{router.http_url}/v1/models", headers={"origin": "https://chat.example"})
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("path", ["/ui/state", "/ui/controller"])
async def test_the_live_page_requires_the_metrics_token_if_there_are_tenants(path, tmp_path):
    token = tmp_path / "token"
    token.write_text("t" * 40)
    token.chmod(0o600)
    tenants = {"a": {"keys": [digest_of("k" * 40)]}}
    settings = {"tenants": tenants, "metrics_token_file": str(token)}
    async with running_router(await FakeWorker().start(), **settings) as router:
        async with httpx.AsyncClient(base_url=router.http_url, timeout=60) as http:
            assert (await http.get("/ui/")).status_code == 200
            for key in ("k" * 40, "x" * 40):
                assert (await http.get(path, headers={"authorization": f"Bearer {key}"})).status_code == 401
            answer = await http.get(path, headers={"authorization": f"Bearer {'t' * 40}"})
            assert answer.status_code == 200
            assert '"a"' not in answer.text
