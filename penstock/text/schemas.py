"""Closes JSON schemas for generation: an object that names its properties gets no others. Pure.

By default JSON schemas allow additional properties, and a model would write some. A text that is valid against the
closed schema is valid against the given one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# With one of these, the object may have more than its listed properties, or the schema already says otherwise.
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
    """Returns the schema with `additionalProperties: false` for objects that only list their properties.

    Follows only properties and items, since a part that is combined with others may leave properties to them.
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
