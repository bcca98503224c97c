"""Reads a JSON object field by field, with errors that name the field by its path. Pure.

A dialect reads every field that it supports. `finish` checks the rest, so that no field that would change the answer is
ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from penstock.errors import InvalidInput
from router.api.openai.fields import check_fields
from router.api.openai.json_bodies import as_integer, shown

_NONE: frozenset[str] = frozenset()
_NOTHING: Mapping[str, tuple[object, ...]] = {}


class JsonObject:
    """An object in a body, with its path there, such as `messages[2].content[0]`. Null counts as absent.

    Each method takes a field out of the object, so that a field can be read once.
    """

    def __init__(self, value: object, path: str = "") -> None:
        """Raises InvalidInput if the value is not an object."""
        if not isinstance(value, dict):
            raise InvalidInput(path or "body", f"is {shown(value)}; give an object")
        self.path = path
        self._rest: dict[str, Any] = {name: each for name, each in value.items() if each is not None}

    def error(self, name: str, problem: str) -> InvalidInput:
        """Returns an error that names the field by its path."""
        return InvalidInput(self._name(name), problem)

    def text(self, name: str) -> str | None:
        return self._read(name, str, "text")

    def needed_text(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise self.error(name, "is missing; add it")
        return value

    def choice(self, name: str, *choices: str) -> str | None:
        """Returns a text that is one of the choices, or None if the field is absent."""
        value = self.text(name)
        if value is not None and value not in choices:
            raise self.error(name, f"is {shown(value)}; give one of {', '.join(choices)}")
        return value

    def flag(self, name: str) -> bool | None:
        return self._read(name, bool, "true or false")

    def integer(self, name: str) -> int | None:
        value = as_integer(self._rest.pop(name, None))
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self.error(name, f"is {shown(value)}; give an integer")
        return value

    def values(self, name: str) -> list[Any] | None:
        return self._read(name, list, "a list")

    def mapping(self, name: str) -> dict[str, Any] | None:
        """Returns an object whose fields the caller chooses, such as a JSON schema."""
        return self._read(name, dict, "an object")

    def child(self, name: str) -> JsonObject | None:
        value = self._rest.pop(name, None)
        return None if value is None else JsonObject(value, self._name(name))

    def children(self, name: str) -> Iterator[JsonObject]:
        """Yields the objects of a list."""
        for number, each in enumerate(self.values(name) or ()):
            yield JsonObject(each, f"{self._name(name)}[{number}]")

    def any(self, name: str) -> Any:
        """Returns a field of any type."""
        return self._rest.pop(name, None)

    def take(self, *names: str) -> dict[str, Any]:
        """Returns the given ones among these fields, unchecked: another reader checks them."""
        return {name: self._rest.pop(name) for name in names if name in self._rest}

    def finish(self, harmless: Set[str] = _NONE, refused: Mapping[str, tuple[object, ...]] = _NOTHING) -> None:
        """Checks the fields that were not read. Raises InvalidInput for one that is neither harmless nor has a value
        that `refused` allows.
        """
        if self._rest:
            check_fields(self._rest, f"{self.path}." if self.path else "", harmless, refused)

    def _name(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def _read(self, name: str, kind: type, wanted: str) -> Any:
        value = self._rest.pop(name, None)
        if value is not None and not isinstance(value, kind):
            raise self.error(name, f"is {shown(value)}; give {wanted}")
        return value
