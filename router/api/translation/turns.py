"""Builds the messages of a chat from the smaller pieces that other dialects send: blocks and items. Pure.

All pieces that an assistant wrote in one turn (reasoning, text and tool calls) become one message, as chat templates
expect. A message depends only on its own turn, so earlier turns keep their tokens.
"""

from __future__ import annotations

import json

from router.api.dialect import Json


class ChatTurns:
    """Collects messages in the format of OpenAI's chats. Texts of one message are joined by line feeds."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self._assistant: Json | None = None  # the last message if it is the assistant's

    def extend(self, messages: list[Json]) -> None:
        """Appends messages that were built earlier."""
        self.messages.extend(messages)
        self._assistant = None

    def plain(self, role: str, text: str) -> None:
        """Appends a message of the role system, developer or user."""
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
        """Appends a tool call. `arguments` is JSON."""
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
    """Returns the JSON of a value without spaces, keeping the order of its keys."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
