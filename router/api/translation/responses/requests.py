"""Translates the body of `POST /v1/responses` to the body of a chat. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.config.limits import LimitsConfig
from router.api.dialect import Json
from router.api.limits import check_count
from router.api.openai.json_bodies import read_json, shown
from router.api.openai.metadata import read_metadata
from router.api.openai.requests import ChatBody, validate_body
from router.api.translation.bodies import ChatTranslation
from router.api.translation.objects import JsonObject
from router.api.translation.responses.fields import (
    HARMLESS,
    HARMLESS_IN_REASONING,
    HARMLESS_IN_STREAM_OPTIONS,
    REFUSED,
    REFUSED_IN_REASONING,
    REFUSED_IN_TEXT_CONFIG,
    REFUSED_IN_TOOLS,
)
from router.api.translation.responses.items import listed_items, read_items
from router.api.translation.responses.store import CallInput, ResponseStore
from router.api.translation.turns import ChatTurns

# Fields that a chat has under the same names and checks: OpenAI's fields and common extensions.
_OPTIONS = (
    *("model", "stream", "temperature", "top_p", "parallel_tool_calls", "prompt_cache_key", "service_tier", "user"),
    *("prompt_cache_retention", "kv_hints", "nvext"),
    *("session_id", "request_id", "rid", "priority", "cache_salt", "chat_template_kwargs"),
    *("top_k", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("stop", "stop_token_ids", "min_tokens", "ignore_eos", "structured_outputs", "skip_special_tokens"),
    *("include_stop_str_in_output", "bad_words", "allowed_token_ids", "no_speculation"),
)
_ECHOED = ("temperature", "top_p", "prompt_cache_key", "service_tier", "user")
_ENCRYPTED_REASONING = "reasoning.encrypted_content"
# Values of `include` that only answers with built-in tools or images would have.
_ABSENT_PARTS = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)


class ResponsesBody(ChatTranslation):
    """The body of POST /v1/responses."""

    def __init__(
        self, chat: ChatBody, tenant: str, echo: Json, given: CallInput, stores: bool, seals_reasoning: bool
    ) -> None:
        """`echo` holds the call's fields that its response repeats; `given` is the call's own input."""
        super().__init__(chat)
        self.tenant = tenant
        self.echo = echo
        self.given = given
        self.stores = stores
        self.seals_reasoning = seals_reasoning

    @property
    def previous_id(self) -> str | None:
        previous: str | None = self.echo["previous_response_id"]
        return previous


def read_response_call(raw: bytes, limits: LimitsConfig, tenant: str, store: ResponseStore) -> ResponsesBody:
    """Reads a body, and the conversation that it continues from the store. Raises InvalidInput that names the field, or
    ResponseNotFound.
    """
    body = JsonObject(read_json(raw, limits))
    fields, echo = _options(body)
    echo |= _read_tools(body, fields) | _read_text(body, fields) | _read_reasoning(body, fields)
    echo["metadata"] = read_metadata(body.any("metadata")) or {}
    seals_reasoning = _includes_sealed_reasoning(body)
    if body.flag("background"):
        raise body.error("background", "= true is not supported; leave it out, and use stream for early output")
    given = body.any("input")
    if isinstance(given, list):
        check_count("input", len(given), limits.messages, "items")
    elif not isinstance(given, str):
        raise body.error("input", f"is {shown(given)}; give text or a list of items")
    turns = ChatTurns()
    echo["instructions"] = body.text("instructions")
    if echo["instructions"]:
        turns.plain("system", echo["instructions"])
    echo["previous_response_id"] = previous_id = body.text("previous_response_id")
    if previous_id:
        turns.extend(store.conversation(tenant, previous_id, limits.messages, limits.request_bytes))
    num_before = len(turns.messages)
    _read_input(given, turns)
    if len(turns.messages) == num_before:
        raise body.error("input", "is empty; give text or at least one message")
    fields["messages"] = turns.messages
    asks_to_store = body.flag("store")
    body.finish(HARMLESS, REFUSED)
    call_input = CallInput(listed_items(given), turns.messages[num_before:])
    echo["store"] = asks_to_store is not False and store.fits(call_input)
    if asks_to_store and not echo["store"]:
        raise body.error("store", "= true, but the input is too large for router.store; set it to false")
    chat = validate_body(ChatBody, fields, limits)
    return ResponsesBody(chat, tenant, echo, call_input, echo["store"], seals_reasoning)


def _options(body: JsonObject) -> tuple[Json, Json]:
    """Returns the fields that a chat takes unchanged, and those that the response repeats."""
    fields = body.take(*_OPTIONS)
    echo = {name: fields.get(name) for name in _ECHOED} | {"background": False, "truncation": "disabled"}
    echo["parallel_tool_calls"] = fields.get("parallel_tool_calls", True)
    echo["max_output_tokens"] = limit = body.integer("max_output_tokens")
    if limit is not None:
        if limit < 1:
            raise body.error("max_output_tokens", f"is {limit}; give 1 or more")
        fields["max_completion_tokens"] = limit
    if (options := body.child("stream_options")) is not None:
        options.finish(HARMLESS_IN_STREAM_OPTIONS)
    return fields, echo


def _read_input(given: str | Sequence[Any], turns: ChatTurns) -> None:
    if isinstance(given, str):
        if given:
            turns.plain("user", given)
    else:
        read_items(given, turns)


def _read_tools(body: JsonObject, fields: Json) -> Json:
    tools = [_tool(tool) for tool in body.children("tools")]
    if tools:
        fields["tools"] = [{"type": "function", "function": tool} for tool in tools]
    choice = body.any("tool_choice")
    if isinstance(choice, dict):
        named = JsonObject(choice, "tool_choice")
        named.choice("type", "function")
        fields["tool_choice"] = {"type": "function", "function": {"name": named.needed_text("name")}}
        named.finish()
    elif choice is not None:
        if choice not in ("none", "auto", "required"):
            raise body.error("tool_choice", f"is {shown(choice)}; give none, auto, required or a function's name")
        fields["tool_choice"] = choice
    return {"tools": [{"type": "function", **tool} for tool in tools], "tool_choice": choice or "auto"}


def _tool(tool: JsonObject) -> Json:
    kind = tool.needed_text("type")
    if kind != "function":
        raise tool.error("type", f"= {shown(kind)} is not supported; send tools of type function")
    function: Json = {"name": tool.needed_text("name")}
    if (description := tool.text("description")) is not None:
        function["description"] = description
    function["parameters"] = tool.mapping("parameters") or {"type": "object", "properties": {}}
    if (strict := tool.flag("strict")) is not None:
        function["strict"] = strict
    tool.finish(refused=REFUSED_IN_TOOLS)
    return function


def _read_text(body: JsonObject, fields: Json) -> Json:
    text = body.child("text")
    echo: Json = {"format": {"type": "text"}}
    if text is None:
        return {"text": echo}
    if (form := text.child("format")) is not None:
        kind = form.choice("type", "text", "json_object", "json_schema")
        if kind is None:
            raise form.error("type", "is missing; add it")
        echo = {"format": {"type": kind}}
        if kind == "json_schema":
            schema: Json = {"name": form.needed_text("name"), "schema": form.mapping("schema")}
            if schema["schema"] is None:
                raise form.error("schema", "is missing; add it")
            given = {"description": form.text("description"), "strict": form.flag("strict")}
            schema |= {name: value for name, value in given.items() if value is not None}
            fields["response_format"] = {"type": kind, "json_schema": schema}
            echo["format"] |= schema
        elif kind == "json_object":
            fields["response_format"] = {"type": kind}
        form.finish()
    text.finish(refused=REFUSED_IN_TEXT_CONFIG)
    return {"text": echo}


def _read_reasoning(body: JsonObject, fields: Json) -> Json:
    effort = None
    if (reasoning := body.child("reasoning")) is not None:
        if (effort := reasoning.text("effort")) is not None:
            fields["reasoning_effort"] = effort
        reasoning.finish(HARMLESS_IN_REASONING, REFUSED_IN_REASONING)
    return {"reasoning": {"effort": effort, "summary": None}}


def _includes_sealed_reasoning(body: JsonObject) -> bool:
    include = body.values("include") or []
    for name in include:
        if name != _ENCRYPTED_REASONING and name not in _ABSENT_PARTS:
            raise body.error("include", f"has {shown(name)}, which is not supported; leave it out")
    return _ENCRYPTED_REASONING in include
