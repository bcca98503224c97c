"""Parses the JSON of an HTTP body at a bounded cost, and declares the types of its numbers. Pure.

A body with too many values is refused before parsing. Parsing a body such as `[[],[],...]` takes 10 to 300 times its
memory and holds the interpreter's lock meanwhile. At the largest size, that would block all other requests for seconds,
on whatever thread the parser runs.
"""

from __future__ import annotations

import reprlib
from typing import Annotated, Any

from pydantic import BeforeValidator, StrictFloat, StrictInt
from pydantic_core import from_json

from penstock.config.limits import LimitsConfig
from penstock.errors import InvalidInput

SMALL_BODY_BYTES = 16 * 1024  # bodies up to this size are parsed and validated in 1 to 2 ms, whatever their content
_UNCOUNTED_BYTES = 64 * 1024  # bodies up to this size cannot hold more values than a large body may have
_VALUES_PER_MESSAGE = 32  # a chat message with one part takes eight strings, two objects and a list

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100
_REPR.maxlevel = 3


def as_integer(value: object) -> object:
    """Returns a number without a fraction, such as 5.0, as an integer, and all else unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Without strictness pydantic converts texts and booleans to numbers. Elements of long lists are `TokenId`: a Python
# function for each would cost more than the rest of their validation.
Integer = Annotated[StrictInt, BeforeValidator(as_integer)]  # 5 and 5.0
Number = StrictFloat  # integers too
TokenId = StrictInt


def read_json(raw: bytes, limits: LimitsConfig) -> Any:
    """Returns the JSON value of a body. Raises InvalidInput."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput("body", f"is not valid UTF-8 ({error.reason} at byte {error.start}); send UTF-8") from error
    if len(raw) > _UNCOUNTED_BYTES:
        _check_structure(raw, limits)
    try:
        return from_json(raw)
    except ValueError as error:
        raise InvalidInput("body", f"is not valid JSON: {error}") from error


def _check_structure(raw: bytes, limits: LimitsConfig) -> None:
    """Raises InvalidInput if a body has too many strings, containers or values.

    Counts quotes, brackets and commas in a few passes that create no object per value.
    """
    limit = _VALUES_PER_MESSAGE * limits.messages + _UNCOUNTED_BYTES // 2
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote that is left begins or ends a string
    num_strings = plain.count(b'"') // 2
    if num_strings > limit:
        raise InvalidInput("body", f"has {num_strings} strings; send {limit} or fewer")
    outside = b"".join(plain.split(b'"')[::2])
    num_containers = outside.count(b"[") + outside.count(b"{")
    if num_containers > limit:
        raise InvalidInput("body", f"has {num_containers} lists and objects; send {limit} or fewer")
    num_separated = outside.count(b",")
    if num_separated > limit + limits.prompt_tokens:
        raise InvalidInput("body", f"has {num_separated} values; send {limit + limits.prompt_tokens} or fewer")


def shown(value: object) -> str:
    """Returns a shortened representation of a body's value, for errors."""
    return _REPR.repr(value)[:100]
