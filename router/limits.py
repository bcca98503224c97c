"""How large a public request may be: refused with the field's name before anything is computed for it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.errors import InvalidInput
from penstock.security_config import LimitsConfig
from penstock.v1 import inference_pb2

MAX_REQUEST_ID = 128
MAX_ROLE = 32
MAX_MODEL_NAME = 256


class Unread(InvalidInput):
    """What was not read to its end: HTTP has a status of its own for each case."""

    def __init__(self, field: str, problem: str, http_status: int = 413) -> None:
        super().__init__(field, problem)
        self.http_status = http_status  # type: ignore[misc]  # of this one


def check_request(wire: inference_pb2.GenerateRequest, limits: LimitsConfig) -> None:
    """Raises InvalidInput. What depends on the model or its context is checked by `penstock.sampling`."""
    sampling = wire.sampling
    _check_name("request_id", wire.request_id, MAX_REQUEST_ID)
    check_prompt(wire, limits)
    _check_count("token_ids", len(wire.token_ids), limits.prompt_tokens, "tokens")
    if sampling.n > limits.completions:
        raise InvalidInput("sampling.n", f"is {sampling.n}; give a value from 1 to {limits.completions}")
    _check_count("sampling.logit_bias", len(sampling.logit_bias), limits.logit_bias, "entries")
    _check_count("sampling.stop_token_ids", len(sampling.stop_token_ids), limits.stop_token_ids, "tokens")


def check_prompt(wire: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, limits: LimitsConfig) -> None:
    """Its text or messages, before they are tokenized. Raises InvalidInput."""
    _check_name("model", wire.model, MAX_MODEL_NAME)
    _check_count("text", len(wire.text), limits.prompt_characters, "characters")
    _check_count("messages", len(wire.messages), limits.messages, "messages")
    total = 0
    for number, message in enumerate(wire.messages):
        _check_name(f"messages[{number}].role", message.role, MAX_ROLE)
        total += len(message.content)
    _check_count("messages", total, limits.prompt_characters, "characters of content")


def check_tokens(num_tokens: int, limits: LimitsConfig) -> None:
    """Of a prompt, once it has been tokenized. Raises InvalidInput."""
    _check_count("prompt", num_tokens, limits.prompt_tokens, "tokens")


def check_completions(requests: Iterable[inference_pb2.GenerateRequest], limits: LimitsConfig) -> None:
    """Of one HTTP call, over all of its prompts. Raises InvalidInput."""
    wanted = list(requests)
    if len(wanted) == 1:
        return  # `check_request` does it
    total = sum(max(1, one.sampling.n) for one in wanted)
    _check_count("n", total, limits.completions, "completions over all prompts")


def check_headers(headers: Iterable[tuple[bytes, bytes]], limits: LimitsConfig) -> None:
    """Of an HTTP request. Raises Unread."""
    total = sum(len(name) + len(value) for name, value in headers)
    if total > limits.header_bytes:
        raise Unread("headers", f"have {total} bytes; send {limits.header_bytes} or fewer", 431)


def check_body(num_bytes: int, limits: LimitsConfig) -> None:
    """Of an HTTP request, declared or read so far. Raises Unread."""
    if num_bytes > limits.request_bytes:
        raise Unread("body", f"has {num_bytes} bytes or more; send {limits.request_bytes} or fewer")


def _check_count(field: str, count: int, limit: int, what: str) -> None:
    if count > limit:
        raise InvalidInput(field, f"has {count} {what}; give {limit} or fewer")


def _check_name(field: str, value: str, limit: int) -> None:
    """One that goes into logs and answers: short, on one line."""
    if len(value) > limit:
        raise InvalidInput(field, f"has {len(value)} characters; give {limit} or fewer")
    if not value.isprintable():
        raise InvalidInput(field, "has characters that cannot be printed; leave them out")
