"""Translates errors to Anthropic's format: its types, statuses and names of fields. Pure."""

from __future__ import annotations

from penstock.errors import (
    DeadlineExceeded,
    InvalidInput,
    ModelNotFound,
    Overloaded,
    PenstockError,
    PermissionDenied,
    Quarantined,
    Unauthenticated,
    Unavailable,
)
from router.api.dialect import Json
from router.api.limits import UnreadRequest
from router.api.translation.errors import in_dialect

OVERLOADED_STATUS = 529  # Anthropic's status for a service that is full; clients wait and retry
_TYPES: tuple[tuple[type[PenstockError], str], ...] = (  # the first match applies
    (InvalidInput, "invalid_request_error"),
    (Quarantined, "invalid_request_error"),
    (Unauthenticated, "authentication_error"),
    (PermissionDenied, "permission_error"),
    (ModelNotFound, "not_found_error"),
    (Overloaded, "rate_limit_error"),
    (Unavailable, "overloaded_error"),
    (DeadlineExceeded, "timeout_error"),
)
# The chat's name of a field -> its name in Anthropic's body.
_NAMES = {
    "max_completion_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "prompt": "messages",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "text": "messages",
    "user": "metadata.user_id",
}


def anthropic_error(error: PenstockError) -> tuple[int, Json]:
    """Returns the HTTP status and the body of an error."""
    kind = next((name for each, name in _TYPES if isinstance(error, each)), "api_error")
    status = error.http_status
    if isinstance(error, UnreadRequest) and status == 413:
        kind = "request_too_large"
    elif isinstance(error, Unavailable) and not isinstance(error, Overloaded):
        status = OVERLOADED_STATUS
    return status, {"type": "error", "error": {"type": kind, "message": in_dialect(error, _NAMES).message}}
