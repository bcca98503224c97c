"""The table of formats: how each family of models writes tool calls and reasoning, and the marks that show it.

A format is a row. The marks of a tool format are what begins a call, each with the parts that follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from router.parsers.parts.envelope import Envelope
from router.parsers.parts.part import Part
from router.parsers.parts.plain import Literal, Space

Parts = Callable[[], tuple[Part, ...]]  # makes the parts of one call


@dataclass(frozen=True, slots=True)
class CallMark:
    """What begins a call."""

    parts: Parts
    only_first: bool = False  # counts only where no text came before it
    is_part: bool = False  # the mark is the first text of the parts, not before them


@dataclass(frozen=True, slots=True)
class Format:
    """What a row of either table has. A template shows the format if it holds all texts of any entry of `shown_by`."""

    name: str
    shown_by: tuple[tuple[str, ...], ...] = ()

    def is_shown_by(self, chat_template: str) -> bool:
        """Returns whether the source of a chat template shows this format."""
        return any(all(text in chat_template for text in texts) for texts in self.shown_by)


@dataclass(frozen=True, slots=True)
class ToolFormat(Format):
    """How a family of models writes tool calls."""

    calls: Mapping[str, CallMark] = field(default_factory=dict)
    before: frozenset[str] = frozenset()  # marks that may stand before calls
    after: frozenset[str] = frozenset()  # marks that may stand after calls
    special: bool = False  # its marks are special tokens, which the text must keep
    ends_reasoning: bool = False  # its marks end the reasoning if they stand in it


@dataclass(frozen=True, slots=True)
class ReasoningFormat(Format):
    """How a family of models writes its reasoning."""

    opening: str = ""
    closings: tuple[str, ...] = ()
    headers: Mapping[str, CallMark] = field(default_factory=dict)  # marks of headers that say what follows them
    special: bool = False  # its marks are special tokens, which the text must keep
    prompts: tuple[str, ...] = ()  # ends of prompts after which the model is reasoning


def _hermes() -> tuple[Part, ...]:
    return Space(), Envelope(), Space(), Literal("</tool_call>")


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    row.name: row for row in (ToolFormat("hermes", (("<tool_call>",),), {"<tool_call>": CallMark(_hermes)}),)
}

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    row.name: row
    for row in (ReasoningFormat("qwen3", (("<think>",),), "<think>", ("</think>",), prompts=("<think>",)),)
}
