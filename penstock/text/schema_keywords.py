"""Replaces keywords of JSON schemas that llguidance does not know by equivalent ones that it does. Pure.

The result is equivalent to the given schema, or stricter where that costs a model nothing: an IRI becomes a URI, and
the names listed by `propertyNames` come in order. A text that is valid against the result is valid against the given
schema. A keyword that cannot be rewritten stays, so that llguidance refuses it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Schema = dict[str, Any]

_MAX_DEPTH = 32
_MAX_DEPENDENCIES = 5  # dependencies of one object; llguidance combines all their alternatives
_MAX_NAMES = 4096  # written for `propertyNames` in a whole schema, which may use a list many times
_SCHEMAS = ("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames")
_MORE_SCHEMAS = ("then", "unevaluatedItems", "unevaluatedProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_COUNTS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")
_ANNOTATIONS = frozenset({"$comment", "default", "deprecated", "description", "examples", "title"})
# With one of these, the evaluated properties do not follow from the neighbouring keywords.
_APPLICATORS = frozenset(
    {"$dynamicRef", "$recursiveRef", "$ref", "allOf", "anyOf", "dependentSchemas", "if", "not", "oneOf"}
)
# Maps a format to a narrower one: all its texts have both (RFC 3986, RFC 3987, RFC 6531, RFC 5890, RFC 6570).
_NARROWER_FORMATS = {
    "idn-email": "email",
    "idn-hostname": "hostname",
    "iri": "uri",
    "iri-reference": "uri",
    "uri-reference": "uri",
    "uri-template": "uri",
}
_POINTER = "(/([^~/]|~[01])*)*"  # RFC 6901
_FORMAT_PATTERNS = {
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(0|[1-9][0-9]*)(#|{_POINTER})$",
}
_TYPES = ("null", "boolean", "number", "string", "array", "object")


def in_known_keywords(schema: Mapping[str, Any]) -> Schema:
    """Returns the schema with keywords that llguidance knows, where they can be replaced. Does not change its
    argument.
    """
    return _Writer(schema).write(dict(schema))


class _Writer:
    """Rewrites one schema. Its references point into `root`."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_names = 0

    def write(self, schema: Schema, depth: int = 0) -> Schema:
        """Rewrites the schema and its parts in place, and returns it; parts nested too deeply stay unchanged."""
        if depth > _MAX_DEPTH or not isinstance(schema.get("allOf", []), list):
            return schema
        for keyword in (*_SCHEMAS, *_MORE_SCHEMAS):
            if keyword in schema:
                schema[keyword] = self._part(schema[keyword], depth)
        for keyword in _LISTS:
            if isinstance(schema.get(keyword), list):
                schema[keyword] = [self._part(each, depth) for each in schema[keyword]]
        for keyword in _MAPS:
            if isinstance(schema.get(keyword), dict):
                schema[keyword] = {name: self._part(each, depth) for name, each in schema[keyword].items()}
        _write_unevaluated(schema)
        _drop_idle(schema)
        _write_counts(schema)
        _write_format(schema)
        _write_dependencies(schema)
        _write_negation(schema)
        if "propertyNames" in schema:
            self._write_names(schema)
        return schema

    def _part(self, part: Any, depth: int) -> Any:
        return self.write(dict(part), depth + 1) if isinstance(part, dict) else part

    def _write_names(self, schema: Schema) -> None:
        names = self._referred(schema["propertyNames"])
        if isinstance(names, bool):
            names = {} if names else {"enum": []}
        if not isinstance(names, dict):
            return
        conditions = {keyword: value for keyword, value in names.items() if keyword not in _ANNOTATIONS}
        kind = conditions.pop("type", "string")
        if kind != "string":
            return
        if not conditions:
            del schema["propertyNames"]
            return
        listed = conditions.pop("enum", None) if len(conditions) == 1 else None
        if "const" in conditions and len(conditions) == 1:
            listed = [conditions.pop("const")]
        if isinstance(listed, list):
            listed = [name for name in listed if isinstance(name, str)]
            self._num_names += len(listed)
            if self._num_names <= _MAX_NAMES:
                _replace(schema, "propertyNames", {"properties": {name: {} for name in listed}})
        elif (pattern := _pattern_of(conditions)) is not None:
            _replace(schema, "propertyNames", {"patternProperties": {pattern: {}}})

    def _referred(self, part: Any) -> Any:
        """Returns the target of a part that is only a reference into this document."""
        reference = part.get("$ref") if isinstance(part, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/") or part.keys() - _ANNOTATIONS != {"$ref"}:
            return part
        found: Any = self._root
        for step in reference[2:].split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        return part if found is None else found


def _replace(schema: Schema, keyword: str, conditions: Schema) -> None:
    """Replaces a keyword about property names: `conditions` lists the only properties allowed."""
    del schema[keyword]
    _require(schema, conditions | {"additionalProperties": False})


def _require(schema: Schema, more: Schema) -> None:
    """Adds a condition that must also hold."""
    schema["allOf"] = [*schema.get("allOf", ()), more]


def _pattern_of(conditions: Schema) -> str | None:
    """Returns a regular expression for the texts that match this schema, or None."""
    if conditions.keys() == {"pattern"} and isinstance(conditions["pattern"], str):
        return str(conditions["pattern"])
    if conditions.keys() <= {"minLength", "maxLength"}:
        least, most = conditions.get("minLength", 0), conditions.get("maxLength", "")
        if isinstance(least, int) and (isinstance(most, int) or most == ""):
            return f"^(.|\\n){{{least},{most}}}$"
    return None


def _write_unevaluated(schema: Schema) -> None:
    """Rewrites `unevaluated*` keywords in terms of the neighbouring keywords, if no other part evaluates anything."""
    if not _APPLICATORS & schema.keys():
        if "unevaluatedProperties" in schema:
            schema.setdefault("additionalProperties", schema["unevaluatedProperties"])
            del schema["unevaluatedProperties"]
        is_tuple = isinstance(schema.get("items"), list) or "additionalItems" in schema
        if "unevaluatedItems" in schema and not is_tuple and "contains" not in schema:
            schema.setdefault("items", schema["unevaluatedItems"])
            del schema["unevaluatedItems"]
    for keyword in ("unevaluatedItems", "unevaluatedProperties"):
        if keyword in schema and (schema[keyword] is True or schema[keyword] == {}):
            del schema[keyword]


def _drop_idle(schema: Schema) -> None:
    """Drops keywords without effect, unless they determine which parts count as evaluated."""
    if "if" not in schema:
        schema.pop("then", None)
        schema.pop("else", None)
    elif "then" not in schema and "else" not in schema and not _counts_evaluated(schema):
        del schema["if"]
    if schema.get("minContains") == 0 and "maxContains" not in schema and not _counts_evaluated(schema):
        schema.pop("contains", None)
    if "contains" not in schema:
        schema.pop("minContains", None)
        schema.pop("maxContains", None)
    most = schema.get("maxItems")
    if schema.get("uniqueItems") is False or (isinstance(most, int | float) and most <= 1):
        schema.pop("uniqueItems", None)


def _counts_evaluated(schema: Schema) -> bool:
    return "unevaluatedItems" in schema or "unevaluatedProperties" in schema


def _write_counts(schema: Schema) -> None:
    for keyword in _COUNTS:
        count = schema.get(keyword)
        if isinstance(count, float) and count.is_integer():
            schema[keyword] = int(count)


def _write_format(schema: Schema) -> None:
    name = schema.get("format")
    if not isinstance(name, str):
        return
    if name in _NARROWER_FORMATS:
        schema["format"] = _NARROWER_FORMATS[name]
    elif name in _FORMAT_PATTERNS:
        del schema["format"]
        _require(schema, {"pattern": _FORMAT_PATTERNS[name]})


def _write_dependencies(schema: Schema) -> None:
    """Rewrites dependencies: either a property is absent, or its condition holds."""

    def write(keyword: str, kinds: type | tuple[type, ...], wanted: Callable[[str, Any], Schema]) -> None:
        parts = schema.get(keyword)
        if not isinstance(parts, dict) or not all(isinstance(part, kinds) for part in parts.values()):
            return
        if len(parts) <= _MAX_DEPENDENCIES:
            del schema[keyword]
            for name, part in parts.items():
                _require(schema, {"anyOf": [{"properties": {name: False}}, wanted(name, part)]})

    write("dependentRequired", list, lambda name, part: {"required": [name, *part]})
    write("dependentSchemas", (dict, bool), lambda name, part: {"required": [name], "allOf": [part]})


def _write_negation(schema: Schema) -> None:
    """Rewrites `not`, if it excludes a type, the presence of properties, anything, or nothing."""
    if "not" not in schema:
        return
    part = schema["not"]
    if part is False:
        del schema["not"]
    elif not isinstance(part, dict):
        return
    elif part.keys() == {"required"} and isinstance(part["required"], list) and part["required"]:
        del schema["not"]
        _require(schema, {"anyOf": [{"properties": {name: False}} for name in part["required"]]})
        _require(schema, {"type": "object"})
    elif part.keys() == {"type"}:
        banned = [part["type"]] if isinstance(part["type"], str) else part["type"]
        if isinstance(banned, list) and "integer" not in banned and all(name in _TYPES for name in banned):
            del schema["not"]
            _require(schema, {"type": [name for name in _TYPES if name not in banned]})
