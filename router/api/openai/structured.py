"""Reads the fields of a body that ask for structured output, in the forms of OpenAI, vLLM and SGLang, as one `Grammar`.
Pure.

`router.text.grammar_check` compiles the grammar; its errors name the field in `StructuredFields.grammar_field`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark
from pydantic import BaseModel, PrivateAttr

from penstock.errors import InvalidInput
from penstock.text.grammars import MAX_SOURCE_BYTES
from penstock.types import Grammar, GrammarKind
from router.api.openai.json_bodies import shown

_MAX_EBNF_BYTES = 16 << 10  # limits the time of the converter, which is written in Python
_ANY_OBJECT = '{"type":"object"}'
_NO_SPACE = {"whitespace_flexible": False}
_OPTIONS_KEY = "x-guidance"  # key in a schema that holds options of llguidance

# Keys of `structured_outputs` that are allowed in addition to the grammars.
_SPACE_KEYS = ("disable_any_whitespace", "whitespace_pattern")
_NEUTRAL_KEYS: Mapping[str, tuple[object, ...]] = {
    "disable_fallback": (True, False),
    "disable_additional_properties": (False,),
}


class StructuredFields(BaseModel):
    """Declares the fields that ask for structured output. At most one of them may give a grammar."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: Any = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Any = None
    _field: str = PrivateAttr("")

    def grammar(self) -> Grammar | None:
        """Returns the grammar that the output must match, or None. Raises InvalidInput that names the field."""
        found: dict[str, Grammar] = {}
        if self.response_format is not None:
            found |= _response_format(self.response_format)
        if self.structured_outputs is not None:
            found |= _structured_outputs(self.structured_outputs)
        space = {} if self.guided_whitespace_pattern is None else {"whitespace_pattern": self.guided_whitespace_pattern}
        for name, read in _readers(space).items():
            value = getattr(self, name, None)
            if value is not None:
                found[name] = read(name, value)
        if len(found) > 1:
            first, second, *_ = found
            raise InvalidInput(second, f"is given in addition to {first}; give only one grammar")
        if space and "guided_json" not in found:
            raise InvalidInput("guided_whitespace_pattern", "is given without guided_json; leave it out")
        if not found:
            return None
        [(self._field, grammar)] = found.items()
        return grammar

    @property
    def grammar_field(self) -> str:
        """Returns the name of the field that gave the grammar; "tools" if no field did, since tools make one too."""
        return self._field or "tools"


def _readers(space: Mapping[str, Any]) -> Mapping[str, Callable[[str, Any], Grammar]]:
    return {
        "guided_json": lambda name, value: _schema(name, value, space),
        "guided_regex": _regex,
        "guided_choice": _choice,
        "guided_grammar": _ebnf,
        "json_schema": _schema,
        "regex": _regex,
        "ebnf": _ebnf,
        "structural_tag": _structural_tag,
    }


def _response_format(value: Mapping[str, Any]) -> dict[str, Grammar]:
    """Returns the grammar of OpenAI's `response_format`, by the name of its field; empty if it asks for plain text."""
    kind = value.get("type")
    if kind == "structural_tag":
        return {"response_format": _structural_tag("response_format", value)}
    keys = {"type", "json_schema"} if kind == "json_schema" else {"type"}
    _refuse_others("response_format", value, keys)
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"response_format": Grammar(GrammarKind.JSON_SCHEMA, _ANY_OBJECT)}
    if kind != "json_schema":
        given = shown(kind)
        raise InvalidInput("response_format.type", f"is {given}; give text, json_object, json_schema or structural_tag")
    inner = value.get("json_schema")
    if not isinstance(inner, dict):
        raise InvalidInput("response_format.json_schema", f"is {shown(inner)}; give an object with a schema")
    _refuse_others("response_format.json_schema", inner, {"name", "description", "schema", "strict"})
    field = "response_format.json_schema.schema"
    if not isinstance(inner.get("strict"), bool | None):
        raise InvalidInput("response_format.json_schema.strict", f"is {shown(inner['strict'])}; give true or false")
    if inner.get("schema") is None:
        raise InvalidInput(field, "is missing; add it")
    return {field: _schema(field, inner["schema"])}


def _structured_outputs(value: Mapping[str, Any]) -> dict[str, Grammar]:
    """Returns the grammars of vLLM's `structured_outputs`, by the names of their fields."""
    readers: Mapping[str, Callable[[str, Any], Grammar]] = {
        "json": lambda name, given: _schema(name, given, space),
        "json_object": lambda name, given: _schema(name, _ANY_OBJECT, space),
        "regex": _regex,
        "choice": _choice,
        "grammar": _ebnf,
        "structural_tag": _structural_tag,
    }
    prefix = "structured_outputs"
    _refuse_others(prefix, value, {*readers, *_SPACE_KEYS, *_NEUTRAL_KEYS})
    for name, neutral in _NEUTRAL_KEYS.items():
        given = value.get(name)
        if given is not None and not any(given is each for each in neutral):
            raise InvalidInput(f"{prefix}.{name}", f"= {shown(given)} is not supported; leave it out")
    compact, pattern = value.get("disable_any_whitespace"), value.get("whitespace_pattern")
    if not isinstance(compact, bool | None):
        raise InvalidInput(f"{prefix}.disable_any_whitespace", f"is {shown(compact)}; give true or false")
    if not isinstance(pattern, str | None):
        raise InvalidInput(f"{prefix}.whitespace_pattern", f"is {shown(pattern)}; give a regex")
    space: dict[str, Any] = {**_NO_SPACE} if compact else {}
    if pattern is not None:
        space["whitespace_pattern"] = pattern
    given_grammars = {name: given for name in readers if (given := value.get(name)) not in (None, False) or given == {}}
    if isinstance(value.get("json_object"), bool | None) is False:
        raise InvalidInput(f"{prefix}.json_object", f"is {shown(value['json_object'])}; give true or false")
    found = {f"{prefix}.{name}": readers[name](f"{prefix}.{name}", given) for name, given in given_grammars.items()}
    if not found:
        raise InvalidInput(prefix, f"has no grammar; give one of {', '.join(readers)}")
    return found


def _schema(field: str, value: Any, options: Mapping[str, Any] | None = None) -> Grammar:
    """Reads a JSON schema, given as a JSON value or as a string that contains it."""
    if isinstance(value, str):
        _check_size(field, value)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(field, f"is not valid JSON: {str(error)[:100]}") from None
    if not isinstance(value, dict | bool):
        raise InvalidInput(field, f"is {shown(value)}; a JSON schema is an object, true or false")
    if options:
        schema = value if isinstance(value, dict) else ({} if value else {"not": {}})
        own = schema.get(_OPTIONS_KEY)
        value = {**schema, _OPTIONS_KEY: {**(own if isinstance(own, dict) else {}), **options}}
    return _grammar(field, GrammarKind.JSON_SCHEMA, json.dumps(value, separators=(",", ":")))


def _regex(field: str, value: Any) -> Grammar:
    return _grammar(field, GrammarKind.REGEX, value)


def _choice(field: str, value: Any) -> Grammar:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise InvalidInput(field, f"is {shown(value)}; give a list of strings")
    return _grammar(field, GrammarKind.CHOICE, json.dumps(value))


def _ebnf(field: str, value: Any) -> Grammar:
    """Reads a grammar in Lark's or GBNF's variant of EBNF."""
    grammar = _grammar(field, GrammarKind.LARK, value)
    if "::=" not in grammar.source:
        return grammar
    if len(grammar.source.encode()) > _MAX_EBNF_BYTES:
        raise InvalidInput(field, f"has more than {_MAX_EBNF_BYTES} bytes; shorten it or write it in Lark's syntax")
    try:
        return _grammar(field, GrammarKind.LARK, any_to_lark(grammar.source))
    except (Exception, RecursionError) as error:  # the library does not document the exceptions that it raises
        raise InvalidInput(field, f"is not valid EBNF: {str(error)[:200]}") from None


def _structural_tag(field: str, value: Any) -> Grammar:
    """Reads a structural tag, given as a JSON object or as a string. Its content is checked when it is compiled."""
    if isinstance(value, dict):
        value = json.dumps(value, separators=(",", ":"))
    return _grammar(field, GrammarKind.STRUCTURAL_TAG, value)


def _grammar(field: str, kind: GrammarKind, source: Any) -> Grammar:
    if not isinstance(source, str) or not source:
        raise InvalidInput(field, f"is {shown(source)}; give a string")
    _check_size(field, source)
    return Grammar(kind, source)


def _check_size(field: str, source: str) -> None:
    if len(source) > MAX_SOURCE_BYTES or len(source.encode(errors="replace")) > MAX_SOURCE_BYTES:
        raise InvalidInput(field, f"has more than {MAX_SOURCE_BYTES} bytes; shorten it")


def _refuse_others(field: str, value: Mapping[str, Any], known: set[str]) -> None:
    for name, given in value.items():
        if name not in known and given is not None:
            raise InvalidInput(f"{field}.{name[:100]}", "is not a field of this API; leave it out")
