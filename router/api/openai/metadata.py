"""Checks the metadata that a caller attaches to a response or a batch. Pure."""

from __future__ import annotations

from penstock.errors import InvalidInput
from router.api.limits import check_count
from router.api.openai.json_bodies import shown

_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512  # OpenAI's limits; those of keys and values are in characters


def read_metadata(given: object) -> dict[str, str] | None:
    """Returns a body's `metadata`; None if it has none. Raises InvalidInput."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise InvalidInput("metadata", f"is {shown(given)}; give an object")
    check_count("metadata", len(given), _MAX_PAIRS, "pairs")
    for key, value in given.items():
        if len(key) > _MAX_KEY or not isinstance(value, str) or len(value) > _MAX_VALUE:
            limits = f"keys may have {_MAX_KEY} characters, values must be strings of up to {_MAX_VALUE}"
            raise InvalidInput(f"metadata.{key[:_MAX_KEY]}", f"is {shown(value)}; {limits}")
    return given
