"""Builds the output items of a response (messages, reasoning, function calls) and the events of each."""

from __future__ import annotations

import abc
import uuid
from typing import ClassVar

from pydantic_core import from_json

from router.api.dialect import Json
from router.api.translation.sealed import seal
from router.api.translation.turns import ChatTurns

Events = list[tuple[str, Json]]  # type and fields of each event


class OutputItem(abc.ABC):
    """An output item that grows. Its events go from `output_item.added` to `output_item.done`."""

    _prefix: ClassVar[str]

    def __init__(self) -> None:
        self.id = f"{self._prefix}_{uuid.uuid4().hex[:24]}"
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @abc.abstractmethod
    def whole(self, is_complete: bool) -> Json:
        """Returns the item with everything that it contains so far."""

    @abc.abstractmethod
    def opening(self) -> Events:
        """Returns the events that begin the item."""

    @abc.abstractmethod
    def closing(self, is_complete: bool) -> Events:
        """Returns the events that end the item."""

    @abc.abstractmethod
    def add_to(self, turns: ChatTurns, is_complete: bool) -> None:
        """Appends the item to the conversation that a later call continues with."""

    def grow(self, text: str) -> tuple[str, Json]:
        """Appends text and returns the event for it."""
        self._pieces.append(text)
        return self._delta(text)

    @abc.abstractmethod
    def _delta(self, text: str) -> tuple[str, Json]: ...

    def _done(self, is_complete: bool) -> tuple[str, Json]:
        return "response.output_item.done", {"item": self.whole(is_complete)}


class _PartItem(OutputItem):
    """An item whose only content part is its text."""

    _events: ClassVar[str]  # prefix of its events' types
    _more: ClassVar[Json] = {}  # further fields of these events

    @abc.abstractmethod
    def _part(self, text: str) -> Json: ...

    @abc.abstractmethod
    def _started(self) -> Json: ...

    def opening(self) -> Events:
        return [
            ("response.output_item.added", {"item": self._started()}),
            ("response.content_part.added", {**self._place, "part": self._part("")}),
        ]

    def closing(self, is_complete: bool) -> Events:
        text = self.text
        return [
            (f"{self._events}.done", {**self._place, "text": text, **self._more}),
            ("response.content_part.done", {**self._place, "part": self._part(text)}),
            self._done(is_complete),
        ]

    def _delta(self, text: str) -> tuple[str, Json]:
        return f"{self._events}.delta", {**self._place, "delta": text, **self._more}

    @property
    def _place(self) -> Json:
        return {"item_id": self.id, "content_index": 0}


class MessageItem(_PartItem):
    """A run of text."""

    _prefix = "msg"
    _events = "response.output_text"
    _more: ClassVar[Json] = {"logprobs": []}

    def whole(self, is_complete: bool) -> Json:
        status = "completed" if is_complete else "incomplete"
        return self._started() | {"status": status, "content": [self._part(self.text)]}

    def add_to(self, turns: ChatTurns, is_complete: bool) -> None:
        turns.assistant_text(self.text)

    def _started(self) -> Json:
        return {"id": self.id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}

    def _part(self, text: str) -> Json:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class ReasoningItem(_PartItem):
    """A run of reasoning."""

    _prefix = "rs"
    _events = "response.reasoning_text"

    def __init__(self, is_sealed: bool) -> None:
        """`is_sealed` repeats the reasoning as an opaque string, for clients that keep only that."""
        super().__init__()
        self._is_sealed = is_sealed

    def whole(self, is_complete: bool) -> Json:
        text = self.text
        whole = self._started() | {"content": [self._part(text)]}
        return whole | {"encrypted_content": seal(text)} if self._is_sealed else whole

    def add_to(self, turns: ChatTurns, is_complete: bool) -> None:
        turns.reasoning(self.text)

    def _started(self) -> Json:
        return {"id": self.id, "type": "reasoning", "summary": [], "content": []}

    def _part(self, text: str) -> Json:
        return {"type": "reasoning_text", "text": text}


class FunctionCallItem(OutputItem):
    """A tool call."""

    _prefix = "fc"

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self._call_id = f"call_{uuid.uuid4().hex[:24]}"

    @property
    def has_whole_arguments(self) -> bool:
        """Returns whether the arguments are a JSON object, which is false if the output ended within them."""
        try:
            return isinstance(from_json(self.text), dict)
        except ValueError:
            return False

    def whole(self, is_complete: bool) -> Json:
        return self._with("completed" if is_complete else "incomplete", self.text)

    def opening(self) -> Events:
        return [("response.output_item.added", {"item": self._with("in_progress", "")})]

    def closing(self, is_complete: bool) -> Events:
        arguments = {"item_id": self.id, "name": self._name, "arguments": self.text}
        return [("response.function_call_arguments.done", arguments), self._done(is_complete)]

    def add_to(self, turns: ChatTurns, is_complete: bool) -> None:
        """Appends the call if it is complete; no tool can answer an incomplete one."""
        if is_complete:
            turns.tool_call(self._call_id, self._name, self.text)

    def _delta(self, text: str) -> tuple[str, Json]:
        return "response.function_call_arguments.delta", {"item_id": self.id, "delta": text}

    def _with(self, status: str, arguments: str) -> Json:
        ids = {"id": self.id, "type": "function_call", "call_id": self._call_id}
        return {**ids, "name": self._name, "arguments": arguments, "status": status}
