"""Translates the bodies of `/v1/messages` and `/v1/messages/count_tokens` to the body of a chat. No I/O."""

from __future__ import annotations

from penstock.config.limits import LimitsConfig
from penstock.v1 import inference_pb2
from router.api.dialect import Json
from router.api.limits import check_count
from router.api.openai.json_bodies import read_json, shown
from router.api.openai.kv_hints import longest_ttl_s
from router.api.openai.requests import ChatBody, validate_body
from router.api.sampling_fields import MAX_STOP_STRINGS
from router.api.translation.anthropic.blocks import read_messages, read_system
from router.api.translation.anthropic.fields import (
    HARMLESS,
    HARMLESS_IN_METADATA,
    HARMLESS_IN_THINKING,
    HARMLESS_IN_TOOLS,
    REFUSED,
    REFUSED_IN_OUTPUT_CONFIG,
    REFUSED_IN_TOOLS,
)
from router.api.translation.bodies import ChatTranslation
from router.api.translation.objects import JsonObject
from router.api.translation.turns import ChatTurns

# Anthropic's service tiers -> OpenAI's.
_TIERS = {"auto": "auto", "standard_only": "default"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_OPTIONS = ("model", "temperature", "top_p", "top_k", "stream")  # fields with the same names in a chat


class MessagesBody(ChatTranslation):
    """The body of POST /v1/messages."""

    def __init__(self, chat: ChatBody, max_tokens: int, omits_thinking: bool) -> None:
        """`omits_thinking` sends the thinking only in its signature, in an opaque form."""
        super().__init__(chat)
        self.max_tokens = max_tokens
        self.omits_thinking = omits_thinking

    @property
    def default_max_tokens(self) -> int | None:
        """Returns the call's `max_tokens`. As at Anthropic, a limit beyond the context is no error: the output ends
        when the context is full.
        """
        return self.max_tokens


def read_message_call(raw: bytes, limits: LimitsConfig) -> MessagesBody:
    """Reads a body of `/v1/messages`. Raises InvalidInput that names the field."""
    read = read_json(raw, limits)
    body = JsonObject(read)
    max_tokens = body.integer("max_tokens")
    if max_tokens is None or max_tokens < 1:
        raise body.error(
            "max_tokens", "is missing; add it" if max_tokens is None else f"is {max_tokens}; give 1 or more"
        )
    fields, omits_thinking = _chat_fields(body, limits)
    if pin_s := longest_ttl_s(read):
        fields["nvext"] = {"cache_control": {"ttl": f"{pin_s:.0f}s"}}
    return MessagesBody(validate_body(ChatBody, fields, limits), max_tokens, omits_thinking)


def read_count_call(raw: bytes, limits: LimitsConfig) -> inference_pb2.TokenizeRequest:
    """Reads a body of `/v1/messages/count_tokens`, which has no `max_tokens`. Raises InvalidInput."""
    fields, _ = _chat_fields(JsonObject(read_json(raw, limits)), limits)
    chat = validate_body(ChatBody, fields, limits)
    wire = inference_pb2.TokenizeRequest(model=chat.model or "")
    chat.fill(wire)
    return wire


def _chat_fields(body: JsonObject, limits: LimitsConfig) -> tuple[Json, bool]:
    """Returns the fields of the translated chat, and whether thinking is left out of the answer.

    Raises InvalidInput that names the body's own field.
    """
    fields: Json = body.take(*_OPTIONS)
    if (stops := body.values("stop_sequences")) is not None:
        check_count("stop_sequences", len(stops), MAX_STOP_STRINGS, "strings")
        fields["stop"] = stops
    if (tier := body.choice("service_tier", *_TIERS)) is not None:
        fields["service_tier"] = _TIERS[tier]
    if (hints := body.mapping("kv_hints")) is not None:
        fields["kv_hints"] = hints
    _read_metadata(body, fields)
    _read_tools(body, fields)
    omits_thinking = _read_thinking(body, fields)
    turns = ChatTurns()
    read_system(body.any("system"), turns)
    messages = body.values("messages")
    if not messages:
        raise body.error("messages", "is empty or missing; give at least one message")
    check_count("messages", len(messages), limits.messages, "messages")
    read_messages(messages, turns)
    fields["messages"] = turns.messages
    if turns.ends_with_assistant:
        if "tool_calls" in turns.messages[-1]:
            raise body.error("messages", "end with a tool_use of the assistant; add its tool_result")
        fields.update(continue_final_message=True, add_generation_prompt=False)
    body.finish(HARMLESS, REFUSED)
    return fields, omits_thinking


def _read_metadata(body: JsonObject, fields: Json) -> None:
    metadata = body.child("metadata")
    if metadata is not None:
        if user := metadata.text("user_id"):
            fields["user"] = user  # names the session, since agent clients put their session's id here
        metadata.finish(HARMLESS_IN_METADATA)


def _read_tools(body: JsonObject, fields: Json) -> None:
    tools = [_tool(tool) for tool in body.children("tools")]
    if tools:
        fields["tools"] = tools
    choice = body.child("tool_choice")
    if choice is None:
        return
    kind = choice.choice("type", *_CHOICES, "tool")
    if kind is None:
        raise choice.error("type", "is missing; add it")
    if kind == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.needed_text("name")}}
    else:
        fields["tool_choice"] = _CHOICES[kind]
    if choice.flag("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    choice.finish()


def _tool(tool: JsonObject) -> Json:
    kind = tool.text("type")
    if kind not in (None, "custom"):
        raise tool.error("type", f"= {shown(kind)} is a tool that only Anthropic runs; send tools with an input_schema")
    function: Json = {"name": tool.needed_text("name")}
    if (description := tool.text("description")) is not None:
        function["description"] = description
    schema = tool.mapping("input_schema")
    if schema is None:
        raise tool.error("input_schema", "is missing; add it")
    function["parameters"] = schema
    if (strict := tool.flag("strict")) is not None:
        function["strict"] = strict
    tool.finish(HARMLESS_IN_TOOLS, REFUSED_IN_TOOLS)
    return {"type": "function", "function": function}


def _read_thinking(body: JsonObject, fields: Json) -> bool:
    """Sets the chat's fields for reasoning and output format. Returns whether thinking is left out of the answer."""
    effort = None
    if (config := body.child("output_config")) is not None:
        effort = config.choice("effort", "low", "medium", "high", "xhigh", "max")
        if (form := config.child("format")) is not None:
            fields["response_format"] = _format(form)
        config.finish(refused=REFUSED_IN_OUTPUT_CONFIG)
    kind = display = None
    if (thinking := body.child("thinking")) is not None:
        kind = thinking.choice("type", "enabled", "adaptive", "disabled")
        if kind is None:
            raise thinking.error("type", "is missing; add it")
        display = thinking.choice("display", "summarized", "omitted")
        thinking.finish(HARMLESS_IN_THINKING)
    if kind == "disabled":
        fields["reasoning_effort"] = "none"
    elif effort is not None:
        fields["reasoning_effort"] = effort
    elif kind == "enabled":
        fields["chat_template_kwargs"] = {"enable_thinking": True}
    return display == "omitted"


def _format(form: JsonObject) -> Json:
    form.choice("type", "json_schema")
    schema = form.mapping("schema")
    if schema is None:
        raise form.error("schema", "is missing; add it")
    form.finish()
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}
