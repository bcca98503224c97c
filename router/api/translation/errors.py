"""Renames the chat's fields in errors to the fields of another dialect. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from penstock.errors import InvalidInput, PenstockError

_PATH = re.compile(r"(\w+)(.*)", re.DOTALL)


def in_dialect(error: PenstockError, names: Mapping[str, str]) -> PenstockError:
    """Returns the error with its field renamed by `names`, or unchanged.

    An index among the chat's messages is left out: the client has not sent these messages.
    """
    if not isinstance(error, InvalidInput):
        return error
    field = error.field.removeprefix("sampling.").removeprefix("chat.").replace(".function.", ".")
    found = _PATH.fullmatch(field)
    if found is None:
        return error
    head, rest = found.groups()
    problem = error.problem
    name = names.get(head, head)
    if name != head and head == "messages" and rest:
        problem, rest = error.named(rest.partition(".")[2]), ""
    renamed = InvalidInput(f"{name}{rest}", problem)
    renamed.http_status, renamed.reason = error.http_status, error.reason  # type: ignore[misc]  # of this error only
    return renamed
