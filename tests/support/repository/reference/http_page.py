"""Renders docs/reference/http.md from the OpenAPI document that a router serves."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import MagicMock

import httpx

from penstock.config.router import BatchConfig, RouterConfig
from router.api.http.app import make_app
from router.api.http.offline.parts import OfflineParts

Json = Mapping[str, Any]
_HEAD = """\
# HTTP reference

Every call of a router's HTTP port (8000), generated from its OpenAPI document
(`python -m tests.support.repository.reference --write`). A running router serves the document at `/openapi.json` and
shows it at `/docs`. What each field does, and which are refused, is said in [OpenAI's API](../openai.md), [the
Responses API](../responses.md) and [Anthropic's Messages API](../anthropic.md). Every call but probes takes
`Authorization: Bearer KEY` where [tenants](../security.md#tenants) are configured. The live page's own calls, below
`/ui`, are not part of the document.
"""
_CONFIG = RouterConfig(model="model", workers=("worker:1",), batches=BatchConfig(folder="batches"))
_OF_FRAMEWORK = {"HTTPValidationError", "ValidationError"}


def document() -> Json:
    """Returns the OpenAPI document. Nothing is served: the app runs in this process, with mocks as its parts."""
    app = make_app(MagicMock(), MagicMock(), MagicMock(), MagicMock(), batches=OfflineParts(_CONFIG, MagicMock())).app

    async def get() -> Json:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://router") as client:
            found: Json = (await client.get("/openapi.json")).json()
            return found

    return asyncio.run(get())


def render() -> str:
    """Returns the page."""
    found = document()
    rows = [_operation(path, method, each) for path, of in found["paths"].items() for method, each in of.items()]
    calls = ["| call | body | statuses | effect |", "|---|---|---|---|", *rows]
    bodies = [part for name, schema in found["components"]["schemas"].items() for part in _schema(name, schema)]
    return "\n".join([_HEAD, "## Calls", "", *calls, "", "## Bodies", "", *bodies]).rstrip() + "\n"


def _operation(path: str, method: str, operation: Json) -> str:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    # A default of the framework that is never answered.
    statuses = [status for status in operation["responses"] if status != "422"]
    about = " ".join(operation.get("description", "").split()) or operation.get("summary", "")
    body = _type(content.get("schema", {})) if content else ""
    return f"| `{method.upper()} {path}` | {body} | {' '.join(statuses)} | {about} |"


def _schema(name: str, schema: Json) -> Iterator[str]:
    if name in _OF_FRAMEWORK:
        return
    yield f"### {name}"
    yield ""
    if about := " ".join(schema.get("description", "").split()):
        yield _cell(about)
        yield ""
    required = set(schema.get("required", ()))
    if properties := schema.get("properties"):
        yield from ("| field | type | meaning |", "|---|---|---|")
        for field, value in properties.items():
            meaning = " ".join(str(value.get("description", "")).split()) if isinstance(value, Mapping) else ""
            parts = ["required." if field in required else "", meaning]
            yield f"| `{field}` | {_type(value)} | {_cell(' '.join(part for part in parts if part))} |"
        yield ""


def _type(schema: Any) -> str:
    if not isinstance(schema, Mapping) or not schema:
        return "any"
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"] if each != {"type": "null"})
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return ", ".join(kind) if isinstance(kind, list) else str(kind)


def _cell(text: str) -> str:
    return re.sub(r"\|", r"\\|", text)
