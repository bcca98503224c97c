"""Renders the OpenAPI document as a plain HTML page, without scripts or resources from other hosts. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

Json = Mapping[str, Any]

_REFERENCE = "#/components/schemas/"
_FRAMEWORK_SCHEMAS = ("HTTPValidationError", "ValidationError")  # FastAPI's own errors, which are never sent
_STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif }
body { margin: 0 auto; max-width: 64rem; padding: 1rem }
code, summary b { font-family: ui-monospace, monospace }
details { border: 1px solid #8886; border-radius: 6px; margin: .5rem 0; padding: .5rem .75rem }
summary { cursor: pointer; overflow-wrap: anywhere }
table { border-collapse: collapse; width: 100% }
th, td { vertical-align: top; border-top: 1px solid #8884; padding: .25rem .5rem; text-align: left }
td { overflow-wrap: anywhere }
"""


def render_page(document: Json, document_url: str) -> str:
    """Returns the page: each call with its body and statuses, then each schema with its fields."""
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    calls = (
        _call(path, method, operation)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    )
    schemas = document["components"]["schemas"].items()
    bodies = (_schema(name, schema) for name, schema in schemas if name not in _FRAMEWORK_SCHEMAS)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f'<p>For programs: <a href="{escape(document_url)}">{escape(document_url)}</a>.</p>'
        f"<h2>Calls</h2>{''.join(calls)}<h2>Bodies</h2>{''.join(bodies)}</body></html>"
    )


def _call(path: str, method: str, operation: Json) -> str:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    body = f"<p>Body: {_type(content['schema'])}</p>" if content else ""
    rows = "".join(
        f"<tr><td>{escape(status)}</td><td>{escape(answer.get('description', ''))}</td></tr>"
        for status, answer in operation["responses"].items()
        if status != "422"  # FastAPI's own status, which is never sent
    )
    about = escape(operation.get("description") or operation.get("summary", ""))
    return (
        f"<details><summary><b>{escape(method.upper())} {escape(path)}</b> {about}</summary>{body}"
        f"<table><tr><th>Status</th><th>Meaning</th></tr>{rows}</table></details>"
    )


def _schema(name: str, schema: Json) -> str:
    required = schema.get("required", ())
    rows = "".join(_field(field, value, field in required) for field, value in schema.get("properties", {}).items())
    table = f"<table><tr><th>Field</th><th>Type</th><th>Meaning</th></tr>{rows}</table>" if rows else ""
    about = f"<p>{escape(schema.get('description', ''))}</p>"
    return f'<details id="{escape(name)}"><summary><b>{escape(name)}</b></summary>{about}{table}</details>'


def _field(name: str, schema: Any, is_required: bool) -> str:
    meaning = schema.get("description", "") if isinstance(schema, Mapping) else ""
    parts = ["Required.", meaning] if is_required else [meaning]
    return f"<tr><td><code>{escape(name)}</code></td><td>{_type(schema)}</td><td>{escape(' '.join(parts))}</td></tr>"


def _type(schema: Any) -> str:
    """Returns a schema's type as HTML, with links to the schemas that it names."""
    return " or ".join(_types(schema))


def _types(schema: Any) -> Iterator[str]:
    if not isinstance(schema, Mapping) or not schema:
        yield "any"
    elif "$ref" in schema:
        name = escape(schema["$ref"].removeprefix(_REFERENCE))
        yield f'<a href="#{name}">{name}</a>'
    elif choices := schema.get("anyOf", schema.get("oneOf")):
        for each in choices:
            yield from _types(each)
    elif "enum" in schema or "const" in schema:
        yield from (f"<code>{escape(str(value))}</code>" for value in schema.get("enum", [schema.get("const")]))
    elif schema.get("type") == "array":
        yield f"list of {_type(schema.get('items', {}))}"
    else:
        kind = schema.get("type", "any")
        yield from map(escape, kind if isinstance(kind, list) else [kind])
