"""Composes parts: in sequence, repeated, or chosen by the first character."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.errors import InvalidInput
from router.parsers.parts.part import CallSink, Part, Stateful, Step

Parts = Callable[[], tuple[Part, ...]]  # makes the parts of one call
_SPACE = " \t\r\n"


class CallBody(Stateful):
    """Feeds the parts of one call in sequence."""

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self._parts = parts
        self._current = 0
        self.ended_before = False  # a part ended before the last character
        self.ended_at = False  # a part ended with the last character

    def step(self, char: str, sink: CallSink) -> Step:
        """Processes the next character. DONE and DONE_BEFORE refer to the whole call."""
        self.ended_before = self.ended_at = False
        while self._current < len(self._parts):
            step = self._parts[self._current].step(char, sink)
            if step not in (Step.DONE, Step.DONE_BEFORE):
                return step
            self._current += 1
            if step is Step.DONE:
                self.ended_at = True
                return Step.DONE if self._current == len(self._parts) else Step.MORE
            self.ended_before = True
        return Step.DONE_BEFORE

    def skip(self, text: str, start: int, sink: CallSink) -> int:
        """Processes as many characters as the current part takes at once; returns the position after them."""
        return self._parts[self._current].skip(text, start, sink)

    def cut_off(self, sink: CallSink) -> None:
        """Passes on what the current part holds of an open call that is cut off."""
        self._parts[self._current].cut_off(sink)

    def fail(self, sink: CallSink) -> None:
        """Passes on what the current part holds of an open call that does not fit its format."""
        self._parts[self._current].fail(sink)

    def state(self) -> dict[str, Any]:
        """Returns the state as a JSON-able dictionary."""
        return {"part": self._current, "state": self._parts[self._current].state()}

    def load(self, state: object) -> None:
        """Continues from what `state` returned. Raises InvalidInput for anything else."""
        current = state.get("part") if isinstance(state, dict) else None
        if not isinstance(state, dict) or not isinstance(current, int) or not 0 <= current < len(self._parts):
            raise InvalidInput("parser_state", f"has no part below {len(self._parts)}; send what state() returned")
        self._current = current
        self._parts[current].load(state.get("state"))


class Repeated(Part):
    """Calls between `opening` and `closing`, separated by `separator`.

    With `bare`, a single call may lack the opening and closing characters.
    """

    FIELDS = ("place", "alone", "item")

    def __init__(self, item: Parts, opening: str, separator: str, closing: str, *, bare: bool = False) -> None:
        self._make = item
        self._opening = opening
        self._separator = separator
        self._closing = closing
        self._bare = bare
        self.place = "open" if opening else "begin"
        self.alone = not opening
        self.item = CallBody(item())

    def step(self, char: str, sink: CallSink) -> Step:
        if self.place == "item":
            step = self.item.step(char, sink)
            if step is not Step.DONE:
                return step
            self.place, self.item = "after", CallBody(self._make())
            return Step.MORE
        if char in _SPACE:
            return Step.MORE
        if self.place == "open" and char == self._opening:
            self.place = "begin"
        elif self.place == "begin" or (self.place == "open" and self._bare):
            self.alone = self.alone or self.place == "open"
            self.place = "item"
            sink.begin_next()
            return self.item.step(char, sink)
        elif self.place == "after" and char == self._separator:
            self.place = "begin"
            sink.begin_next()
        elif self.place == "after" and self.alone:
            return Step.DONE_BEFORE
        elif self.place == "after" and char == self._closing:
            return Step.DONE
        else:
            return Step.FAILED
        return Step.MORE

    def skip(self, text: str, start: int, sink: CallSink) -> int:
        return self.item.skip(text, start, sink) if self.place == "item" else start

    def cut_off(self, sink: CallSink) -> None:
        if self.place == "item":
            self.item.cut_off(sink)

    def fail(self, sink: CallSink) -> None:
        if self.place == "item":
            self.item.fail(sink)


class Choice(Part):
    """Any of several bodies, chosen by the first character that is not white space; `""` is the default."""

    FIELDS = ("case",)

    def __init__(self, cases: Mapping[str, Parts]) -> None:
        self._cases = cases
        self.case = ""
        self._body: CallBody | None = None

    def step(self, char: str, sink: CallSink) -> Step:
        if self._body is None:
            if char in _SPACE:
                return Step.MORE
            self.case = char if char in self._cases else ""
            self._body = CallBody(self._cases[self.case]())
        return self._body.step(char, sink)

    def skip(self, text: str, start: int, sink: CallSink) -> int:
        return self._body.skip(text, start, sink) if self._body else start

    def cut_off(self, sink: CallSink) -> None:
        if self._body:
            self._body.cut_off(sink)

    def fail(self, sink: CallSink) -> None:
        if self._body:
            self._body.fail(sink)

    def state(self) -> dict[str, Any]:
        return {"case": self.case, "body": self._body.state() if self._body else None}

    def load(self, state: object) -> None:
        if not isinstance(state, dict) or state.keys() != {"case", "body"} or state["case"] not in {"", *self._cases}:
            raise InvalidInput("parser_state", "is of another format; restore it with its own choice")
        self.case, self._body = state["case"], None
        if state["body"] is not None:
            self._body = CallBody(self._cases[self.case]())
            self._body.load(state["body"])
