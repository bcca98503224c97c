"""Converts arguments in tags of keys and values to a JSON object, by the types in the tool's schema."""

from __future__ import annotations

import json
import re

from router.parsers.parts.json_text import escaped
from router.parsers.parts.part import CallSink, Part, Step, TextBuffer
from router.parsers.parts.plain import MAX_NAME
from router.parsers.tools import json_type

_MAX_VALUE = 1 << 18  # characters of a value that is no string; a longer one becomes a string


class TaggedArguments(Part):
    """`<key tag>KEY</key tag><value tag>VALUE</value tag>...` up to `end`.

    Strings are streamed. A value of another type is held until it is complete, and becomes a string unless it is valid
    JSON of a type that the schema allows. A value without a type is a string, or with `untyped_json` any valid JSON.
    With `trim`, one line end after the opening tag and one before the closing tag are not part of the value.
    """

    FIELDS = ("place", "held", "key", "value", "started", "streams", "empty")

    def __init__(
        self,
        key_tags: tuple[str, str],
        value_tags: tuple[str, str],
        end: str,
        *,
        trim: bool = False,
        untyped_json: bool = False,
    ) -> None:
        self._key_open, self._key_close = key_tags
        self._value_open, value_close = value_tags
        self._closings = (value_close, "\n" + value_close) if trim else (value_close,)
        self._end = end
        self._trim = trim
        self._untyped_json = untyped_json
        first = "".join({re.escape(closing[0]) for closing in self._closings})
        self._plain = re.compile(f"[^{first}]+")
        self.place = "between"
        self.held = ""  # the beginning of a tag
        self.key = ""
        self.value = TextBuffer()  # the text so far of a value that is no string
        self.started = False
        self.streams = False  # the value is a string
        self.empty = True  # no character of the value has come yet

    def step(self, char: str, sink: CallSink) -> Step:
        if self.place == "value":
            return self._in_value(char, sink)
        if self.place == "key":
            return self._in_key(char, sink)
        if not self.held and char in " \t\r\n":
            return Step.MORE
        self.held += char
        if self.place == "value_open":
            if self.held == self._value_open:
                self._open_value(sink)
            return Step.MORE if self._value_open.startswith(self.held) or not self.held else Step.FAILED
        if self.held == self._key_open:
            self.held, self.key, self.place = "", "", "key"
        elif self.held == self._end:
            if not self.started:
                self._start(sink)
            self._finish(sink)
            return Step.DONE
        elif not self._key_open.startswith(self.held) and not self._end.startswith(self.held):
            return Step.FAILED
        return Step.MORE

    def skip(self, text: str, start: int, sink: CallSink) -> int:
        if self.place != "value" or self.held or self.empty or not self.streams:
            return start
        match = self._plain.match(text, start)
        if not match:
            return start
        sink.arguments(escaped(match[0]))
        return match.end()

    def cut_off(self, sink: CallSink) -> None:
        if self.place == "value":
            sink.arguments(escaped(self.held) if self.streams else self.value.take() + self.held)

    def fail(self, sink: CallSink) -> None:
        if self.started and self.place != "value":
            self._finish(sink)

    def _start(self, sink: CallSink) -> None:
        self.started = True
        sink.start()
        sink.arguments("{")

    def _finish(self, sink: CallSink) -> None:
        sink.arguments("}")
        sink.end()

    def _in_key(self, char: str, sink: CallSink) -> Step:
        self.key += char
        _, opened, rest = self.key.partition(self._key_close[0])
        if len(self.key) > MAX_NAME or char == "\n" or not self._key_close.startswith(opened + rest):
            return Step.FAILED
        if self.key.endswith(self._key_close):
            self.key = self.key[: -len(self._key_close)].strip()
            self.place = "value_open"
            if not self._value_open:
                self._open_value(sink)
        return Step.MORE

    def _open_value(self, sink: CallSink) -> None:
        types = sink.types_of(self.key)
        self.streams = types == {"string"} or (not types and not self._untyped_json)
        self.place, self.held, self.empty = "value", "", True
        if self.started:
            sink.arguments(", ")
        else:
            self._start(sink)
        sink.arguments(json.dumps(self.key, ensure_ascii=False) + ": " + ('"' if self.streams else ""))

    def _in_value(self, char: str, sink: CallSink) -> Step:
        held = self.held + char
        while held:
            if held in self._closings:
                sink.arguments('"' if self.streams else _as_json(self.value.take(), sink.types_of(self.key)))
                self.place, held = "between", ""
            elif any(closing.startswith(held) for closing in self._closings):
                break
            else:
                self._add(held[0], sink)
                held = held[1:]
        self.held = held
        sink.arguments("")  # marks what is held as part of the call
        return Step.MORE

    def _add(self, char: str, sink: CallSink) -> None:
        leading, self.empty = self.empty, False
        if leading and self._trim and char == "\n":
            return
        if self.streams:
            sink.arguments(escaped(char))
            return
        self.value.add(char)
        if self.value.size > _MAX_VALUE:
            self.streams = True
            sink.arguments('"' + escaped(self.value.take()))


def _as_json(text: str, types: frozenset[str]) -> str:
    """Returns the text of a value as JSON of one of `types` (of any type if empty), else as a JSON string."""
    literal = text.strip()
    if literal in ("True", "False"):
        literal = literal.lower()
    elif literal == "None":
        literal = "null"
    try:
        value = json.loads(literal, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = json_type(value)
    fits = not types or kind in types or (kind == "null" and "string" not in types)
    if fits or (kind == "number" and "integer" in types and float(value).is_integer()):
        return literal
    return json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> object:
    raise ValueError(name)
