"""The interface of a part, and of the sink for the calls that parts find."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, ClassVar

from penstock.errors import InvalidInput
from router.parsers.tools import ToolFunction

MAX_HELD = 1 << 16  # characters that a parser holds before it knows what they are


class Step(Enum):
    """A part's decision about a character."""

    MORE = auto()  # it belongs to the part, which continues
    DONE = auto()  # it is the part's last character
    DONE_BEFORE = auto()  # it comes after the part's end
    FAILED = auto()  # it does not fit the format
    TO_TEXT = auto()  # it ends a header, and text of the answer follows
    TO_REASONING = auto()  # it ends a header, and reasoning follows


class CallSink(ABC):
    """Takes the calls that parts find."""

    name: str  # the tool of the next call, set by the part that reads it
    tools: Mapping[str, ToolFunction]  # the request's tools, by name

    @abstractmethod
    def types_of(self, key: str) -> frozenset[str]:
        """Returns the JSON types of a parameter of the tool `name`; empty if its schema gives none."""

    @abstractmethod
    def begin_next(self) -> None:
        """Notes that another call of the same body may begin here."""

    @abstractmethod
    def start(self) -> None:
        """Begins a call of the tool `name`."""

    @abstractmethod
    def arguments(self, text: str) -> None:
        """Adds text to the arguments of the open call. Empty text marks the last character as part of the call."""

    @abstractmethod
    def end(self) -> None:
        """Ends the open call, whose arguments are complete."""


class Stateful:
    """An object whose state is the attributes that `FIELDS` names, each of them a JSON value or Stateful."""

    FIELDS: ClassVar[tuple[str, ...]] = ()

    def state(self) -> dict[str, Any]:
        """Returns the state as a JSON-able dictionary."""
        values = {name: getattr(self, name) for name in self.FIELDS}
        return {name: value.state() if isinstance(value, Stateful) else value for name, value in values.items()}

    def load(self, state: object) -> None:
        """Continues from what `state` returned. Raises InvalidInput for anything else."""
        if not isinstance(state, dict) or state.keys() != set(self.FIELDS):
            raise InvalidInput(
                "parser_state", f"must have the fields {sorted(self.FIELDS)}; send what state() returned"
            )
        for name in self.FIELDS:
            own, value = getattr(self, name), state[name]
            if isinstance(own, Stateful):
                own.load(value)
            elif type(own) is not type(value):
                problem = f"{name} is a {type(value).__name__}, not a {type(own).__name__}; send what state() returned"
                raise InvalidInput("parser_state", problem)
            else:
                setattr(self, name, value)


class TextBuffer(Stateful):
    """Text that grows by characters, at a constant cost for each."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self.size = 0

    def add(self, text: str) -> None:
        """Adds text."""
        self._pieces.append(text)
        self.size += len(text)

    def take(self) -> str:
        """Returns the text and empties the buffer."""
        text = "".join(self._pieces)
        self._pieces.clear()
        self.size = 0
        return text

    def state(self) -> dict[str, Any]:
        text = self.take()
        self.add(text)
        return {"text": text}

    def load(self, state: object) -> None:
        if not isinstance(state, dict) or not isinstance(state.get("text"), str):
            raise InvalidInput("parser_state", "lacks a text; send what state() returned")
        self.take()
        self.add(state["text"])


class Part(Stateful, ABC):
    """A piece of the syntax of a call. Each call gets new parts."""

    @abstractmethod
    def step(self, char: str, sink: CallSink) -> Step:
        """Processes the next character."""

    def skip(self, text: str, start: int, sink: CallSink) -> int:
        """Processes as many characters of `text` from `start` on as it can at once; returns the position after them.

        Only faster than single steps; the result is the same.
        """
        return start

    def cut_off(self, sink: CallSink) -> None:
        """Passes on what the part holds of an open call, because the text ends here."""

    def fail(self, sink: CallSink) -> None:
        """Passes on what the part holds of an open call, because the text does not fit the format; may end the call."""
        self.cut_off(sink)
