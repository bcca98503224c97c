"""The tables of formats: how each family of models writes tool calls and reasoning, and how its template shows it.

A row is a format; a model gets the first row that its chat template shows. `docs/parsers.md` says how to add one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from router.parsers.parts.body import Choice, Parts, Repeated
from router.parsers.parts.envelope import Envelope
from router.parsers.parts.harmony import HarmonyHeader
from router.parsers.parts.json_text import Arguments
from router.parsers.parts.keywords import GEMMA, PYTHON, KeywordArguments
from router.parsers.parts.part import Part
from router.parsers.parts.plain import Literal, Name, Space
from router.parsers.parts.tagged import TaggedArguments


@dataclass(frozen=True, slots=True)
class CallMark:
    """The mark that begins a call, and the parts that follow it."""

    parts: Parts
    only_first: bool = False  # the mark counts only if no text came before it
    is_part: bool = False  # the parts parse the mark itself too


@dataclass(frozen=True, slots=True)
class Format:
    """The fields of rows of both tables. A template shows a format if it has all texts of an entry of `shown_by`."""

    name: str
    shown_by: tuple[tuple[str, ...], ...]
    special: bool = False  # its marks are special tokens, which the text has to keep
    ends: frozenset[str] = frozenset()  # marks that end a message; dropped wherever they occur

    def is_shown_by(self, chat_template: str) -> bool:
        """Returns whether the source of a chat template shows this format."""
        return any(all(text in chat_template for text in texts) for texts in self.shown_by)


@dataclass(frozen=True, slots=True)
class ToolFormat(Format):
    """The way in which a family of models writes tool calls."""

    calls: Mapping[str, CallMark] = field(default_factory=dict)
    before: frozenset[str] = frozenset()  # marks that may precede calls
    after: frozenset[str] = frozenset()  # marks that may follow calls
    ends_reasoning: bool = False  # a call within reasoning ends the reasoning


@dataclass(frozen=True, slots=True)
class ReasoningFormat(Format):
    """The way in which a family of models writes reasoning."""

    opening: str = ""
    closings: tuple[str, ...] = ()
    headers: Mapping[str, CallMark] = field(default_factory=dict)  # marks of headers, which say what follows
    prompts: tuple[str, ...] = ()  # prompt endings after which the model is reasoning


def _hermes() -> tuple[Part, ...]:
    return Space(), Envelope(), Space(), Literal("</tool_call>")


def _qwen3_coder_function() -> tuple[Part, ...]:
    tags = TaggedArguments(("<parameter=", ">"), ("", "</parameter>"), "</function>", trim=True)
    return Name(">"), tags, Space(), Literal("</tool_call>", optional=True)


def _qwen3_coder() -> tuple[Part, ...]:
    return Space(), Literal("<function="), *_qwen3_coder_function()


def _glm45() -> tuple[Part, ...]:
    key, value = ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")
    return Name(stops="<\n"), TaggedArguments(key, value, "</tool_call>", untyped_json=True)


def _known_envelope() -> tuple[Part, ...]:
    return (Envelope(known_only=True),)


def _llama3_json() -> tuple[Part, ...]:
    return (Repeated(_known_envelope, "", ";", ""),)


def _python_call() -> tuple[Part, ...]:
    return Name("(", known_only=True), KeywordArguments(PYTHON)


def _pythonic() -> tuple[Part, ...]:
    return (Repeated(_python_call, "[", ",", "]"),)


def _gemma_code() -> tuple[Part, ...]:
    return Space(), Repeated(_python_call, "[", ",", "]", bare=True), Space(), Literal("```")


def _gemma_call() -> tuple[Part, ...]:
    return Literal("call:"), Name("{"), KeywordArguments(GEMMA)


def _gemma_function() -> tuple[Part, ...]:
    return *_gemma_call(), Literal("<end_function_call>")


def _gemma_tool() -> tuple[Part, ...]:
    return *_gemma_call(), Literal("<tool_call|>")


def _mistral_list() -> tuple[Part, ...]:
    return (Repeated(lambda: (Envelope(),), "[", ",", "]"),)


def _mistral_named() -> tuple[Part, ...]:
    name = Name("[ARGS]", stops="{", clean=lambda text: text.partition("[CALL_ID]")[0].strip())
    return name, Space(), Arguments()


def _mistral() -> tuple[Part, ...]:
    return (Choice({"[": _mistral_list, "": _mistral_named}),)


def _deepseek_v3() -> tuple[Part, ...]:
    before = (Literal("function"), Literal("<｜tool▁sep｜>"), Name("\n"), Literal("```json"), Space())
    return *before, Arguments(), Space(), Literal("```"), Space(), Literal("<｜tool▁call▁end｜>")


def _deepseek_v31() -> tuple[Part, ...]:
    return Name("<｜tool▁sep｜>"), Space(), Arguments(), Space(), Literal("<｜tool▁call▁end｜>")


def _kimi_k2() -> tuple[Part, ...]:
    name = Name("<|tool_call_argument_begin|>", clean=_kimi_name)
    return Space(), name, Space(), Arguments(), Space(), Literal("<|tool_call_end|>")


def _kimi_name(text: str) -> str:
    """Returns the tool's name from a call's id, such as `functions.search:0`."""
    return re.sub(r":[0-9]+$", "", text.strip()).removeprefix("functions.")


def _harmony() -> tuple[Part, ...]:
    return HarmonyHeader(), Space(), Arguments(), Space(), Literal("<|call|>", optional=True)


_HARMONY_HEADERS = {
    "<|start|>": CallMark(_harmony, is_part=True),
    "<|channel|>": CallMark(_harmony, is_part=True),
    " to=": CallMark(_harmony, is_part=True, only_first=True),  # of the first message, whose role is in the prompt
}
_HARMONY_ENDS = frozenset({"<|end|>", "<|return|>", "<|call|>"})

_TOOL_ROWS = (
    ToolFormat(
        "harmony",
        (("<|channel|>", "<|message|>"),),
        special=True,
        ends=_HARMONY_ENDS,
        calls=_HARMONY_HEADERS,
        ends_reasoning=True,
    ),
    ToolFormat(
        "kimi_k2",
        (("<|tool_calls_section_begin|>",), ("<|tool_call_argument_begin|>",)),
        special=True,
        ends=frozenset({"<|im_end|>"}),
        calls={"<|tool_call_begin|>": CallMark(_kimi_k2)},
        before=frozenset({"<|tool_calls_section_begin|>"}),
        after=frozenset({"<|tool_calls_section_end|>"}),
        ends_reasoning=True,
    ),
    ToolFormat(
        "deepseek_v3",
        (("<｜tool▁call▁begin｜>", "```json"),),
        special=True,
        ends=frozenset({"<｜end▁of▁sentence｜>"}),
        calls={"<｜tool▁call▁begin｜>": CallMark(_deepseek_v3)},
        before=frozenset({"<｜tool▁calls▁begin｜>"}),
        after=frozenset({"<｜tool▁calls▁end｜>"}),
    ),
    ToolFormat(
        "deepseek_v31",
        (("<｜tool▁call▁begin｜>",),),
        special=True,
        ends=frozenset({"<｜end▁of▁sentence｜>"}),
        calls={"<｜tool▁call▁begin｜>": CallMark(_deepseek_v31)},
        before=frozenset({"<｜tool▁calls▁begin｜>"}),
        after=frozenset({"<｜tool▁calls▁end｜>"}),
    ),
    ToolFormat("glm45", (("<arg_key>",),), calls={"<tool_call>": CallMark(_glm45)}),
    ToolFormat(
        "qwen3_coder",
        (("<function=", "<parameter="),),
        calls={"<tool_call>": CallMark(_qwen3_coder), "<function=": CallMark(_qwen3_coder_function)},
    ),
    ToolFormat(
        "mistral",
        (("[TOOL_CALLS]",),),
        special=True,
        calls={"[TOOL_CALLS]": CallMark(_mistral)},
    ),
    ToolFormat(
        "gemma",
        (("<start_function_call>",), ("<|tool_call>",), ("```tool_code",), ("<start_of_turn>",)),
        special=True,
        ends=frozenset({"<end_of_turn>", "<turn|>"}),
        calls={
            "```tool_code": CallMark(_gemma_code),
            "<start_function_call>": CallMark(_gemma_function),
            "<|tool_call>": CallMark(_gemma_tool),
        },
    ),
    ToolFormat("hermes", (("<tool_call>",),), calls={"<tool_call>": CallMark(_hermes)}),
    ToolFormat(
        "pythonic",
        (("<|python_start|>",), ("[func_name1(",), ("[func1(",)),
        special=True,
        ends=frozenset({"<|eot|>", "<|eom|>", "<|eot_id|>", "<|eom_id|>"}),
        calls={"[": CallMark(_pythonic, only_first=True, is_part=True)},
        before=frozenset({"<|python_start|>"}),
        after=frozenset({"<|python_end|>"}),
    ),
    ToolFormat(
        "llama3_json",
        (("<|python_tag|>",), ("<|start_header_id|>", '"parameters"')),
        special=True,
        ends=frozenset({"<|eot_id|>", "<|eom_id|>"}),
        calls={
            "<|python_tag|>": CallMark(_llama3_json),
            "{": CallMark(_llama3_json, only_first=True, is_part=True),
        },
    ),
)

_REASONING_ROWS = (
    ReasoningFormat(
        "harmony",
        (("<|channel|>", "<|message|>"),),
        special=True,
        ends=_HARMONY_ENDS,
        headers=_HARMONY_HEADERS,
        prompts=("<|channel|>analysis<|message|>",),
    ),
    ReasoningFormat(
        "kimi_k2",
        (("<|im_middle|>", "<think>"),),
        opening="<think>",
        closings=("</think>",),
        prompts=("<think>",),
    ),
    ReasoningFormat(
        "deepseek_r1",
        (("<｜Assistant｜>", "<think>"), ("<｜Assistant｜>", "</think>")),
        opening="<think>",
        closings=("</think>",),
        prompts=("<think>",),
    ),
    ReasoningFormat(
        "glm45",
        (("[gMASK]", "<think>"), ("<|observation|>", "<think>")),
        opening="<think>",
        closings=("</think>",),
        prompts=("<think>",),
    ),
    ReasoningFormat(
        "mistral",
        (("[THINK]",),),
        special=True,
        opening="[THINK]",
        closings=("[/THINK]",),
        prompts=("[THINK]",),
    ),
    ReasoningFormat(
        "qwen3",
        (("<think>",), ("</think>",)),
        opening="<think>",
        closings=("</think>",),
        prompts=("<think>",),
    ),
)

TOOL_FORMATS: Mapping[str, ToolFormat] = {row.name: row for row in _TOOL_ROWS}
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {row.name: row for row in _REASONING_ROWS}
