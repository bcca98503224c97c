"""Reads from a proxied call what is needed to place it. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from penstock.config.limits import LimitsConfig
from penstock.errors import InvalidInput
from router.api.dialect import DialectBody
from router.api.openai.json_bodies import read_json
from router.api.openai.requests import ChatBody, CompletionBody, validate_fields
from router.api.translation.anthropic.requests import read_message_call

_CACHE_SALT = "cache_salt"


@dataclass(frozen=True, slots=True)
class ProxiedCall:
    """An HTTP request as the gateway received it. The names of headers are in lower case."""

    headers: Mapping[str, str]
    body: bytes
    subset: frozenset[str] | None  # endpoints that may receive it; None: any

    @property
    def method(self) -> str:
        return self.headers.get(":method", "")

    @property
    def path(self) -> str:
        """Returns the path without its query; "" if it is not a valid path."""
        try:
            return urlsplit(self.headers.get(":path", "")).path
        except ValueError:  # for example, an unclosed bracket in the host
            return ""


def _read_completion(raw: bytes, limits: LimitsConfig) -> DialectBody:
    return validate_fields(CompletionBody, read_json(raw, limits), limits)


def _read_chat(raw: bytes, limits: LimitsConfig) -> DialectBody:
    body = validate_fields(ChatBody, read_json(raw, limits), limits)
    body.check_messages()
    return body


# OpenAI's bodies are read without checking for unknown fields: the engine decides about fields that this router lacks.
READERS: Mapping[str, Callable[[bytes, LimitsConfig], DialectBody]] = {
    "/v1/completions": _read_completion,
    "/v1/chat/completions": _read_chat,
    "/v1/messages": read_message_call,
}


def salted_body(raw: bytes, cache_salt: str, limits: LimitsConfig) -> bytes:
    """Returns the body with its `cache_salt` set to this salt for the engine's prefix cache. Raises InvalidInput."""
    fields: Any = read_json(raw, limits)
    if not isinstance(fields, dict):
        raise InvalidInput("body", "is not a JSON object; send the fields of the call")
    return json.dumps({**fields, _CACHE_SALT: cache_salt}, ensure_ascii=False, separators=(",", ":")).encode()
