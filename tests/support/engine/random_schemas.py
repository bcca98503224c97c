"""Makes random JSON schemas with every keyword that grammars obey, nested, with definitions and references."""

from __future__ import annotations

import random
from typing import Any

_WORDS = ("name", "size", "color", "tags", "price", "id", "notes", "kind", "weather", "left hand", 'quo"te', "größe")
_PATTERNS = ("^[a-f]{2,6}$", "^[A-Z][a-z]{1,5}-[0-9]{2}$", "^(red|green|blue)( [a-z]{3})?$", "^x*y{1,3}$")
_FORMATS = ("date", "time", "date-time", "ipv4", "uuid", "email")


def make_schema(seed: int) -> dict[str, Any]:
    """Returns the same schema for the same seed. Every output is finite, and most fit into a hundred tokens."""
    rng = random.Random(seed)
    made = _schema(rng, depth=rng.randint(0, 2))
    if rng.random() < 0.3:
        shared = _schema(rng, depth=0)
        made = {
            "$defs": {"shared": shared},
            "type": "object",
            "properties": {"first": {"$ref": "#/$defs/shared"}, "rest": made},
            "required": ["first", "rest"],
            "additionalProperties": False,
        }
    return made


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_string, _number, _constant] + ([_object, _array, _choice] * 2 if depth else [])
    return rng.choice(kinds)(rng, depth)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(_PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": rng.choice(_FORMATS)}
    low = rng.randint(0, 5)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 12)}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 200)}
    if kind == 1:
        return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + rng.randint(2, 99)}
    if kind == 2:
        return {"type": "integer", "minimum": 0, "maximum": 60, "multipleOf": rng.randint(2, 9)}
    return {"type": "number", "minimum": low, "maximum": low + 10}


def _constant(rng: random.Random, depth: int) -> dict[str, Any]:
    kind = rng.randrange(4)
    if kind == 0:
        return {"const": rng.choice([None, True, 7, "fixed text", {"a": [1, 2]}])}
    if kind == 1:
        return {"enum": rng.sample([1, 2.5, "one", "two words", None, False, [1], "größe"], rng.randint(1, 5))}
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    made: dict[str, Any] = {"type": "array", "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if rng.random() < 0.3:
        prefix = [_schema(rng, 0) for _ in range(low + 1)]
        return made | {"prefixItems": prefix, "items": _schema(rng, 0)}
    return made | {"items": _schema(rng, depth - 1)}


def _choice(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
