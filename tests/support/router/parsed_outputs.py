"""Combines what an output parser yields into one whole output, for tests that compare outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.parsers.events import ParserEvent, ReasoningDelta, TextDelta, ToolArgumentsDelta, ToolCallEnd, ToolCallStart
from router.parsers.parser_choice import ParserChoice
from router.parsers.tools import ToolFunction


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """Holds a tool call of a whole output. `complete` is False if the output ended inside the arguments."""

    name: str
    arguments: str
    complete: bool = True


@dataclass(frozen=True, slots=True)
class ParsedOutput:
    """Holds a whole parsed output."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ParsedCall, ...] = ()


def parse_whole(
    choice: ParserChoice, text: str, tools: Sequence[ToolFunction] = (), *, starts_in_reasoning: bool = False
) -> ParsedOutput:
    """Parses a whole output at once."""
    parser = choice.make(tools, starts_in_reasoning=starts_in_reasoning)
    return gather([*parser.feed(text), *parser.finish()])


def gather(events: Sequence[ParserEvent]) -> ParsedOutput:
    """Combines the events of a whole output."""
    text: list[str] = []
    reasoning: list[str] = []
    names: list[str] = []
    arguments: list[list[str]] = []
    complete: set[int] = set()
    for event in events:
        match event:
            case TextDelta():
                text.append(event.text)
            case ReasoningDelta():
                reasoning.append(event.text)
            case ToolCallStart():
                names.append(event.name)
                arguments.append([])
            case ToolArgumentsDelta():
                arguments[event.index].append(event.text)
            case ToolCallEnd():
                complete.add(event.index)
    calls = [ParsedCall(name, "".join(arguments[index]), index in complete) for index, name in enumerate(names)]
    return ParsedOutput("".join(text), "".join(reasoning), tuple(calls))
