"""Builds the messages of a chat from the smaller pieces that other dialects send: blocks and items. Pure.

What an assistant wrote in one turn (reasoning, text and tool calls, each a piece of its own) becomes one message, as
the model's chat template renders it. That depends on the turn alone, so that earlier turns keep their tokens.
"""

from __future__ import annotations

import json
from typing import Any

Json = dict[str, Any]


class ChatTurns:
    """Collects messages in the form of OpenAI's chat completions. Texts of one message are joined by line feeds."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self._assistant: Json | None = None  # the last message, while it is an assistant's

    def extend(self, messages: list[Json]) -> None:
        """Appends messages that were built before."""
        self.messages.extend(messages)
        self._assistant = None

    def plain(self, role: str, text: str) -> None:
        """Appends a message of a role without parts: system, developer or user."""
        self._append({"role": role, "content": text})

    def tool_result(self, call_id: str, text: str) -> None:
        self._append({"role": "tool", "tool_call_id": call_id, "content": text})

    def assistant_text(self, text: str) -> None:
        message = self._of_assistant()
        message["content"] = text if message["content"] is None else f"{message['content']}\n{text}"

    def reasoning(self, text: str) -> None:
        message = self._of_assistant()
        before = message.get("reasoning_content")
        message["reasoning_content"] = text if before is None else f"{before}\n{text}"

    def tool_call(self, call_id: str, name: str, arguments: str) -> None:
        """Appends a call with its arguments as JSON."""
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._of_assistant().setdefault("tool_calls", []).append(call)

    @property
    def ends_with_assistant(self) -> bool:
        return self._assistant is not None

    def _of_assistant(self) -> Json:
        if self._assistant is None:
            self._append({"role": "assistant", "content": None})
            self._assistant = self.messages[-1]
        return self._assistant

    def _append(self, message: Json) -> None:
        self.messages.append(message)
        self._assistant = None


def compact_json(value: object) -> str:
    """Returns the JSON of a value, in the order of its keys."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
