"""Translates pydantic's errors to errors of this API, which name the field, its value and what to give. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from penstock.errors import InvalidInput
from router.api.openai.json_bodies import shown

# The values that a field takes, by pydantic's type of error.
_WANTED: Mapping[str, str] = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "float_type": "a number",
    "int_parsing": "an integer",
    "int_parsing_size": "an integer with fewer digits",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "an object",
    "prompt_form": "text, token ids, or a list of either",
    "string_type": "text",
}


def explain(error: ValidationError, forms: Mapping[str, str]) -> InvalidInput:
    """Returns an error for the first problem. For a union of types it names the field, without one of the types.

    `forms` maps the tags of a union's forms to what each expects; the tags are left out of the field's name.
    """
    problems = error.errors(include_url=False, include_context=False)
    first = problems[0]
    parts = [str(part)[:100] for part in first["loc"] if part not in forms and part != "[key]"]
    field = parts[0] if parts else "body"
    if len(problems) == 1:
        field += "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in parts[1:])
    if first["type"] == "missing":
        return InvalidInput(field, "is missing; add it")
    wanted = _wanted(problems, forms)
    return InvalidInput(field, f"is {shown(first['input'])}" + (f"; give {wanted}" if wanted else f": {first['msg']}"))


def _wanted(problems: Sequence[Any], forms: Mapping[str, str]) -> str:
    """Returns what to give instead; "" if only pydantic's own message explains the problem."""
    [first, *others] = problems
    if not others and first["type"] == "string_type" and first["loc"][-1] in forms:
        return forms[first["loc"][-1]]
    wanted = list(dict.fromkeys(_WANTED.get(problem["type"], "") for problem in problems))
    if others and _takes_strings(problems):
        wanted = ["a string", "a list of strings"]
    return " or ".join(wanted) if all(wanted) else ""


def _takes_strings(problems: Collection[Any]) -> bool:
    """Returns whether the field takes a string or a list of strings."""
    return {problem["type"] for problem in problems} <= {"string_type", "list_type"}
