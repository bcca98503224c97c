"""Defines the fields of OpenAI-compatible bodies that make up a chat's prompt: messages, tools and template options.

Translates them to the messages and the `ChatOptions` of the gRPC request. No I/O.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StrictBool, Tag

from penstock.errors import InvalidInput
from penstock.v1 import inference_pb2
from router.api.openai.fields import HARMLESS_IN_MESSAGES, HARMLESS_IN_TOOLS, REFUSED_IN_MESSAGES, check_fields
from router.api.openai.json_bodies import shown
from router.api.prompts import ChatRequest
from router.parsers.tools import ToolFunction

# Stops the validation of a list at its first error: only one is reported, and each costs pydantic 50 us and 1 KB.
FIRST_ERROR = Field(fail_fast=True)
TEXT, PARTS = "<text>", "<parts>"  # tags of the forms of a content, which errors do not mention
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_WITH_CONTENT = ("system", "developer", "user")  # roles whose messages must have content
_ROLES = {"developer": "system"}  # OpenAI's newer name for the role


class CalledFunction(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    arguments: str = ""


class CallOfTool(BaseModel):
    model_config = ConfigDict(extra="allow")

    id: str = ""
    type: str = "function"
    function: CalledFunction

    def to_wire(self, path: str) -> inference_pb2.ToolCall:
        """Returns the tool call. Raises InvalidInput if it does not call a function."""
        if self.type != "function":
            raise InvalidInput(f"{path}.type", f"is {self.type[:100]!r}; give function")
        check_fields(self.model_extra, f"{path}.", HARMLESS_IN_TOOLS, {})
        check_fields(self.function.model_extra, f"{path}.function.", HARMLESS_IN_TOOLS, {})
        return inference_pb2.ToolCall(id=self.id, name=self.function.name, arguments=self.function.arguments)


class TextPart(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str
    text: str | None = None


def _content_form(content: object) -> str:
    return PARTS if isinstance(content, list) else TEXT


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: (
        Annotated[
            Annotated[str, Tag(TEXT)] | Annotated[list[TextPart], FIRST_ERROR, Tag(PARTS)],
            Discriminator(_content_form),
        ]
        | None
    ) = None
    name: str | None = None
    tool_calls: Annotated[list[CallOfTool], FIRST_ERROR] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    def text(self, number: int) -> str:
        """Returns the text, with a line feed between parts. Raises InvalidInput for parts that are not text.

        `number` is the message's index, for errors.
        """
        if isinstance(self.content, str):
            return self.content
        texts = []
        for rank, part in enumerate(self.content or ()):
            if part.type != "text":
                raise InvalidInput(f"messages[{number}].content", f"has a part of type {part.type!r}; give text only")
            if part.text is None:
                raise InvalidInput(f"messages[{number}].content[{rank}].text", "is missing; add it")
            texts.append(part.text)
        return "\n".join(texts)

    def to_wire(self, number: int) -> inference_pb2.ChatMessage:
        """Returns the message of the gRPC request. `number` is its index, for errors. Raises InvalidInput."""
        path = f"messages[{number}]"
        if self.content is None and not self.tool_calls and self.role in _WITH_CONTENT:
            raise InvalidInput(f"{path}.content", "is missing; give text or a list of parts")
        wire = inference_pb2.ChatMessage(role=_ROLES.get(self.role, self.role), content=self.text(number))
        if self.reasoning and self.reasoning_content and self.reasoning != self.reasoning_content:
            raise InvalidInput(f"{path}.reasoning", "differs from reasoning_content; give only one of them")
        wire.reasoning = self.reasoning or self.reasoning_content or ""
        wire.name, wire.tool_call_id = self.name or "", self.tool_call_id or ""
        if wire.tool_call_id and self.role != "tool":
            raise InvalidInput(f"{path}.tool_call_id", f"is in a message of role {self.role[:100]!r}; give role 'tool'")
        if wire.reasoning and self.role != "assistant":
            raise InvalidInput(f"{path}.reasoning", f"is in a message of role {self.role[:100]!r}; leave it out")
        for rank, call in enumerate(self.tool_calls or ()):
            wire.tool_calls.append(call.to_wire(f"{path}.tool_calls[{rank}]"))
        return wire

    def check_other_fields(self, number: int) -> None:
        """Raises InvalidInput for a field of the message or of a part that is neither supported nor harmless."""
        path = f"messages[{number}]."
        check_fields(self.model_extra, path, HARMLESS_IN_MESSAGES, REFUSED_IN_MESSAGES)
        if isinstance(self.content, list):
            for rank, part in enumerate(self.content):
                if part.type == "text":  # `text` refuses other parts
                    check_fields(part.model_extra, f"{path}content[{rank}].", HARMLESS_IN_MESSAGES, {})


class OfferedFunction(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class OfferedTool(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str
    function: OfferedFunction | None = None

    def read(self, number: int) -> OfferedFunction:
        """Returns the function. Raises InvalidInput for other kinds of tools. `number` is its index, for errors."""
        path = f"tools[{number}]"
        if self.type != "function":
            raise InvalidInput(f"{path}.type", f"is {self.type[:100]!r}; only functions are supported")
        if self.function is None:
            raise InvalidInput(f"{path}.function", "is missing; add it")
        check_fields(self.model_extra, f"{path}.", HARMLESS_IN_TOOLS, {})
        check_fields(self.function.model_extra, f"{path}.function.", HARMLESS_IN_TOOLS, {})
        return self.function


class ChatPrompt(BaseModel):
    """Declares the fields that all bodies with messages share."""

    model_config = ConfigDict(extra="allow")

    messages: Annotated[list[ChatMessage], FIRST_ERROR]
    tools: Annotated[list[OfferedTool], FIRST_ERROR] | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    def check_messages(self) -> None:
        """Raises InvalidInput for a field of a message that is neither supported nor harmless."""
        for number, message in enumerate(self.messages):
            if message.model_extra or isinstance(message.content, list):
                message.check_other_fields(number)

    def functions(self) -> list[ToolFunction]:
        """Returns the tools in the form that parsers take. Raises InvalidInput."""
        found = (tool.read(number) for number, tool in enumerate(self.tools or ()))
        return [ToolFunction(tool.name, tool.parameters or {}, bool(tool.strict)) for tool in found]

    def fill(self, request: ChatRequest) -> None:
        """Sets the messages and template options of a request. Raises InvalidInput."""
        if not self.messages:
            raise InvalidInput("messages", "is empty; give at least one message")
        request.messages.extend(message.to_wire(number) for number, message in enumerate(self.messages))
        for number, tool in enumerate(self.tools or ()):
            function = tool.read(number)
            request.chat.tools.add(
                name=function.name,
                description=function.description or "",
                parameters="" if function.parameters is None else _json_text("tools", function.parameters),
            )
        if self.add_generation_prompt is not None:
            request.chat.add_generation_prompt = self.add_generation_prompt
        if self.continue_final_message is not None:
            request.chat.continue_final_message = self.continue_final_message
        arguments = self._template_arguments()
        if arguments:
            request.chat.template_arguments = _json_text("chat_template_kwargs", arguments)

    def _template_arguments(self) -> dict[str, Any]:
        """Returns the template's arguments. A reasoning effort sets several variables, since templates differ in which
        of them they know.
        """
        arguments: dict[str, Any] = {}
        effort = self.reasoning_effort
        if effort is not None:
            if effort not in EFFORTS:
                raise InvalidInput("reasoning_effort", f"is {shown(effort)}; give one of {', '.join(EFFORTS)}")
            arguments = {"reasoning_effort": effort, "enable_thinking": effort != "none", "thinking": effort != "none"}
        return arguments | (self.chat_template_kwargs or {})


def _json_text(field: str, value: dict[str, Any]) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(field, f"cannot be written as JSON: {error}") from error
