"""Reads `tool_choice`: which tools an answer may or must call. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import InvalidInput
from router.api.openai.json_bodies import shown
from router.parsers.tools import ToolFunction


def read_tool_choice(choice: object, tools: Sequence[ToolFunction]) -> str:
    """Returns "auto", "none", "required" or the name of the tool to call. Raises InvalidInput."""
    if choice is None:
        return "auto"
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise InvalidInput("tool_choice", f"is {shown(choice)}; give auto, none, required or a function")
        if choice == "required" and not tools:
            raise InvalidInput("tool_choice", "is 'required', but there are no tools; add tools")
        return choice
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidInput(
            "tool_choice", f'is {shown(choice)}; give auto, none, required, or {{"type": "function", "function": ...}}'
        )
    if name in ("auto", "none", "required"):
        raise InvalidInput("tool_choice", f"names the tool {name!r}, a reserved name; rename the tool")
    if all(tool.name != name for tool in tools):
        raise InvalidInput("tool_choice", f"names {name[:100]!r}, which is not among the tools; add it to tools")
    return name
