"""Judges an output by its schema with the library `jsonschema`, as far as that library is exact.

Two keywords are judged here. `multipleOf` uses the decimal digits as they were written: in binary floating point 16.2
is not a multiple of 0.0001. Patterns take the module `regex`, which knows the classes of ECMA 262 that `re` does not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import jsonschema
import regex
from jsonschema.protocols import Validator

# The drafts that are judged and the URI of each, the newest first.
DRAFTS: Mapping[str, str] = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft4": "http://json-schema.org/draft-04/schema#",
}


class ExactNumber(float):
    """A number with a fraction or an exponent that keeps the digits it was written with."""

    def __new__(cls, digits: str) -> ExactNumber:
        made = super().__new__(cls, digits)
        made.digits = digits
        return made

    digits: str


def problem_of(draft: str, schema: Any, text: str) -> str | None:
    """Returns why the text is not valid against the schema by its draft, None if it is."""
    try:
        value = json.loads(text, parse_float=ExactNumber)
    except ValueError as error:
        return f"no JSON: {error}"
    worst = jsonschema.exceptions.best_match(_validator(draft, schema).iter_errors(value))
    return None if worst is None else str(worst.message)


def _validator(draft: str, schema: Any) -> Validator:
    base = jsonschema.validators.validator_for({"$schema": DRAFTS[draft]})
    return jsonschema.validators.extend(base, _KEYWORDS)(schema, format_checker=base.FORMAT_CHECKER)


_Errors = Iterator[jsonschema.ValidationError]


def _multiple_of(validator: Any, divisor: float, value: Any, schema: Any) -> _Errors:
    if validator.is_type(value, "number") and (_exact(value) / _exact(divisor)).denominator != 1:
        yield jsonschema.ValidationError(f"{value!r} is not a multiple of {divisor!r}")


def _exact(number: float) -> Fraction:
    return Fraction(number.digits if isinstance(number, ExactNumber) else str(number))


def _pattern(validator: Any, pattern: str, value: Any, schema: Any) -> _Errors:
    if validator.is_type(value, "string") and not regex.search(pattern, value):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Mapping[str, Any], value: Any, schema: Any) -> _Errors:
    if not validator.is_type(value, "object"):
        return
    for pattern, inner in patterns.items():
        for key in value:
            if regex.search(pattern, key):
                yield from validator.descend(value[key], inner, path=key, schema_path=pattern)


def _additional_properties(validator: Any, inner: Any, value: Any, schema: Any) -> _Errors:
    if not validator.is_type(value, "object"):
        return
    for key in value.keys() - schema.get("properties", {}).keys():
        if not any(regex.search(pattern, key) for pattern in schema.get("patternProperties", {})):
            yield from validator.descend(value[key], {"not": {}} if inner is False else inner, path=key)


_KEYWORDS = {
    "multipleOf": _multiple_of,
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
}
