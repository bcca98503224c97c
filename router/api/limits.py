"""Limits the size of public requests: a request that is too large is refused before any work is done for it, with an
error that names the field. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from penstock.config.limits import LimitsConfig
from penstock.errors import InvalidInput, Unavailable
from penstock.v1 import inference_pb2

_RETRY_AFTER_S = 1.0
MAX_REQUEST_ID = 128
MAX_ROLE = 32
MAX_MODEL_NAME = 256
MAX_NAME = 256  # of an author, a called tool or a tool call
MAX_CACHE_SALT = 256
MAX_TEMPLATE_ARGUMENTS = 16 * 1024  # characters
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")

PromptRequest = inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest


class UnreadRequest(InvalidInput):
    """A request that was not read completely. `http_status` says why."""

    def __init__(self, field: str, problem: str, http_status: int = 413) -> None:
        super().__init__(field, problem)
        self.http_status = http_status  # type: ignore[misc]  # set for this error alone


class HeldBytes:
    """Counts and bounds the bytes of all bodies that are held until they are parsed."""

    def __init__(self, limits: LimitsConfig, on_limit: Callable[[str], None]) -> None:
        """`on_limit` is called with the limit's key when it refuses bytes."""
        self._limit = limits.bodies_bytes
        self._on_limit = on_limit
        self._num_held = 0

    def take(self, num_bytes: int) -> None:
        """Counts bytes as held. Raises Unavailable if the sum would exceed the limit."""
        if self._num_held + num_bytes > self._limit:
            self._on_limit("bodies_bytes")
            held = f"this router already holds {self._num_held} bytes of bodies"
            raise Unavailable(
                f"{held} (limits.bodies_bytes = {self._limit}); try again in {_RETRY_AFTER_S:g} s", _RETRY_AFTER_S
            )
        self._num_held += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self._num_held -= num_bytes


def check_request(wire: inference_pb2.GenerateRequest, limits: LimitsConfig) -> None:
    """Checks the sizes of a request's fields. Raises InvalidInput.

    `router.api.sampling_fields` checks what depends on the model or its context length.
    """
    sampling = wire.sampling
    _check_name("request_id", wire.request_id, MAX_REQUEST_ID)
    check_prompt(wire, limits)
    _check_name("cache_salt", wire.cache_salt, MAX_CACHE_SALT)
    if wire.HasField("truncate_prompt_tokens") and not wire.truncate_prompt_tokens:
        raise InvalidInput("truncate_prompt_tokens", "is 0; give at least 1, or leave it out")
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


def check_prompt(wire: PromptRequest, limits: LimitsConfig) -> None:
    """Checks a prompt's text, or its messages and tools, before it is tokenized. Raises InvalidInput."""
    _check_name("model", wire.model, MAX_MODEL_NAME)
    check_count("text", len(wire.text), limits.prompt_characters, "characters")
    check_count("messages", len(wire.messages), limits.messages, "messages")
    num_calls = 0
    for number, message in enumerate(wire.messages):
        path = f"messages[{number}]"
        _check_name(f"{path}.role", message.role, MAX_ROLE)
        _check_name(f"{path}.name", message.name, MAX_NAME)
        _check_name(f"{path}.tool_call_id", message.tool_call_id, MAX_NAME)
        if message.tool_calls:
            num_calls += len(message.tool_calls)
            _check_calls(path, message)
    check_count("messages", num_calls, limits.messages, "tool calls")
    if wire.HasField("chat") and not wire.messages:
        raise InvalidInput("chat", "is given without messages; leave it out")
    _check_tools(wire.chat, limits)
    what = "characters of content, tool calls and tools"
    check_count("messages", num_prompt_characters(wire), limits.prompt_characters, what)


def num_prompt_characters(wire: PromptRequest) -> int:
    """Returns the number of characters in all texts of the prompt except names."""
    return sum(map(len, prompt_texts(wire)))


def prompt_texts(wire: PromptRequest) -> Iterator[str]:
    """Yields all texts of the prompt except names."""
    yield wire.text
    for message in wire.messages:
        yield message.content
        yield message.reasoning
        for call in message.tool_calls:
            yield call.arguments
    for tool in wire.chat.tools:
        yield tool.description
        yield tool.parameters
    yield wire.chat.template_arguments


def _check_calls(path: str, message: inference_pb2.ChatMessage) -> None:
    if message.role != "assistant":
        raise InvalidInput(f"{path}.tool_calls", f"are in a message of role {message.role!r}; give role 'assistant'")
    for rank, call in enumerate(message.tool_calls):
        if not call.name:
            raise InvalidInput(f"{path}.tool_calls[{rank}].function.name", "is empty; give the tool's name")
        _check_name(f"{path}.tool_calls[{rank}].function.name", call.name, MAX_NAME)
        _check_name(f"{path}.tool_calls[{rank}].id", call.id, MAX_NAME)


def _check_tools(chat: inference_pb2.ChatOptions, limits: LimitsConfig) -> None:
    check_count("chat_template_kwargs", len(chat.template_arguments), MAX_TEMPLATE_ARGUMENTS, "characters")
    check_count("tools", len(chat.tools), limits.tools, "tools")
    names: set[str] = set()
    num_characters = 0
    for number, tool in enumerate(chat.tools):
        field = f"tools[{number}].function.name"
        if not _TOOL_NAME.fullmatch(tool.name):
            raise InvalidInput(field, f"is {tool.name[:100]!r}; give 1 to 128 letters, digits, _ and -")
        if tool.name in names:
            raise InvalidInput(field, f"repeats {tool.name!r}; give each tool a different name")
        names.add(tool.name)
        num_characters += len(tool.description) + len(tool.parameters)
    check_count("tools", num_characters, limits.tool_characters, "characters of descriptions and schemas")


def check_tokens(num_tokens: int, limits: LimitsConfig) -> None:
    """Checks the length of a tokenized prompt. Raises InvalidInput."""
    check_count("prompt", num_tokens, limits.prompt_tokens, "tokens")


def check_completions(requests: Iterable[inference_pb2.GenerateRequest], limits: LimitsConfig) -> None:
    """Checks the number of completions of one HTTP call, over all of its prompts. Raises InvalidInput."""
    prompts = list(requests)
    if len(prompts) == 1:
        return  # `check_request` checks a single prompt
    total = sum(max(1, request.sampling.n) for request in prompts)
    check_count("n", total, limits.completions, "completions over all prompts")


def check_headers(headers: Iterable[tuple[bytes, bytes]], limits: LimitsConfig) -> None:
    """Checks the size of an HTTP request's headers. Raises UnreadRequest."""
    total = sum(len(name) + len(value) for name, value in headers)
    if total > limits.header_bytes:
        raise UnreadRequest("headers", f"have {total} bytes; send {limits.header_bytes} or fewer", 431)


def check_body(num_bytes: int, limits: LimitsConfig) -> None:
    """Checks the size of an HTTP body, as declared or as read so far. Raises UnreadRequest."""
    if num_bytes > limits.request_bytes:
        raise UnreadRequest("body", f"has {num_bytes} bytes or more; send {limits.request_bytes} or fewer")


def check_count(field: str, count: int, limit: int, what: str) -> None:
    """Raises InvalidInput if `count`, a number of `what`, exceeds `limit`."""
    if count > limit:
        raise InvalidInput(field, f"has {count} {what}; give {limit} or fewer")


def _check_name(field: str, value: str, limit: int) -> None:
    """Checks a name that appears in logs and responses: it must be short and printable. Raises InvalidInput."""
    if len(value) > limit:
        raise InvalidInput(field, f"has {len(value)} characters; give {limit} or fewer")
    if not value.isprintable():
        raise InvalidInput(field, "has unprintable characters; leave them out")
