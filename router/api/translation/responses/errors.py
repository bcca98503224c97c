"""Translates errors to the Responses API's format: OpenAI's error object with this API's field names. Pure."""

from __future__ import annotations

from penstock.errors import PenstockError
from router.api.dialect import Json
from router.api.openai.responses import error_json
from router.api.translation.errors import in_dialect

# The chat's name of a field -> its name in the Responses API.
_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "token_ids": "input",
}


def responses_error(error: PenstockError) -> tuple[int, Json]:
    """Returns the HTTP status and the body of an error."""
    return error.http_status, error_json(in_dialect(error, _NAMES), prompt_fields=())
