"""Builds an assistant's message from parser events, whole or as the deltas of a stream. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from router.api.dialect import Json
from router.parsers.events import (
    ParserEvent,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallStart,
)


class AssistantMessage:
    """Collects the events of one choice and builds its message."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[str, str, list[str]]] = {}  # index -> id, name, pieces of the arguments

    def add(self, events: Sequence[ParserEvent]) -> None:
        for event in events:
            if isinstance(event, TextDelta):
                self._text.append(event.text)
            elif isinstance(event, ReasoningDelta):
                self._reasoning.append(event.text)
            elif isinstance(event, ToolCallStart):
                self._calls[event.index] = (new_call_id(), event.name, [])
            elif isinstance(event, ToolArgumentsDelta):
                self._calls[event.index][2].append(event.text)

    def to_json(self) -> Json:
        """Returns the message; its content is null if it has tool calls and no text."""
        text, reasoning = "".join(self._text), "".join(self._reasoning)
        message: Json = {"role": "assistant", "content": text if text or not self._calls else None}
        if reasoning:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if self._calls:
            message["tool_calls"] = [
                {"id": call_id, "type": "function", "function": {"name": name, "arguments": "".join(arguments)}}
                for _, (call_id, name, arguments) in sorted(self._calls.items())
            ]
        return message


def message_deltas(events: Sequence[ParserEvent]) -> list[Json]:
    """Returns the deltas of a streamed message for these events, in order."""
    deltas: list[Json] = []
    for event in events:
        if isinstance(event, TextDelta):
            deltas.append({"content": event.text})
        elif isinstance(event, ReasoningDelta):
            deltas.append({"reasoning": event.text, "reasoning_content": event.text})
        elif isinstance(event, ToolCallStart):
            function = {"name": event.name, "arguments": ""}
            call = {"index": event.index, "id": new_call_id(), "type": "function", "function": function}
            deltas.append({"tool_calls": [call]})
        elif isinstance(event, ToolArgumentsDelta):
            deltas.append({"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]})
    return deltas


def new_call_id() -> str:
    """Returns an id for a tool call, which the tool's result repeats."""
    return f"call_{uuid.uuid4().hex[:24]}"
