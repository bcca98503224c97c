"""A call written as one JSON object with the tool's name and its arguments."""

from __future__ import annotations

from router.parsers.parts.json_text import ObjectScanner, StringReader
from router.parsers.parts.part import MAX_HELD, CallSink, Part, Step, TextBuffer
from router.parsers.parts.plain import MAX_NAME, NAME

_SPACE = " \t\r\n"
_IGNORED = ("id", "type")  # keys that models write next to the name
_NULL = "null"


class Envelope(Part):
    """`{"name": ..., "arguments": {...}}`, with the keys in any order.

    Arguments before the name are held until the name comes. Arguments in a string are unescaped; missing ones become
    `{}`. With `known_only`, an object fails unless it names a tool of the request.
    """

    FIELDS = ("place", "key", "name", "early", "started", "ended", "scanner", "reader", "word")

    def __init__(self, *, arguments: tuple[str, ...] = ("arguments", "parameters"), known_only: bool = False) -> None:
        self._arguments = arguments
        self._known_only = known_only
        self.place = "open"
        self.key = ""
        self.name = ""
        self.early = TextBuffer()  # arguments that came before the name
        self.started = False
        self.ended = False
        self.scanner = ObjectScanner()
        self.reader = StringReader()
        self.word = ""  # the text so far of a string or a bare word

    def step(self, char: str, sink: CallSink) -> Step:
        if self.place in ("key", "string"):
            return self._in_string(char, sink)
        if self.place == "object":
            return self._in_object(char, sink)
        if self.place in ("quoted", "closing"):
            return self._in_quoted_object(char, sink)
        if self.place == "bare":
            return self._in_bare(char, sink)
        if char in _SPACE:
            return Step.MORE
        return self._between(char, sink)

    def skip(self, text: str, start: int, sink: CallSink) -> int:
        if self.place != "object" or not self.started:
            return start
        end = self.scanner.skip(text, start)
        if end > start:
            sink.arguments(text[start:end])
        return end

    def cut_off(self, sink: CallSink) -> None:
        if self.place == "quoted" and self.started and (rest := self.reader.rest()):
            sink.arguments(rest)

    def _between(self, char: str, sink: CallSink) -> Step:
        if self.place == "open" and char == "{":
            self.place = "first"
        elif self.place in ("first", "next") and char == '"':
            self.place, self.word, self.reader = "key", "", StringReader()
        elif self.place == "colon" and char == ":":
            self.place = "value"
        elif self.place == "value":
            return self._value(char, sink)
        elif self.place == "comma" and char == ",":
            self.place = "next"
        elif self.place in ("comma", "first") and char == "}":
            return self._close(sink)
        else:
            return Step.FAILED
        return Step.MORE

    def _in_string(self, char: str, sink: CallSink) -> Step:
        """Processes a character of a key or of a string value."""
        self.word += self.reader.step(char)
        if not self.reader.ended:
            return Step.MORE if len(self.word) <= MAX_NAME else Step.FAILED
        if self.place == "key":
            self.key, self.place = self.word, "colon"
            known = self.key == "name" or self.key in self._arguments or self.key in _IGNORED
            return Step.MORE if known else Step.FAILED
        self.place = "comma"
        if self.key in _IGNORED:
            return Step.MORE
        if self.name or not NAME.fullmatch(self.word) or (self._known_only and self.word not in sink.tools):
            return Step.FAILED
        self.name = sink.name = self.word
        if self.early.size:
            self._start(sink)
            sink.arguments(self.early.take())
            self._end(sink)
        return Step.MORE

    def _value(self, char: str, sink: CallSink) -> Step:
        if self.key in self._arguments:
            if self.ended or self.early.size:
                return Step.FAILED
            if char == "{":
                self.place = "object"
                self._start_if_named(sink)
                return self._in_object(char, sink)
            if char == '"' and self.name:
                self.place, self.word, self.reader = "quoted", "", StringReader()
                return Step.MORE
        elif char == '"':
            self.place, self.word, self.reader = "string", "", StringReader()
            return Step.MORE
        if self.key == "name" or char in '"{[,]}':
            return Step.FAILED
        self.place, self.word = "bare", char
        return Step.MORE

    def _in_object(self, char: str, sink: CallSink) -> Step:
        closed = self.scanner.step(char)
        if self.started:
            sink.arguments(char)
        else:
            self.early.add(char)
            if self.early.size > MAX_HELD:
                return Step.FAILED
        if closed:
            self.place = "comma"
            if self.started:
                self._end(sink)
        return Step.MORE

    def _in_quoted_object(self, char: str, sink: CallSink) -> Step:
        """Processes a character of arguments that are an object within a string."""
        text = self.reader.step(char)
        for each in text:
            if not self.scanner.depth and each not in (_SPACE if self.ended else "{" + _SPACE):
                return Step.FAILED
            if each == "{":
                self._start_if_named(sink)
            if not self.started or self.ended:
                continue
            sink.arguments(each)
            if self.scanner.step(each):
                self._end(sink)
                self.place = "closing"
        if self.reader.ended:
            self.place = "comma"
            if not self.ended:
                return Step.FAILED
        return Step.MORE

    def _in_bare(self, char: str, sink: CallSink) -> Step:
        if char not in ",}" and char not in _SPACE:
            self.word += char
            return Step.MORE if len(self.word) <= MAX_NAME else Step.FAILED
        if self.key in self._arguments and self.word != _NULL:
            return Step.FAILED
        self.place = "comma"
        return Step.MORE if char in _SPACE else self._between(char, sink)

    def _close(self, sink: CallSink) -> Step:
        if not self.name or (self.early.size and not self.started):
            return Step.FAILED
        if not self.started:
            self._start(sink)
            sink.arguments("{}")
            self._end(sink)
        return Step.DONE

    def _start_if_named(self, sink: CallSink) -> None:
        if self.name and not self.started:
            self._start(sink)

    def _start(self, sink: CallSink) -> None:
        self.started = True
        sink.start()

    def _end(self, sink: CallSink) -> None:
        self.ended = True
        sink.end()
