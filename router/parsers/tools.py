"""The tools that a request offers, in the form that parsers use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolFunction:
    """A tool that the model may call. `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False  # the arguments must be valid against the schema

    def has(self, key: str) -> bool:
        """Returns whether the schema has the parameter `key`."""
        properties = self.parameters.get("properties")
        return isinstance(properties, Mapping) and key in properties

    def types_of(self, key: str) -> frozenset[str]:
        """Returns the JSON types that the schema gives the parameter `key`; empty if it gives none."""
        properties = self.parameters.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return frozenset(_types(schema, 0))


def _types(schema: object, depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {each for each in kind if isinstance(each, str)}
    values = allowed_values(schema)
    if values is not None:
        return {json_type(value) for value in values}
    found: set[str] = set()
    for word in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(word)
        for branch in branches if isinstance(branches, list) else ():
            found |= _types(branch, depth + 1)
    return found


def allowed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Returns the values that a schema lists; None if it lists none."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return values if isinstance(values, list) and values else None


def json_type(value: object) -> str:
    """Returns the JSON type of a value; every number is a "number"."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "null" if value is None else "array" if isinstance(value, list) else "object"
