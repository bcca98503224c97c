"""Converts the messages, tools and options of a request to the conversation that a chat template renders. Pure."""

from __future__ import annotations

import json
from typing import Any

from penstock.errors import InvalidInput
from penstock.v1 import inference_pb2
from router.api.limits import num_prompt_characters
from router.text.conversation import RESERVED_ARGUMENTS, Conversation

ChatRequest = inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest


def read_conversation(wire: ChatRequest) -> Conversation:
    """Returns the conversation of a request with messages. `check_prompt` must have passed. Raises InvalidInput."""
    chat = wire.chat
    continues = chat.continue_final_message
    if continues and chat.add_generation_prompt:
        raise InvalidInput("continue_final_message", "and add_generation_prompt are true; set one of them to false")
    return Conversation(
        messages=[_message(message) for message in wire.messages],
        tools=[_tool(tool) for tool in chat.tools],
        add_generation_prompt=chat.add_generation_prompt or not (chat.HasField("add_generation_prompt") or continues),
        continue_final_message=continues,
        template_arguments=_checked_arguments(chat.template_arguments),
        num_characters=num_prompt_characters(wire),
    )


def _message(wire: inference_pb2.ChatMessage) -> dict[str, Any]:
    """Returns a message in the format that templates expect.

    The empty content of a message with tool calls becomes None, which templates distinguish from an empty string.
    """
    message: dict[str, Any] = {"role": wire.role, "content": wire.content}
    if wire.name:
        message["name"] = wire.name
    if wire.reasoning:
        message["reasoning_content"] = message["reasoning"] = wire.reasoning
    if wire.tool_calls:
        message["content"] = wire.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in wire.tool_calls
        ]
    if wire.tool_call_id:
        message["tool_call_id"] = wire.tool_call_id
    return message


def _tool(wire: inference_pb2.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": wire.name}
    if wire.description:
        function["description"] = wire.description
    if wire.parameters:
        function["parameters"] = wire.parameters
    return {"type": "function", "function": function}


def _checked_arguments(text: str) -> str:
    """Returns the template arguments. Raises InvalidInput unless they are a JSON object without reserved names."""
    if not text:
        return ""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput("chat_template_kwargs", f"is not valid JSON: {error}; give an object") from error
    if not isinstance(arguments, dict):
        raise InvalidInput("chat_template_kwargs", "is not a JSON object; give an object")
    for name in arguments:
        if name in RESERVED_ARGUMENTS or not name.isidentifier():
            raise InvalidInput("chat_template_kwargs", f"has {name[:100]!r}, which requests cannot set; leave it out")
    return text
