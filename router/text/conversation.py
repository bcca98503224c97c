"""A conversation in the form that chat templates expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
# Variables that the renderer sets, and that `template_arguments` must not.
RESERVED_ARGUMENTS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages and the other variables that a template is rendered with.

    The arguments of tool calls and the parameters of tools are JSON texts, which the template's own process parses.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_arguments: str = ""  # a JSON object, or ""
    num_characters: int = 0  # of all texts, if known

    @property
    def size(self) -> int:
        """The characters that count as work: those of all texts, but at least those of the messages' contents."""
        return max(self.num_characters, sum(len(message.get("content") or "") for message in self.messages))
