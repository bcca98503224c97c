"""One call that is being parsed: its parts, one after another."""

from __future__ import annotations

from typing import Any

from penstock.errors import InvalidInput
from router.parsers.parts.part import CallSink, Part, Step


class CallBody:
    """Feeds the parts of one call, in order."""

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self._parts = parts
        self._current = 0
        self.ended_before = False  # a part ended before the last character
        self.ended_at = False  # a part ended with the last character

    def step(self, char: str, sink: CallSink) -> Step:
        """Takes the next character. DONE or DONE_BEFORE is said of the call as a whole."""
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
        """Takes as many characters as the current part takes at once; returns where it stopped."""
        return self._parts[self._current].skip(text, start, sink)

    def cut_off(self, sink: CallSink) -> None:
        """Passes on what the current part keeps of an open call."""
        self._parts[self._current].cut_off(sink)

    def fail(self, sink: CallSink) -> None:
        """Passes on what the current part keeps of an open call that goes wrong."""
        self._parts[self._current].fail(sink)

    def state(self) -> dict[str, Any]:
        """Returns the state as a JSON-able dictionary."""
        return {"part": self._current, "state": self._parts[self._current].state()}

    def load(self, state: object) -> None:
        """Takes over what `state` returned. Raises InvalidInput if it is not such a state."""
        current = state.get("part") if isinstance(state, dict) else None
        if not isinstance(state, dict) or not isinstance(current, int) or not 0 <= current < len(self._parts):
            raise InvalidInput("parser_state", f"has no part below {len(self._parts)}; send what state() returned")
        self._current = current
        self._parts[current].load(state.get("state"))
