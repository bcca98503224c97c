"""The events of one completion's parsed output."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """New text of the model's reasoning, which comes before or between parts of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The start of a tool call, whose arguments follow. The API assigns its id."""

    index: int  # among the completion's tool calls, from 0
    name: str


@dataclass(frozen=True, slots=True)
class ToolArgumentsDelta:
    """New text of a tool call's arguments. Joined, the deltas are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The end of a tool call: its arguments are complete."""

    index: int


ParserEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolArgumentsDelta | ToolCallEnd
