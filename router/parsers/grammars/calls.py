"""Writes one call in each format, as an expression of a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import InvalidInput
from penstock.text.lark import LarkWriter
from penstock.text.schemas import closed
from router.parsers.tools import ToolFunction, allowed_values

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")

WriteCall = Callable[[LarkWriter, ToolFunction], str]


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """The way in which a format writes calls: `mark` begins each call; `opening` and `closing` enclose all of them."""

    mark: str
    call: WriteCall  # what follows the mark
    separator: str = ""
    opening: str = ""
    closing: str = ""
    one_only: bool = False  # the format has no parallel calls
    trigger: str = ""  # the part of `opening` after which only calls may come; empty: all of it


def schema_of(tool: ToolFunction) -> dict[str, Any]:
    """Returns the schema of a tool's arguments: an object without other properties, unless the schema allows them."""
    return closed({"type": "object", **tool.parameters})


def _with_json(before: str, after: str) -> WriteCall:
    """Returns a writer of calls with fixed text around JSON arguments; `{}` stands for the tool's name."""

    def write(lark: LarkWriter, tool: ToolFunction) -> str:
        parts = (lark.literal(before.replace("{}", tool.name)), lark.json(schema_of(tool)), lark.literal(after))
        return " ".join(parts)

    return write


def _kimi(lark: LarkWriter, tool: ToolFunction) -> str:
    begin, end = lark.literal("<|tool_call_argument_begin|>"), lark.literal("<|tool_call_end|>")
    return f"{lark.literal(f'functions.{tool.name}:')} /[0-9]{{1,3}}/ {begin} {lark.json(schema_of(tool))} {end}"


def _tagged(before: str, key: str, value_end: str, after: str) -> WriteCall:
    """Returns a writer of calls with a tag for each parameter, in which strings have no quotes."""

    def write(lark: LarkWriter, tool: ToolFunction) -> str:
        def parameter(name: str, schema: Mapping[str, Any]) -> str:
            opening = lark.literal(key.replace("{}", name))
            if not (schema.get("type") == "string" or all_strings(schema)):
                return f"{opening} {lark.json(schema)} {lark.literal(value_end)}"
            values = allowed_values(schema)
            if values is None:
                return f"{opening} {lark.until(value_end)}"
            choices = " | ".join(lark.literal(f"{each}{value_end}") for each in values)
            return f"{opening} ({choices})"

        properties = lark.properties(schema_of(tool), parameter, "")
        return f"{lark.literal(before.replace('{}', tool.name))} {properties} {lark.literal(after)}"

    return write


def all_strings(schema: Mapping[str, Any]) -> bool:
    """Returns whether a schema lists the allowed values and all of them are strings."""
    values = allowed_values(schema)
    return values is not None and all(isinstance(value, str) for value in values)


def _bare(name: str) -> str:
    """Returns the name of a parameter if it can be written without quotes, else raises InvalidInput."""
    if not _KEY.fullmatch(name):
        problem = f"the parameter {name[:64]!r} cannot be enforced with this model; use letters, digits and underscores"
        raise InvalidInput("tools", problem)
    return name


def _python(before: str, after: str) -> WriteCall:
    def write(lark: LarkWriter, tool: ToolFunction) -> str:
        properties = lark.properties(
            schema_of(tool), lambda name, schema: f"{lark.literal(_bare(name) + '=')} {lark.json(schema)}", ", "
        )
        return f"{lark.literal(f'{before}{tool.name}(')} {properties} {lark.literal(f'){after}')}"

    return write


def _gemma(quote: str, end: str) -> WriteCall:
    def write(lark: LarkWriter, tool: ToolFunction) -> str:
        arguments = _gemma_value(lark, schema_of(tool), quote, 0)
        return f"{lark.literal(f'call:{tool.name}')} {arguments} {lark.literal(end)}"

    return write


def _gemma_value(lark: LarkWriter, schema: Mapping[str, Any], quote: str, depth: int) -> str:
    """Returns an expression of a value that matches the schema, with `quote` around its strings."""
    kind = schema.get("type")
    values = allowed_values(schema)
    if values is not None:
        choices = [
            lark.literal(f"{quote}{each}{quote}" if isinstance(each, str) else json.dumps(each)) for each in values
        ]
        return f"({' | '.join(choices)})"
    if kind == "object" and depth < 16:
        properties = lark.properties(
            schema,
            lambda name, each: f"{lark.literal(_bare(name) + ':')} {_gemma_value(lark, each, quote, depth + 1)}",
            ",",
        )
        return f'"{{" {properties} "}}"'
    if kind == "array" and depth < 16:
        items = schema.get("items")
        item = lark.rule(_gemma_value(lark, items if isinstance(items, Mapping) else {}, quote, depth + 1))
        return f'"[" ({item} ("," {item})*)? "]"'
    if kind in ("number", "integer", "boolean", "null"):
        return lark.json(schema)
    return f"{lark.literal(quote)} {lark.until(quote)}"


_MISTRAL_LIST = CallGrammar(
    "", _with_json('{"name": "{}", "arguments": ', "}"), ", ", "[TOOL_CALLS] [", "]", trigger="[TOOL_CALLS]"
)
_MISTRAL_NAMED = CallGrammar("[TOOL_CALLS]", _with_json("{}[ARGS]", ""))
_GEMMA_CODE = CallGrammar("```tool_code\n", _python("", "\n```"), "\n")
_GEMMA_FUNCTION = CallGrammar("<start_function_call>", _gemma("<escape>", "<end_function_call>"))
_GEMMA_TOOL = CallGrammar("<|tool_call>", _gemma('<|"|>', "<tool_call|>"))

_ROWS: Mapping[str, CallGrammar] = {
    "hermes": CallGrammar("<tool_call>", _with_json('\n{"name": "{}", "arguments": ', "}\n</tool_call>"), "\n"),
    "qwen3_coder": CallGrammar(
        "<tool_call>",
        _tagged("\n<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>\n</tool_call>"),
        "\n",
    ),
    "glm45": CallGrammar(
        "<tool_call>",
        _tagged("{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"),
        "\n",
    ),
    "llama3_json": CallGrammar("", _with_json('{"name": "{}", "parameters": ', "}"), "; "),
    "pythonic": CallGrammar("", _python("", ""), ", ", "[", "]"),
    "deepseek_v3": CallGrammar(
        "<｜tool▁call▁begin｜>",
        _with_json("function<｜tool▁sep｜>{}\n```json\n", "\n```<｜tool▁call▁end｜>"),
        "\n",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": CallGrammar(
        "<｜tool▁call▁begin｜>",
        _with_json("{}<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        "",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": CallGrammar(
        "<|tool_call_begin|>", _kimi, "", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    ),
    "harmony": CallGrammar(
        "", _with_json("<|channel|>commentary to=functions.{} <|constrain|>json<|message|>", ""), one_only=True
    ),
}


def call_grammar(format_name: str, special_tokens: Mapping[str, int]) -> CallGrammar:
    """Returns how a format writes calls. In some families that depends on the special tokens that exist."""
    if format_name == "mistral":
        return _MISTRAL_NAMED if "[ARGS]" in special_tokens else _MISTRAL_LIST
    if format_name == "gemma":
        if "<|tool_call>" in special_tokens:
            return _GEMMA_TOOL
        return _GEMMA_FUNCTION if "<start_function_call>" in special_tokens else _GEMMA_CODE
    return _ROWS[format_name]
