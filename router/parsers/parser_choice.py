"""Chooses the formats of a model's output from its chat template, and makes parsers for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.errors import ConfigError, InvalidInput
from router.parsers.formats import REASONING_FORMATS, TOOL_FORMATS, ReasoningFormat, ToolFormat
from router.parsers.grammars.outputs import write_grammar
from router.parsers.output_parser import OutputParser
from router.parsers.tools import ToolFunction

FormatT = TypeVar("FormatT", ToolFormat, ReasoningFormat)

AUTO = "auto"
NONE = "none"


@dataclass(frozen=True, slots=True)
class ParserChoice:
    """The formats of one model's output; None if the model has none."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def tool_format(self) -> str | None:
        """The name of the format of tool calls."""
        return self.tools.name if self.tools else None

    @property
    def reasoning_format(self) -> str | None:
        """The name of the format of reasoning."""
        return self.reasoning.name if self.reasoning else None

    @property
    def needs_special_tokens(self) -> bool:
        """Returns whether a format's marks are special tokens, so that the text has to keep these."""
        return self.keeps_special_tokens(has_tools=True)

    def keeps_special_tokens(self, has_tools: bool) -> bool:
        """Returns whether a request's text must keep special tokens. Without tools, only reasoning marks count."""
        return bool((has_tools and self.tools and self.tools.special) or (self.reasoning and self.reasoning.special))

    def make(self, tools: Sequence[ToolFunction] = (), *, starts_in_reasoning: bool = False) -> OutputParser:
        """Returns a parser for the start of a completion. Without tools, tool calls stay text."""
        return OutputParser(self.tools, self.reasoning, tools, starts_in_reasoning=starts_in_reasoning)

    def restore(self, state: Mapping[str, Any], tools: Sequence[ToolFunction] = ()) -> OutputParser:
        """Returns a parser that continues from another parser's `state()`.

        Raises InvalidInput if `state` does not come from a parser of this choice.
        """
        parser = self.make(tools)
        parser.load(state)
        return parser

    def grammar(
        self,
        tools: Sequence[ToolFunction],
        tool_choice: str = "auto",
        *,
        parallel: bool = True,
        special_tokens: Mapping[str, int] | None = None,
        starts_in_reasoning: bool = False,
    ) -> str | None:
        """Returns an llguidance Lark grammar that allows only valid calls in this format; None to allow any output.

        `tool_choice` is "auto" (calls of strict tools must be valid; None if no tool is strict), "required", "none" or
        the name of the tool to call. `special_tokens` are the ids of special tokens by text; marks among them are
        matched as tokens. Raises InvalidInput if the model has no format of calls or there is no such tool.
        """
        offered = list(tools)
        named = tool_choice not in ("auto", "required", NONE)
        if named:
            offered = [tool for tool in tools if tool.name == tool_choice]
            if not offered:
                raise InvalidInput("tool_choice", f"{tool_choice[:64]!r} is not one of the tools; name one of them")
        if tool_choice == NONE or (tool_choice == AUTO and not any(tool.strict for tool in tools)):
            return None
        if self.tools is None:
            problem = "this model has no known format of tool calls; set tool_parser, or send no tool_choice"
            raise InvalidInput("tool_choice", problem)
        if not offered:
            raise InvalidInput("tools", "is empty, but tool_choice requires a call; give at least one tool")
        reasoning = self.reasoning
        return write_grammar(
            self.tools.name,
            (reasoning.opening, reasoning.closings[0]) if reasoning and reasoning.closings else None,
            offered,
            required=tool_choice != AUTO,
            parallel=parallel and not named,
            special_tokens=special_tokens or {},
            starts_in_reasoning=starts_in_reasoning,
        )

    def prompt_opens_reasoning(self, prompt_text_end: str) -> bool:
        """Returns whether the prompt ends with an opened reasoning section, as some templates write it."""
        return self.reasoning is not None and prompt_text_end.rstrip().endswith(self.reasoning.prompts or ("\0",))


def choose_parsers(chat_template: str | None, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> ParserChoice:
    """Returns the formats that the source of a chat template shows, or the named ones.

    "none" disables a parser. Raises ConfigError for an unknown name.
    """
    source = chat_template or ""
    return ParserChoice(
        _find("tool_parser", tool_parser, TOOL_FORMATS, source),
        _find("reasoning_parser", reasoning_parser, REASONING_FORMATS, source),
    )


def _find(field: str, name: str, formats: Mapping[str, FormatT], source: str) -> FormatT | None:
    if name == NONE:
        return None
    if name == AUTO:
        return next((row for row in formats.values() if row.is_shown_by(source)), None)
    if name not in formats:
        known = ", ".join([AUTO, NONE, *formats])
        raise ConfigError(f"{field}: {name[:64]!r} is not a parser; choose one of {known}")
    return formats[name]
