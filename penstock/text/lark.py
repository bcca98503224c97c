"""Builds a Lark grammar from rules, JSON schemas, and literals that may contain special tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from penstock.errors import InvalidInput
from penstock.text.schema_keywords import in_known_keywords

ANY_TEXT = r"(.|\n)*"
MAX_GRAMMAR = 1 << 20
_JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_SLASH = re.compile(r"\\.|[/\n]", re.DOTALL)  # also matches escaped pairs, which stay unchanged
_DEFINITIONS = ("$defs", "definitions")


class LarkWriter:
    """Collects rules. Writes marks among `special_tokens` (text to id) as tokens, since text does not match them."""

    def __init__(self, special_tokens: Mapping[str, int], field: str) -> None:
        """`field` names the request's field in errors."""
        self.special_tokens = special_tokens
        self._field = field
        self._rules: list[str] = []
        self._size = 0  # total characters of the rules
        found = [re.escape(mark) for mark in sorted(special_tokens, key=len, reverse=True) if mark]
        self._split = re.compile("(" + "|".join(found) + ")") if found else None

    def rule(self, body: str, options: str = "") -> str:
        """Adds a rule and returns its name."""
        name = f"r{len(self._rules)}"
        self._size += len(body)
        if self._size > MAX_GRAMMAR:
            problem = f"makes a grammar of more than {MAX_GRAMMAR} characters; simplify its schemas"
            raise InvalidInput(self._field, problem)
        self._rules.append(f"{name}{options}: {body}")
        return name

    def literal(self, text: str) -> str:
        """Returns an expression that matches exactly this text."""
        pieces = self._split.split(text) if self._split else [text]
        return " ".join(
            f"<[{self.special_tokens[piece]}]>" if piece in self.special_tokens else json.dumps(piece)
            for piece in pieces
            if piece
        )

    def json(self, schema: Mapping[str, Any], form: Mapping[str, Any] = _JSON_FORM) -> str:
        """Returns an expression that matches JSON of a schema, with the white space of `form`."""
        return "%json " + json.dumps({**in_known_keywords(schema), "x-guidance": dict(form)})

    def until(self, mark: str) -> str:
        """Returns an expression that matches any text up to and including the first `mark`."""
        if self._split and (token := self._split.search(mark)):
            before = mark[: token.start()]
            return self.rule(f"/{ANY_TEXT}{_quote(before)}/ {self.literal(mark[token.start() :])}")
        return self.rule(f"/{ANY_TEXT}{_quote(mark)}/", "[lazy]")

    def regex(self, pattern: str) -> str:
        """Returns an expression that matches a regular expression."""
        return f"/{_SLASH.sub(_escape_slash, pattern)}/"

    def text(self) -> str:
        """Returns an expression that matches any text."""
        return f"/{ANY_TEXT}/"

    def properties(
        self, schema: Mapping[str, Any], write: Callable[[str, Mapping[str, Any]], str], separator: str
    ) -> str:
        """Returns an expression that matches the properties of an object's schema in their order.

        `write` returns the expression of one property for its name and schema. Raises InvalidInput if the schema has no
        properties of its own.
        """
        if any(word in schema for word in ("anyOf", "oneOf", "allOf", "$ref")):
            problem = "anyOf, oneOf, allOf or $ref at the top of a tool's parameters cannot be enforced with this model"
            raise InvalidInput(self._field, f"{problem}; write the parameters as properties of one object")
        shared = {word: schema[word] for word in _DEFINITIONS if word in schema}
        wanted, properties = schema.get("required"), schema.get("properties")
        names_required = {each for each in wanted if isinstance(each, str)} if isinstance(wanted, list) else set()
        first = following = '""'
        for name, value in reversed(list(properties.items()) if isinstance(properties, Mapping) else []):
            item = self.rule(write(name, {**value, **shared} if isinstance(value, Mapping) else shared))
            first_next = f"{item} {following}"
            following_next = f"{self.literal(separator)} {item} {following}"
            optional = name not in names_required
            first = self.rule(f"{first_next} | {first}" if optional else first_next)
            following = self.rule(f"{following_next} | {following}" if optional else following_next)
        return first

    def finish(self, start: str) -> str:
        """Returns the grammar whose outputs match the expression `start`."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules]) + "\n"


def _quote(text: str) -> str:
    """Returns a regular expression that matches exactly this text."""
    return re.sub(r"([\\.+*?()|\[\]{}^$/&~#-])", r"\\\1", text).replace("\n", r"\n")


def _escape_slash(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(found[0], found[0])
