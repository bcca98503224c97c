"""Tests that every field that Anthropic's or OpenAI's clients can send is obeyed, refused, or harmless."""

from __future__ import annotations

import json
import pkgutil
import typing
from pathlib import Path

import pytest

from penstock.config import StoreConfig
from penstock.config.limits import LimitsConfig
from penstock.errors import InvalidInput
from router.api.translation.anthropic import fields as messages_fields
from router.api.translation.anthropic.requests import read_message_call
from router.api.translation.responses import fields as responses_fields
from router.api.translation.responses.requests import read_response_call
from router.api.translation.responses.store import ResponseStore

DOCS = Path(__file__).resolve().parents[4] / "docs"
SENTINEL = {"asks": ["for", "something"]}
OBJECTS = {"input", "input_schema", "parameters"}  # chosen by the caller
HEADERS = {"betas", "user_profile_id", "workspace_id"}  # the client sends these as headers


def read_message(body):
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}], **body}
    return read_message_call(json.dumps(body).encode(), LimitsConfig())


def read_response(body):
    store = ResponseStore(StoreConfig(), lambda: 0.0)
    return read_response_call(json.dumps({"input": "Hi", **body}).encode(), LimitsConfig(), "", store)


def in_message(role, **block):
    user = {"role": "user", "content": "a"}
    return lambda name: {"messages": [user, {"role": role, "content": [{**block, name: SENTINEL}]}, user]}


def in_tool(name):
    return {"tools": [{"name": "a", "input_schema": {}, name: SENTINEL}]}


def in_item(**item):
    return lambda name: {"input": [{**item, name: SENTINEL}, {"role": "user", "content": "a"}]}


def in_part(name):
    return {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", name: SENTINEL}]}]}


def in_function(name):
    return {"tools": [{"type": "function", "name": "a", name: SENTINEL}]}


def names_of(kind):
    """Imports the client only here, because Anthropic's takes three seconds, which collection should not."""
    return sorted(set(typing.get_type_hints(pkgutil.resolve_name(kind))) - HEADERS)


BLOCK = in_message("assistant", type="tool_use", id="a", name="b", input={})
RESULT = in_message("user", type="tool_result", tool_use_id="a", content="b")
CALL = in_item(type="function_call", call_id="a", name="b", arguments="{}")
CREATE = "openai.types.responses.response_create_params:ResponseCreateParamsBase"
PLACES = [
    (read_message, lambda name: {name: SENTINEL}, "anthropic.types.message_create_params:MessageCreateParamsBase",
     messages_fields.HARMLESS),
    (read_message, lambda name: {name: SENTINEL}, "anthropic.types.beta.message_create_params:MessageCreateParamsBase",
     messages_fields.HARMLESS),
    (read_message, in_tool, "anthropic.types:ToolParam", messages_fields.HARMLESS_IN_TOOLS),
    (read_message, BLOCK, "anthropic.types:ToolUseBlockParam", messages_fields.HARMLESS_IN_BLOCKS),
    (read_message, RESULT, "anthropic.types:ToolResultBlockParam", messages_fields.HARMLESS_IN_BLOCKS),
    (read_message, in_message("user", type="text", text="a"), "anthropic.types:TextBlockParam",
     messages_fields.HARMLESS_IN_BLOCKS),
    (read_message, in_message("assistant", type="thinking", thinking="a", signature="b"),
     "anthropic.types:ThinkingBlockParam", messages_fields.HARMLESS_IN_BLOCKS),
    (read_message, lambda name: {"output_config": {name: SENTINEL}}, "anthropic.types.beta:BetaOutputConfigParam",
     frozenset()),
    (read_message, lambda name: {"thinking": {"type": "enabled", name: SENTINEL}},
     "anthropic.types:ThinkingConfigEnabledParam", messages_fields.HARMLESS_IN_THINKING),
    (read_message, lambda name: {"metadata": {name: SENTINEL}}, "anthropic.types:MetadataParam", frozenset()),
    (read_response, lambda name: {name: SENTINEL}, CREATE, responses_fields.HARMLESS),
    (read_response, lambda name: {"reasoning": {name: SENTINEL}}, "openai.types.shared_params:Reasoning",
     responses_fields.HARMLESS_IN_REASONING),
    (read_response, lambda name: {"text": {name: SENTINEL}}, "openai.types.responses:ResponseTextConfigParam",
     frozenset()),
    (read_response, in_function, "openai.types.responses:FunctionToolParam", frozenset()),
    (read_response, CALL, "openai.types.responses:ResponseFunctionToolCallParam", responses_fields.HARMLESS_IN_ITEMS),
    (read_response, in_item(type="function_call_output", call_id="a", output="b"),
     "openai.types.responses.response_input_item_param:FunctionCallOutput",
     responses_fields.HARMLESS_IN_ITEMS | {"name"}),
    (read_response, in_item(role="user", content="a"), "openai.types.responses:EasyInputMessageParam",
     responses_fields.HARMLESS_IN_ITEMS),
    (read_response, in_item(type="reasoning", summary=[], id="a"), "openai.types.responses:ResponseReasoningItemParam",
     responses_fields.HARMLESS_IN_ITEMS | {"summary"}),
    (read_response, in_part, "openai.types.responses:ResponseInputTextParam", responses_fields.HARMLESS_IN_PARTS),
]  # fmt: skip


@pytest.mark.parametrize(("read", "place", "kind", "harmless"), PLACES, ids=[place[2] for place in PLACES])
def test_every_field_of_the_client_is_obeyed_refused_or_harmless(read, place, kind, harmless):
    for name in names_of(kind):
        if name in harmless or (name in OBJECTS and kind != CREATE):
            read(place(name))
            continue
        with pytest.raises(InvalidInput) as raised:
            read(place(name))
        assert name in raised.value.message, raised.value.message


@pytest.mark.parametrize(
    ("read", "refused"), [(read_message, messages_fields.REFUSED), (read_response, responses_fields.REFUSED)]
)
def test_a_field_is_refused_unless_its_value_asks_for_nothing(read, refused):
    for name, neutrals in refused.items():
        with pytest.raises(InvalidInput, match=rf"^{name} = .* is not supported; leave it out"):
            read({name: SENTINEL})
        for neutral in (None, *neutrals):
            read({name: neutral})


@pytest.mark.parametrize(("page", "module"), [("anthropic.md", messages_fields), ("responses.md", responses_fields)])
def test_the_docs_list_the_fields(page, module):
    text = (DOCS / page).read_text()
    for table, names in vars(module).items():
        if table.startswith(("HARMLESS", "REFUSED")):
            for name in names:
                assert f"`{name}`" in text, f"{table}: {name}"
