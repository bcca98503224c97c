"""Renders conversations to prompt text with a model's chat template.

The template comes with the checkpoint and is not trusted: it runs in `router.text.template_sandbox`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import msgpack
from jinja2.meta import TrackingCodeGenerator

from penstock.errors import CheckpointError, InternalError, InvalidInput
from router.text.conversation import Conversation
from router.text.frames import read_frame, write_frame
from router.text.sandbox_process import clean_up_sandbox, start_sandbox
from router.text.template_functions import compile_template, template_environment
from router.text.template_sandbox import INVALID, RENDERED, TOOL_TEMPLATE


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Limits of one rendering. A conversation of a million tokens stays well below each of them."""

    max_s: float = 2.0
    max_characters: int = 16 << 20
    max_memory_bytes: int = 512 << 20


class ChatTemplate:
    """A template that is rendered in a process of its own, which ends when a rendering exceeds its time limit.

    Owns that process, starts it with the first rendering, and starts it again after it has ended. For one thread.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        origin: str,
        limits: TemplateLimits | None = None,
        tool_source: str = "",
    ) -> None:
        """`special_tokens` (bos_token, eos_token ...) are variables of the template.

        `tool_source` is the template for conversations with tools, if the model has a separate one. Raises
        CheckpointError.
        """
        try:
            for text in filter(None, (source, tool_source)):
                compile_template(text)
        except jinja2.TemplateSyntaxError as error:
            problem = f"{origin}: line {error.lineno} of the chat template: {error.message}; correct the template"
            raise CheckpointError(problem) from error
        self.source = source + tool_source  # its marks show which formats the model writes
        self.takes_tools = "tools" in _variables(tool_source or source)
        self._limits = limits or TemplateLimits()
        self._start_frame = msgpack.packb(
            {
                "source": source,
                TOOL_TEMPLATE: tool_source,
                "special_tokens": dict(special_tokens),
                "max_s": self._limits.max_s,
                "max_characters": self._limits.max_characters,
                "max_memory_bytes": self._limits.max_memory_bytes,
            }
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._in_use = threading.Lock()

    def render(self, conversation: Conversation | Sequence[Mapping[str, Any]]) -> str:
        """Returns the prompt of a conversation, or of messages alone. Blocks no longer than the limits allow.

        Raises InvalidInput if the template refuses the messages or exceeds its limits with them.
        """
        if not isinstance(conversation, Conversation):
            conversation = Conversation(conversation)
        frame = msgpack.packb(
            {
                "messages": [dict(message) for message in conversation.messages],
                "tools": list(conversation.tools),
                "add_generation_prompt": conversation.add_generation_prompt,
                "continue_final_message": conversation.continue_final_message,
                "template_arguments": conversation.template_arguments,
            }
        )
        with self._in_use:
            return self._render(frame)

    def _render(self, frame: bytes) -> str:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_frame(process.stdin, frame)
            answer = read_frame(process.stdout)
        except BrokenPipeError:
            answer = None
        if answer is None:
            raise self._clean_up(process)
        text = answer[1:].decode()
        if answer[:1] == RENDERED:
            return text
        if answer[:1] == INVALID:
            raise InvalidInput(*text.split("\n", 1))
        raise InvalidInput("messages", f"the model's chat template refuses them: {text}")

    def start(self) -> subprocess.Popen[bytes]:
        """Returns the process; starts it if there is none."""
        with self._in_use:
            return self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise InternalError("the router is stopping")
        if self._process is None:
            self._process = start_sandbox("router.text.template_sandbox")
            assert self._process.stdin is not None
            write_frame(self._process.stdin, self._start_frame)
        return self._process

    def close(self) -> None:
        """Ends the process, even in the middle of a rendering. May be called from any thread."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._in_use:  # soon free, since a rendering ends with the process
            if self._process is not None:
                self._process.kill()
                self._clean_up(self._process)

    def _clean_up(self, process: subprocess.Popen[bytes]) -> InvalidInput | InternalError:
        """Waits for a process that ends, and returns the error that says why it ended."""
        self._process = None
        status = clean_up_sandbox(process)
        if status == -signal.SIGALRM:
            problem = f"the model's chat template took more than {self._limits.max_s:g} s for them; shorten them"
            return InvalidInput("messages", problem)
        return InternalError(f"the chat template's process ended with status {status}")


class _NameTracker(TrackingCodeGenerator):
    """Finds names without evaluating constant expressions, whose values may be of any size."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.optimizer = None


def _variables(source: str) -> set[str]:
    """Returns the variables that a template expects to be given. Does not run any of the template."""
    environment = template_environment()
    tracker = _NameTracker(environment)
    tracker.visit(environment.parse(source))
    return tracker.undeclared_identifiers


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """Reads the template from chat_template.jinja, else tokenizer_config.json; returns None if there is none.

    Raises CheckpointError.
    """
    config = read_json(folder / "tokenizer_config.json")
    special = {
        name: value["content"] if isinstance(value, dict) else value
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if (value := config.get(name)) is not None
    }
    path, tool_path = folder / "chat_template.jinja", folder / "additional_chat_templates" / "tool_use.jinja"
    if path.is_file():
        tool_source = tool_path.read_text(encoding="utf-8") if tool_path.is_file() else ""
        return ChatTemplate(path.read_text(encoding="utf-8"), special, str(path), tool_source=tool_source)
    source, tool_source = config.get("chat_template"), ""
    if isinstance(source, list):  # several templates, by name
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default", next(iter(named.values()), None))
        tool_source = named.get("tool_use", "")
    origin = str(folder / "tokenizer_config.json")
    return ChatTemplate(source, special, origin, tool_source=tool_source) if source else None


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; an empty one if there is no file. Raises CheckpointError for anything else."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}; copy the file again from the model's source") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds {type(value).__name__}, not an object; copy it again")
    return value
