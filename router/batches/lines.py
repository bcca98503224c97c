"""Reads the lines of a batch's input, and writes its output and error lines. Pure."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.errors import InvalidInput

Json = dict[str, Any]

MAX_CUSTOM_ID = 512  # characters
_FIELDS = {"custom_id", "method", "url", "body"}


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A request of a batch."""

    custom_id: str
    body: bytes  # JSON


def read_line(raw: bytes, endpoint: str, max_bytes: int, read_json: Callable[[bytes], Any]) -> BatchLine:
    """Returns the request in a line of input. `read_json` parses JSON within limits.

    Raises InvalidInput, which names the field of the line.
    """
    if len(raw) > max_bytes:
        raise InvalidInput("line", f"has more than limits.request_bytes = {max_bytes} bytes; shorten it")
    line = read_json(raw)
    if not isinstance(line, dict):
        raise InvalidInput("line", "is not a JSON object; write one with custom_id, method, url and body")
    if unknown := sorted(set(line) - _FIELDS):
        raise InvalidInput(unknown[0][:100], "is not a field of a line; put fields of the request into body")
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        problem = f"is missing or not a string of 1 to {MAX_CUSTOM_ID} characters; give each line its own"
        raise InvalidInput("custom_id", problem)
    if line.get("method", "POST") != "POST":
        raise InvalidInput("method", f"is {str(line['method'])[:20]!r}; only POST is supported")
    if line.get("url", endpoint) != endpoint:
        problem = f"is {str(line['url'])[:100]!r}, but the batch is for {endpoint}; make a batch for each endpoint"
        raise InvalidInput("url", problem)
    body = line.get("body")
    if not isinstance(body, dict):
        raise InvalidInput("body", "is missing or not a JSON object; give the body of the request")
    if body.get("stream"):
        raise InvalidInput("body.stream", "is true, but a batch cannot be streamed; leave it out")
    return BatchLine(custom_id, json.dumps(body).encode())


def answer_line(custom_id: str, status: int, request_id: str, body: Json) -> bytes:
    """Returns the output or error line of a request that was answered."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _line(custom_id, response, None)


def unanswered_line(custom_id: str, code: str, message: str) -> bytes:
    """Returns the error line of a request that was not answered."""
    return _line(custom_id, None, {"code": code, "message": message})


def custom_id_of(raw: bytes) -> str | None:
    """Returns the id of the request that the line answers; None if the line is incomplete."""
    if not raw.endswith(b"\n"):
        return None
    try:
        return str(json.loads(raw)["custom_id"])
    except (ValueError, KeyError, TypeError):
        return None


def _line(custom_id: str, response: Json | None, error: Json | None) -> bytes:
    written = {"id": f"batch_req_{secrets.token_hex(16)}", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(written).encode() + b"\n"
