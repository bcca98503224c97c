"""Closes JSON schemas for generation: an object that names its properties gets no others. Pure.

By its own rules a schema allows any further property, and a model would use that. Whatever is valid against the closed
schema is valid against the given one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# With one of these, the properties beside it are not all that its object may have, or say so themselves.
_OPENING = frozenset(
    {
        "$dynamicRef",
        "$ref",
        "additionalProperties",
        "allOf",
        "anyOf",
        "dependentRequired",
        "dependentSchemas",
        "if",
        "minProperties",
        "not",
        "oneOf",
        "patternProperties",
        "propertyNames",
        "unevaluatedProperties",
    }
)
_MAX_DEPTH = 32


def closed(schema: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """Returns the schema with `additionalProperties: false` where objects name their properties and say nothing else.

    Follows properties and items alone: a part that is combined with others may leave properties to them.
    """
    found = dict(schema)
    if depth > _MAX_DEPTH or _OPENING & found.keys():
        return found
    properties, items = found.get("properties"), found.get("items")
    if isinstance(properties, Mapping):
        found["properties"] = {
            name: closed(each, depth + 1) if isinstance(each, Mapping) else each for name, each in properties.items()
        }
        required = found.get("required", [])
        if isinstance(required, list) and all(isinstance(name, str) and name in properties for name in required):
            found["additionalProperties"] = False
    if isinstance(items, Mapping):
        found["items"] = closed(items, depth + 1)
    return found
