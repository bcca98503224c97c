"""Limits the size of public requests: too large a request is refused, by the field's name, before any work is done for
it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.config.security import LimitsConfig
from penstock.errors import InvalidInput
from penstock.v1 import inference_pb2

MAX_REQUEST_ID = 128
MAX_ROLE = 32
MAX_MODEL_NAME = 256


class UnreadRequest(InvalidInput):
    """A request that was not read to its end. HTTP has a status of its own for each case."""

    def __init__(self, field: str, problem: str, http_status: int = 413) -> None:
        super().__init__(field, problem)
        self.http_status = http_status  # type: ignore[misc]  # set for this error alone


def check_request(wire: inference_pb2.GenerateRequest, limits: LimitsConfig) -> None:
    """Raises InvalidInput. `router.api.sampling_fields` checks what depends on the model or its context."""
    sampling = wire.sampling
    _check_name("request_id", wire.request_id, MAX_REQUEST_ID)
    check_prompt(wire, limits)
    check_count("token_ids", len(wire.token_ids), limits.prompt_tokens, "tokens")
    if sampling.n > limits.completions:
        raise InvalidInput("sampling.n", f"is {sampling.n}; give a value from 1 to {limits.completions}")
    check_count("emitted", len(wire.emitted), limits.completions, "completions")
    num_emitted = sum(len(entry.token_ids) for entry in wire.emitted)
    check_count("emitted", num_emitted, limits.prompt_tokens, "tokens over all completions")
    check_count("sampling.logit_bias", len(sampling.logit_bias), limits.logit_bias, "entries")
    check_count("sampling.stop_token_ids", len(sampling.stop_token_ids), limits.stop_token_ids, "tokens")
    num_allowed = len(sampling.allowed_token_ids)
    check_count("sampling.allowed_token_ids", num_allowed, limits.allowed_token_ids, "tokens")


def check_prompt(wire: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, limits: LimitsConfig) -> None:
    """Checks text or messages before they are tokenized. Raises InvalidInput."""
    _check_name("model", wire.model, MAX_MODEL_NAME)
    check_count("text", len(wire.text), limits.prompt_characters, "characters")
    check_count("messages", len(wire.messages), limits.messages, "messages")
    total = 0
    for number, message in enumerate(wire.messages):
        _check_name(f"messages[{number}].role", message.role, MAX_ROLE)
        total += len(message.content)
    check_count("messages", total, limits.prompt_characters, "characters of content")


def check_tokens(num_tokens: int, limits: LimitsConfig) -> None:
    """Checks a prompt that has been tokenized. Raises InvalidInput."""
    check_count("prompt", num_tokens, limits.prompt_tokens, "tokens")


def check_completions(requests: Iterable[inference_pb2.GenerateRequest], limits: LimitsConfig) -> None:
    """Checks one HTTP call over all of its prompts. Raises InvalidInput."""
    wanted = list(requests)
    if len(wanted) == 1:
        return  # `check_request` checks it
    total = sum(max(1, request.sampling.n) for request in wanted)
    check_count("n", total, limits.completions, "completions over all prompts")


def check_headers(headers: Iterable[tuple[bytes, bytes]], limits: LimitsConfig) -> None:
    """Checks the headers of an HTTP request. Raises UnreadRequest."""
    total = sum(len(name) + len(value) for name, value in headers)
    if total > limits.header_bytes:
        raise UnreadRequest("headers", f"have {total} bytes; send {limits.header_bytes} or fewer", 431)


def check_body(num_bytes: int, limits: LimitsConfig) -> None:
    """Checks the size of an HTTP body, declared or read so far. Raises UnreadRequest."""
    if num_bytes > limits.request_bytes:
        raise UnreadRequest("body", f"has {num_bytes} bytes or more; send {limits.request_bytes} or fewer")


def check_count(field: str, count: int, limit: int, what: str) -> None:
    """Raises InvalidInput."""
    if count > limit:
        raise InvalidInput(field, f"has {count} {what}; give {limit} or fewer")


def _check_name(field: str, value: str, limit: int) -> None:
    """Checks a name that goes into logs and responses: it must be short and on one line."""
    if len(value) > limit:
        raise InvalidInput(field, f"has {len(value)} characters; give {limit} or fewer")
    if not value.isprintable():
        raise InvalidInput(field, "has characters that cannot be printed; leave them out")
