"""Translates Anthropic's system prompt and content blocks to the messages of a chat. Pure.

The messages depend only on the blocks' content. Cache markers, and header lines that agent clients change with every
request, leave no tokens, so each prompt of a conversation extends the one before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.errors import InvalidInput
from router.api.openai.json_bodies import shown
from router.api.translation.anthropic.fields import (
    HARMLESS_IN_BLOCKS,
    REFUSED_IN_TEXT,
    REFUSED_IN_TOOL_RESULTS,
    REFUSED_IN_TOOL_USE,
)
from router.api.translation.objects import JsonObject
from router.api.translation.sealed import unseal
from router.api.translation.turns import ChatTurns, compact_json

# Header lines that agent clients put at the beginning of a system block; their values change with every request.
_HEADER_LINES = re.compile(r"\A(?:x-anthropic-[a-z0-9-]+:[^\n]*(?:\n|\Z))+", re.IGNORECASE)
_ERROR = "Error: "


def read_system(system: Any, turns: ChatTurns) -> None:
    """Appends the system prompt, given as text or as blocks of text, as one message. Raises InvalidInput."""
    if system is None:
        return
    texts = [_HEADER_LINES.sub("", text) for text in _texts(system, "system")]
    if text := "\n".join(filter(None, texts)):
        turns.plain("system", text)


def read_messages(messages: Sequence[Any], turns: ChatTurns) -> None:
    """Appends the conversation. Raises InvalidInput that names the message and the block."""
    users = _UserTexts(turns)
    for number, value in enumerate(messages):
        message = JsonObject(value, f"messages[{number}]")
        role = message.choice("role", "user", "assistant", "system")
        content = message.any("content")
        if role is None or content is None:
            raise message.error("content" if role else "role", "is missing; add it")
        message.finish()
        path = f"messages[{number}].content"
        if role != "user":
            users.flush()
        if role == "user":
            _read_user(content, path, users)
        elif role == "assistant":
            _read_assistant(content, path, turns)
        else:
            turns.plain("system", "\n".join(_texts(content, path)))
    users.flush()


class _UserTexts:
    """Collects the texts of consecutive user messages, which become one message."""

    def __init__(self, turns: ChatTurns) -> None:
        self.turns = turns
        self.texts: list[str] = []

    def flush(self) -> None:
        if self.texts:
            self.turns.plain("user", "\n".join(self.texts))
            self.texts = []


def _read_user(content: Any, path: str, users: _UserTexts) -> None:
    if isinstance(content, str):
        users.texts.append(content)
        return
    for block, kind in _blocks(content, path):
        if kind == "text":
            users.texts.append(_text(block))
        elif kind == "tool_result":
            users.flush()
            users.turns.tool_result(block.needed_text("tool_use_id"), _result_text(block))
            block.finish(HARMLESS_IN_BLOCKS, REFUSED_IN_TOOL_RESULTS)
        else:
            raise block.error("type", f"= {shown(kind)} is not supported in a user message; send text or tool_result")


def _result_text(block: JsonObject) -> str:
    content = block.any("content")
    text = "" if content is None else "\n".join(_texts(content, f"{block.path}.content"))
    return f"{_ERROR}{text}" if block.flag("is_error") and not text.startswith(_ERROR) else text


def _read_assistant(content: Any, path: str, turns: ChatTurns) -> None:
    if isinstance(content, str):
        turns.assistant_text(content)
        return
    for block, kind in _blocks(content, path):
        if kind == "text":
            turns.assistant_text(_text(block))
        elif kind == "thinking":
            thinking, signature = block.needed_text("thinking"), block.text("signature")
            if text := thinking or unseal(signature or ""):
                turns.reasoning(text)
            block.finish(HARMLESS_IN_BLOCKS)
        elif kind == "tool_use":
            call_id, name = block.needed_text("id"), block.needed_text("name")
            turns.tool_call(call_id, name, compact_json(block.mapping("input") or {}))
            block.finish(HARMLESS_IN_BLOCKS, REFUSED_IN_TOOL_USE)
        else:
            problem = f"= {shown(kind)} is not supported in an assistant message; send text, thinking or tool_use"
            raise block.error("type", problem)


def _texts(content: Any, path: str) -> Iterator[str]:
    """Yields the string itself, or the texts of blocks. Raises InvalidInput if a block is not text."""
    if isinstance(content, str):
        yield content
        return
    for block, kind in _blocks(content, path):
        if kind != "text":
            raise block.error("type", f"= {shown(kind)} is not supported; send text")
        yield _text(block)


def _text(block: JsonObject) -> str:
    text = block.needed_text("text")
    block.finish(HARMLESS_IN_BLOCKS, REFUSED_IN_TEXT)
    return text


def _blocks(content: Any, path: str) -> Iterator[tuple[JsonObject, str]]:
    if not isinstance(content, list):
        raise InvalidInput(path, f"is {shown(content)}; give text or a list of blocks")
    for number, value in enumerate(content):
        block = JsonObject(value, f"{path}[{number}]")
        yield block, block.needed_text("type")
