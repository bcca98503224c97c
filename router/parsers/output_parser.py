"""The parser of one completion, which turns its text into events.

It processes one character at a time, so that the result does not depend on how the text was split. It holds back only
what it cannot classify yet: the beginning of a mark, line ends that may precede a mark, and the beginning of a call
before its name is known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

from penstock.errors import InvalidInput
from router.parsers.events import (
    ParserEvent,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from router.parsers.formats import CallMark, ReasoningFormat, ToolFormat
from router.parsers.parts.body import CallBody
from router.parsers.parts.part import MAX_HELD, CallSink, Stateful, Step, TextBuffer
from router.parsers.tools import ToolFunction

_MAX_WAITING = 256  # characters held back until the next ones show what they mean
_FIELDS = ("section", "held", "waiting", "first", "after", "wrote", "opened_by")


class OutputSection(StrEnum):
    """The kind of text at a position."""

    TEXT = "text"
    REASONING = "reasoning"


class EventSink(CallSink, Stateful):
    """Collects the events of one call of `feed`, and merges adjacent deltas of one kind."""

    FIELDS = ("name", "num_calls", "open", "settled")

    def __init__(self, tools: Mapping[str, ToolFunction]) -> None:
        self.tools = tools
        self.name = ""
        self.num_calls = 0
        self.open = False  # a call has begun and not ended
        self.settled = False  # a call of this body has ended, and no further one can have begun yet
        self.used = False  # the last step added to a call
        self.events: list[ParserEvent] = []
        self._types: dict[tuple[str, str], frozenset[str]] = {}  # parameter types looked up before, by tool and key
        self._parts: list[str] = []  # the texts of the delta being collected
        self._kind: type[TextDelta | ReasoningDelta | ToolArgumentsDelta] = TextDelta

    def types_of(self, key: str) -> frozenset[str]:
        tool = self.tools.get(self.name)
        if tool is None or not tool.has(key):
            return frozenset()
        found = self._types.get((self.name, key))
        if found is None:
            found = self._types[self.name, key] = tool.types_of(key)
        return found

    def add(self, kind: type[TextDelta | ReasoningDelta | ToolArgumentsDelta], text: str) -> None:
        """Adds text of the answer, the reasoning or the open call's arguments."""
        if not text:
            return
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._parts.append(text)

    def start(self) -> None:
        self._flush()
        self.events.append(ToolCallStart(self.num_calls, self.name))
        self.num_calls += 1
        self.open = self.used = True
        self.settled = False

    def begin_next(self) -> None:
        self.settled = False

    def arguments(self, text: str) -> None:
        self.add(ToolArgumentsDelta, text)
        self.used = True

    def end(self) -> None:
        self._flush()
        self.events.append(ToolCallEnd(self.num_calls - 1))
        self.open = False
        self.used = self.settled = True

    def take(self) -> list[ParserEvent]:
        """Returns the events since the last `take`."""
        self._flush()
        events, self.events = self.events, []
        return events

    def _flush(self) -> None:
        if not self._parts:
            return
        text = "".join(self._parts)
        self._parts.clear()
        if self._kind is ToolArgumentsDelta:
            self.events.append(ToolArgumentsDelta(self.num_calls - 1, text))
        elif self._kind is ReasoningDelta:
            self.events.append(ReasoningDelta(text))
        else:
            self.events.append(TextDelta(text))


class OutputParser:
    """Parses one completion, on one thread. `ParserChoice.make` makes it."""

    def __init__(
        self,
        tool_format: ToolFormat | None,
        reasoning_format: ReasoningFormat | None,
        tools: Sequence[ToolFunction] = (),
        *,
        starts_in_reasoning: bool = False,
    ) -> None:
        """Makes a parser for the start of a completion. Without tools, it does not look for calls."""
        self._tools = tool_format if tools else None
        self._reasoning = reasoning_format
        self._call_marks = _call_marks(self._tools, reasoning_format)
        self._ends = _ends(self._tools, reasoning_format)
        self._marks = {section: _marks(section, self._tools, reasoning_format) for section in OutputSection}
        self._output = EventSink({tool.name: tool for tool in tools})
        self._section = OutputSection.TEXT
        self._held = ""  # the beginning of a mark, if any
        self._waiting = ""  # line ends and marks before calls, whose meaning depends on what follows
        self._raw = TextBuffer()  # text of the current call that is not passed on yet
        self._first = True  # only white space came since the start or the end of the last call or reasoning
        self._after = False  # only line ends came since a call or reasoning began or ended
        self._wrote = False  # text of the answer was passed on
        self._opened_by = ""  # the mark that began the current call
        self._body: CallBody | None = None
        if starts_in_reasoning and reasoning_format:
            self._section, self._after = OutputSection.REASONING, True

    def feed(self, text: str) -> list[ParserEvent]:
        """Parses new text and returns its events."""
        at = 0
        while at < len(text):
            end = self._skip(text, at)
            if end == at:
                self._step(text[at])
                end += 1
            at = end
        return self._output.take()

    def finish(self) -> list[ParserEvent]:
        """Ends the completion and returns the last events. A call that is cut off gets no ToolCallEnd."""
        if self._body is not None:
            self._body.cut_off(self._output)
            if not self._output.open and not self._output.settled:
                self._to_plain(self._raw.take())
            self._close()
        for char in self._held:
            self._plain(char)
        self._held = ""
        self._release(last=True)
        return self._output.take()

    def state(self) -> dict[str, Any]:
        """Returns the state for `ParserChoice.restore`, as JSON-able data. To be called between calls of `feed`."""
        return {
            **{name: getattr(self, f"_{name}") for name in _FIELDS},
            "raw": self._raw.state(),
            "output": self._output.state(),
            "body": self._body.state() if self._body else None,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continues from the `state` of a parser of the same choice. Raises InvalidInput for anything else."""
        if state.keys() != {*_FIELDS, "raw", "output", "body"}:
            raise InvalidInput("parser_state", "lacks the fields of a parser; send what state() returned")
        for name in _FIELDS:
            own, value = getattr(self, f"_{name}"), state[name]
            if not isinstance(value, bool if isinstance(own, bool) else str):
                raise InvalidInput("parser_state", f"{name} is a {type(value).__name__}; send what state() returned")
        if state["section"] not in list(OutputSection):
            raise InvalidInput("parser_state", "names no section; send what state() returned")
        self._section = OutputSection(state["section"])
        self._held, self._waiting = state["held"], state["waiting"]
        self._raw.load(state["raw"])
        self._first, self._after, self._wrote = state["first"], state["after"], state["wrote"]
        self._opened_by = state["opened_by"]
        self._output.load(state["output"])
        self._body = None
        if state["body"] is not None:
            if self._opened_by not in self._call_marks:
                raise InvalidInput("parser_state", "names a mark of another format; restore it with its own choice")
            self._body = CallBody(self._call_marks[self._opened_by].parts())
            self._body.load(state["body"])

    def _skip(self, text: str, at: int) -> int:
        """Passes on the characters from `at` on that cannot begin a mark; returns the position after them."""
        if self._body is not None:
            return self._body.skip(text, at, self._output) if self._output.open else at
        if self._held or self._waiting or self._first or self._after:
            return at
        match = self._marks[self._section].plain.match(text, at)
        if not match:
            return at
        self._output.add(self._kind, match[0])
        return match.end()

    def _step(self, char: str) -> None:
        if self._body is not None:
            self._in_call(self._body, char)
        else:
            self._outside(char)

    def _outside(self, char: str) -> None:
        """Processes a character outside calls, which may belong to a mark."""
        held, self._held = self._held + char, ""
        marks = self._marks[self._section]
        while held and held not in marks.beginnings:
            mark = next((held[:size] for size in range(len(held), 0, -1) if held[:size] in marks.whole), None)
            if mark is not None:
                self._mark(mark)
                for each in held[len(mark) :]:
                    self._step(each)
                return
            self._plain(held[0])
            held = held[1:]
        self._held = held

    def _plain(self, char: str) -> None:
        """Processes a character that belongs to no mark."""
        if char == "\n":
            self._wait(char)
            return
        self._release()
        self._output.add(self._kind, char)
        self._wrote = self._wrote or self._section is OutputSection.TEXT
        self._after = False
        self._first = self._first and char.isspace()

    def _wait(self, text: str) -> None:
        self._waiting += text
        if len(self._waiting) > _MAX_WAITING:
            self._release()

    def _release(self, *, last: bool = False) -> None:
        """Passes on the waiting text, since no call follows it.

        Drops line ends next to a call or reasoning, unless there is text on both sides.
        """
        waiting, self._waiting = self._waiting, ""
        if self._after and (last or not self._wrote or self._section is OutputSection.REASONING):
            waiting = waiting.lstrip("\n")
        if waiting:
            self._output.add(self._kind, waiting)
            self._wrote = self._wrote or self._section is OutputSection.TEXT
            self._after = False
            self._first = self._first and waiting.isspace()

    def _to_plain(self, text: str) -> None:
        """Passes on, as plain text, the waiting text and then text that turned out to be no call."""
        self._wait(text)
        self._release()

    def _mark(self, mark: str) -> None:
        call_mark = self._call_marks.get(mark)
        tools, reasoning = self._tools, self._reasoning
        if call_mark and (not call_mark.only_first or (self._first and self._section is OutputSection.TEXT)):
            self._begin(mark, call_mark)
        elif tools and mark in tools.before:
            self._wait(mark)
        elif mark in self._ends or (
            reasoning and self._section is OutputSection.REASONING and mark in reasoning.closings
        ):
            self._close()
        elif reasoning and self._section is OutputSection.TEXT and mark == reasoning.opening and self._first:
            self._close()
            self._section = OutputSection.REASONING
        elif self._after and (mark in self._closing_marks or (reasoning and mark == reasoning.opening)):
            self._waiting = ""
        else:
            for char in mark:
                self._plain(char)

    @property
    def _closing_marks(self) -> frozenset[str]:
        return self._tools.after if self._tools else frozenset()

    def _begin(self, mark: str, call_mark: CallMark) -> None:
        self._opened_by = mark
        self._body = body = CallBody(call_mark.parts())
        self._output.settled = False
        if not call_mark.is_part:
            self._raw.add(mark)
            return
        for char in mark:
            self._in_call(body, char)

    def _in_call(self, body: CallBody, char: str) -> None:
        """Processes a character of a call, or the first one after it."""
        output = self._output
        output.used = False
        step = body.step(char, output)
        if step is Step.FAILED:
            self._fail(body)
            self._outside(char)
            return
        if output.used or (output.settled and body.ended_before):
            self._raw.take()
        if output.used:
            self._waiting = ""
        elif not (output.settled and body.ended_at):
            self._raw.add(char)
        if step in (Step.TO_TEXT, Step.TO_REASONING):
            self._close()
            self._section = (
                OutputSection.REASONING if step is Step.TO_REASONING and self._reasoning else OutputSection.TEXT
            )
        elif step is Step.DONE:
            self._close()
        elif step is Step.DONE_BEFORE:
            self._close()
            self._outside(char)
        elif self._raw.size > MAX_HELD:
            self._fail(body)

    def _fail(self, body: CallBody) -> None:
        """Gives up on a call that does not fit its format: what was not passed on becomes text."""
        body.fail(self._output)
        raw, settled = self._raw.take(), self._output.settled
        if settled or self._output.open:
            self._close()
        self._output.open = False
        self._body = None
        if raw:
            self._to_plain(raw)

    def _close(self) -> None:
        """Ends a call or reasoning, after which text follows."""
        self._body = None
        self._output.open = False
        self._raw.take()
        self._waiting = ""
        self._section = OutputSection.TEXT
        self._first = self._after = True

    @property
    def _kind(self) -> type[TextDelta | ReasoningDelta]:
        return ReasoningDelta if self._section is OutputSection.REASONING else TextDelta


@dataclass(frozen=True, slots=True)
class MarkSet:
    """The marks that count in a section."""

    whole: frozenset[str]
    beginnings: frozenset[str]  # all proper prefixes of the marks
    plain: re.Pattern[str]  # matches text without line ends in which no mark begins


def _call_marks(tools: ToolFormat | None, reasoning: ReasoningFormat | None) -> dict[str, CallMark]:
    return {**(reasoning.headers if reasoning else {}), **(tools.calls if tools else {})}


def _ends(tools: ToolFormat | None, reasoning: ReasoningFormat | None) -> frozenset[str]:
    return (tools.ends if tools else frozenset()) | (reasoning.ends if reasoning else frozenset())


@lru_cache(maxsize=256)
def _mark_set(marks: frozenset[str]) -> MarkSet:
    beginnings = frozenset(mark[:size] for mark in marks for size in range(1, len(mark)))
    first = "".join(sorted({re.escape(mark[0]) for mark in marks}))
    return MarkSet(marks, beginnings, re.compile(rf"[^\n{first}]+"))


def _marks(section: OutputSection, tools: ToolFormat | None, reasoning: ReasoningFormat | None) -> MarkSet:
    marks: set[str] = set(_ends(tools, reasoning))
    if reasoning:
        marks |= {*reasoning.headers, reasoning.opening} - {""}
        if section is OutputSection.REASONING:
            marks |= {*reasoning.closings}
    if tools and (section is OutputSection.TEXT or tools.ends_reasoning):
        marks |= {*tools.calls, *tools.before}
    if tools and section is OutputSection.TEXT:
        marks |= tools.after
    return _mark_set(frozenset(marks))
