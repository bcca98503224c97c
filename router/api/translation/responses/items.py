"""Translates the input items of the Responses API to the messages of a chat. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.errors import InvalidInput
from router.api.dialect import Json
from router.api.openai.json_bodies import shown
from router.api.translation.objects import JsonObject
from router.api.translation.responses.fields import HARMLESS_IN_ITEMS, HARMLESS_IN_PARTS, REFUSED_IN_CALLS
from router.api.translation.sealed import unseal
from router.api.translation.turns import ChatTurns, compact_json

_TEXT_PARTS = ("input_text", "output_text", "text")
_ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def read_items(items: Sequence[Any], turns: ChatTurns) -> None:
    """Appends a call's input items to the turns. Raises InvalidInput that names the item."""
    for number, value in enumerate(items):
        item = JsonObject(value, f"input[{number}]")
        kind = item.text("type") or "message"
        if kind == "message":
            _read_message(item, turns)
        elif kind == "reasoning":
            _read_reasoning(item, turns)
        elif kind == "function_call":
            turns.tool_call(item.needed_text("call_id"), item.needed_text("name"), item.needed_text("arguments"))
            item.finish(HARMLESS_IN_ITEMS, REFUSED_IN_CALLS)
        elif kind == "function_call_output":
            call_id, output = item.needed_text("call_id"), item.any("output")
            if output is None:
                raise item.error("output", "is missing; add it")
            turns.tool_result(call_id, "\n".join(_texts(output, f"{item.path}.output")))
            item.finish(HARMLESS_IN_ITEMS | {"name"}, REFUSED_IN_CALLS)
        else:
            raise item.error("type", f"= {shown(kind)} is not supported; send one of {', '.join(_ID_PREFIXES)}")


def listed_items(given: str | Sequence[Json]) -> list[tuple[str, str]]:
    """Returns a call's input items as the API lists them: the id and the JSON of each."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    listed = map(_listed, given)
    return [(str(item["id"]), compact_json(item)) for item in listed]


def _listed(item: Json) -> Json:
    kind = item.get("type") or "message"
    listed = {"id": f"{_ID_PREFIXES[kind]}_{uuid.uuid4().hex[:24]}", "type": kind, "status": "completed"}
    listed |= {name: value for name, value in item.items() if value is not None}
    if kind == "message" and isinstance(item["content"], str):
        part = "output_text" if item["role"] == "assistant" else "input_text"
        listed["content"] = [{"type": part, "text": item["content"]}]
    return listed


def _read_message(item: JsonObject, turns: ChatTurns) -> None:
    role = item.choice("role", "user", "assistant", "system", "developer")
    content = item.any("content")
    if role is None or content is None:
        raise item.error("content" if role else "role", "is missing; add it")
    text = "\n".join(_texts(content, f"{item.path}.content"))
    item.finish(HARMLESS_IN_ITEMS)
    if role == "assistant":
        turns.assistant_text(text)
    else:
        turns.plain(role, text)


def _read_reasoning(item: JsonObject, turns: ChatTurns) -> None:
    """Reads the reasoning from the content or else from the opaque form. Summaries are ignored: they are for people."""
    item.any("summary")
    content, sealed = item.values("content"), item.text("encrypted_content")
    text = "\n".join(_texts(content, f"{item.path}.content", "reasoning_text")) if content else None
    if text is None and sealed:
        text = unseal(sealed)
        if text is None:
            raise item.error("encrypted_content", "was not made by this service; leave the item out")
    item.finish(HARMLESS_IN_ITEMS)
    if text:
        turns.reasoning(text)


def _texts(content: Any, path: str, *more_kinds: str) -> Iterator[str]:
    """Yields the string itself, or the texts of parts. Raises InvalidInput if a part is not text."""
    if isinstance(content, str):
        yield content
        return
    if not isinstance(content, list):
        raise InvalidInput(path, f"is {shown(content)}; give text or a list of parts")
    for number, value in enumerate(content):
        part = JsonObject(value, f"{path}[{number}]")
        kind = part.needed_text("type")
        if kind == "refusal":
            yield part.needed_text("refusal")
        elif kind in (*_TEXT_PARTS, *more_kinds):
            yield part.needed_text("text")
        else:
            raise part.error("type", f"= {shown(kind)} is not supported; send text")
        part.finish(HARMLESS_IN_PARTS)
