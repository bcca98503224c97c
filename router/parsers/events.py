"""The events of one completion's parsed output."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """New text of the model's reasoning, which comes before or between answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins; its arguments follow. The API assigns its id."""

    index: int  # among the completion's tool calls, from 0
    name: str


@dataclass(frozen=True, slots=True)
class ToolArgumentsDelta:
    """New text of a tool call's arguments; all of them together are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """A tool call's arguments are complete."""

    index: int


ParserEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolArgumentsDelta | ToolCallEnd
