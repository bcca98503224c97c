"""Reads JSON as a model writes it: finds an object's end by its braces, and unescapes strings as they arrive."""

from __future__ import annotations

import json
import re

from router.parsers.parts.part import CallSink, Part, Stateful, Step

_IN_STRING = re.compile(r'[^"\\]+')
_OUTSIDE = re.compile(r'[^"{}\[\]]+')


class ObjectScanner(Stateful):
    """Finds the end of a JSON object. It only counts brackets outside strings, so depth costs no memory."""

    FIELDS = ("depth", "quoted", "escaped")

    def __init__(self) -> None:
        self.depth = 0
        self.quoted = False
        self.escaped = False

    def step(self, char: str) -> bool:
        """Processes the next character, beginning with the opening brace; returns whether it is the object's last."""
        if self.escaped:
            self.escaped = False
        elif self.quoted:
            self.escaped = char == "\\"
            self.quoted = char != '"'
        elif char == '"':
            self.quoted = True
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1
            return not self.depth
        return False

    def skip(self, text: str, start: int) -> int:
        """Returns the position after the characters from `start` on that cannot change the scanner's state."""
        if self.escaped or not self.depth:
            return start
        match = (_IN_STRING if self.quoted else _OUTSIDE).match(text, start)
        return match.end() if match else start


class Arguments(Part):
    """A call's arguments as a JSON object, after the call's name. Streams the text unchanged."""

    FIELDS = ("scanner",)

    def __init__(self) -> None:
        self.scanner = ObjectScanner()

    def step(self, char: str, sink: CallSink) -> Step:
        if not self.scanner.depth:
            if char != "{":
                return Step.FAILED
            sink.start()
        ended = self.scanner.step(char)
        sink.arguments(char)
        if ended:
            sink.end()
        return Step.DONE if ended else Step.MORE

    def skip(self, text: str, start: int, sink: CallSink) -> int:
        end = self.scanner.skip(text, start)
        if end > start:
            sink.arguments(text[start:end])
        return end


class StringReader(Stateful):
    """Unescapes a JSON string as it arrives, from after its opening quote."""

    FIELDS = ("escape", "ended")

    def __init__(self) -> None:
        self.escape = ""
        self.ended = False  # the closing quote was read

    def step(self, char: str) -> str:
        """Processes the next character and returns the text that it completes."""
        if not self.escape:
            if char == "\\":
                self.escape = char
            self.ended = char == '"'
            return "" if char in '"\\' else char
        self.escape += char
        if _is_open(self.escape):
            return ""
        text, self.escape = self.escape, ""
        if len(text) > 6 and not text[6:].startswith("\\u"):  # a high surrogate without a low one
            return _unescape(text[:6]) + "".join([self.step(each) for each in text[6:]])
        return _unescape(text)

    def rest(self) -> str:
        """Returns the text of an escape that was cut off."""
        text, self.escape = self.escape, ""
        return text


def escaped(text: str) -> str:
    """Returns text as the inside of a JSON string, without the quotes around it."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _is_open(escape: str) -> bool:
    """Returns whether an escape may need more characters; a high surrogate waits for a low one."""
    if escape[1:2] != "u" or not _hexadecimal(escape[2:6]):
        return False
    if len(escape) < 6:
        return True
    if not 0xD800 <= int(escape[2:6], 16) < 0xDC00:
        return False
    return len(escape) < 12 and "\\u".startswith(escape[6:8]) and _hexadecimal(escape[8:])


def _hexadecimal(text: str) -> bool:
    return all(char in "0123456789abcdefABCDEF" for char in text)


def _unescape(text: str) -> str:
    """Returns the text of an escape: U+FFFD for half a surrogate pair, the escape itself if JSON has no such escape."""
    try:
        value = str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return text
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
