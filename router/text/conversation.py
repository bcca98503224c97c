"""A conversation as chat templates take it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
# Variables that the renderer sets; the arguments of a conversation may not set them.
RESERVED_ARGUMENTS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and what else the template is rendered with.

    The arguments of tool calls and the parameters of tools are JSON texts: the template's own process parses them.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_arguments: str = ""  # a JSON object, or ""
    num_characters: int = 0  # of all texts, for accounts of work; at least those of the contents are counted

    @property
    def size(self) -> int:
        return max(self.num_characters, sum(len(message.get("content") or "") for message in self.messages))
