"""Describes a conversation as a prompt: messages, tools that the model may call, and arguments of its chat template.

Messages and tools have the form of OpenAI's API, so that the same lists serve both. No I/O.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import InvalidInput
from penstock.v1 import inference_pb2

ChatMessage = Mapping[str, Any]  # {"role": "user", "content": "..."}
Request = inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest

_TEXTS = ("role", "content", "name", "tool_call_id", "reasoning")
_MESSAGE = "'role' and 'content', and beside them 'name', 'reasoning', 'tool_calls' or 'tool_call_id'"


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt that the model's chat template renders. Tool calls are part of the answer's text, as the model writes
    them.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, Any]] = ()  # {"type": "function", "function": {"name": ..., "parameters": ...}}
    add_generation_prompt: bool | None = None  # begin the assistant's answer; None: if no message is continued
    continue_final_message: bool = False  # let the answer continue the last message
    template_arguments: Mapping[str, Any] = field(default_factory=dict)  # such as enable_thinking


def set_chat(request: Request, chat: Chat) -> None:
    """Sets the request's messages and its template's options. Raises InvalidInput."""
    if not chat.messages:
        raise InvalidInput("messages", "is empty; give at least one message")
    request.messages.extend(_message(f"messages[{number}]", each) for number, each in enumerate(chat.messages))
    options = request.chat
    options.tools.extend(_tool(f"tools[{number}]", each) for number, each in enumerate(chat.tools))
    if chat.add_generation_prompt is not None:
        options.add_generation_prompt = chat.add_generation_prompt
    if chat.continue_final_message:
        options.continue_final_message = True
    if chat.template_arguments:
        options.template_arguments = _json("template_arguments", chat.template_arguments)


def checked_text(name: str, value: object) -> str:
    """Returns `value` if it is valid text. Raises InvalidInput otherwise."""
    if not isinstance(value, str):
        raise InvalidInput(name, f"is {value!r}; give a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(name, f"is not valid Unicode text ({error.reason}); remove lone surrogates") from error
    return value


def _message(path: str, message: ChatMessage) -> inference_pb2.ChatMessage:
    calls = message.get("tool_calls") or ()
    is_known = message.keys() <= {*_TEXTS, "tool_calls"}
    if not is_known or "role" not in message or ("content" not in message and not calls):
        raise InvalidInput(path, f"has the keys {sorted(message)}; give {_MESSAGE}")
    wire = inference_pb2.ChatMessage()
    for name in _TEXTS:
        value, is_needed = message.get(name), name == "role" or (name == "content" and not calls)
        if value is not None or is_needed:
            setattr(wire, name, checked_text(f"{path}.{name}", value))
    for number, call in enumerate(calls):
        own = f"{path}.tool_calls[{number}]"
        function = _function(own, call)
        wire.tool_calls.add(
            id=checked_text(f"{own}.id", call.get("id", "")),
            name=checked_text(f"{own}.function.name", function.get("name")),
            arguments=checked_text(f"{own}.function.arguments", function.get("arguments", "")),
        )
    return wire


def _tool(path: str, tool: Mapping[str, Any]) -> inference_pb2.Tool:
    function = _function(path, tool)
    if unknown := sorted(function.keys() - {"name", "description", "parameters"}):
        raise InvalidInput(f"{path}.function", f"has the keys {unknown}; give 'name', 'description' and 'parameters'")
    parameters = function.get("parameters")
    return inference_pb2.Tool(
        name=checked_text(f"{path}.function.name", function.get("name")),
        description=checked_text(f"{path}.function.description", function.get("description") or ""),
        parameters="" if parameters is None else _json(f"{path}.function.parameters", parameters),
    )


def _function(path: str, part: object) -> Mapping[str, Any]:
    """Returns the function of a tool or of a call."""
    function = part.get("function") if isinstance(part, Mapping) and part.get("type") == "function" else None
    if not isinstance(function, Mapping):
        raise InvalidInput(path, f"is {part!r:.200}; give {{'type': 'function', 'function': ...}}")
    return function


def _json(path: str, value: object) -> str:
    if not isinstance(value, Mapping):
        raise InvalidInput(path, f"is {value!r:.200}; give an object")
    try:
        return json.dumps(dict(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInput(path, f"cannot be written as JSON: {error}") from error
