"""Converts keyword arguments to a JSON object: Python's `key=value, ...)` and Gemma's `key:value,...}`."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass

from router.parsers.parts.json_text import escaped
from router.parsers.parts.part import CallSink, Part, Step

_MAX_DEPTH = 128
_MAX_WORD = 1024  # characters of a key, a number or a constant
_SPACE = " \t\r\n"
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_PYTHON_NUMBER = re.compile(r"[+-]?[0-9._eExXa-fA-FoObB]+")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_ESCAPES |= {char: char for char in "\\'\"/"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = "0123456789abcdefABCDEF"
_PLAIN = re.compile(r"""[^"'\\]+""")
# The kinds of containers: k has bare keys, d is a dictionary, l a list, t a tuple, p the parameters of a Python call.
_CLOSING = {"k": "}", "d": "}", "l": "]", "t": ")", "p": ")"}
_OPENING = {"[": "l", "(": "t", "{": "d"}


@dataclass(frozen=True, slots=True)
class KeywordDialect:
    """The way in which a family of models writes values."""

    assign: str  # between a key and its value
    quotes: tuple[str, ...]  # each opens a string that the same quote closes
    escapes: bool  # strings contain escapes, and dictionary keys are strings
    parameters: str  # the kind of the outermost container


PYTHON = KeywordDialect("=", ('"', "'"), escapes=True, parameters="p")
GEMMA = KeywordDialect(":", ("<escape>", '<|"|>'), escapes=False, parameters="k")


class KeywordArguments(Part):
    """The arguments of a call from after its opening bracket to its closing one. Streams them as JSON."""

    FIELDS = ("place", "stack", "quote", "word", "comma", "as_key")

    def __init__(self, dialect: KeywordDialect) -> None:
        self._dialect = dialect
        self.place = "key"  # what is being read, or expected next
        self.stack = dialect.parameters  # the kinds of the open containers
        self.quote = ""  # the quote that closes the open string
        self.word = ""  # the text so far of a key, a constant, an escape or a quote
        self.comma = False  # a comma came, but no element after it yet
        self.as_key = False  # the open string is a dictionary's key

    def step(self, char: str, sink: CallSink) -> Step:
        if self.place == "string":
            self._in_string(char, sink)
            return Step.MORE
        if self.place == "word":
            return self._in_word(char, sink)
        if self.place == "quote":
            return self._in_quote(char, sink)
        if self.place == "bare":
            return self._in_key(char, sink)
        if char in _SPACE:
            return Step.MORE
        if self.place == "value":
            return self._value(char, sink)
        if self.place == "after" and char == ",":
            self.comma = True
            self.place = "value" if self.stack[-1] in "lt" else "key"
            return Step.MORE
        if self.place in ("after", "key") and char == _CLOSING[self.stack[-1]]:
            return self._close(sink)
        if self.place == "key":
            return self._begin_key(char, sink)
        if self.place == "assign":
            return self._assign(char, sink)
        return Step.FAILED

    def skip(self, text: str, start: int, sink: CallSink) -> int:
        if self.place != "string" or self.word or not self._dialect.escapes:
            return start
        match = _PLAIN.match(text, start)
        if not match:
            return start
        sink.arguments(escaped(match[0]))
        return match.end()

    def cut_off(self, sink: CallSink) -> None:
        if self.place == "string":
            sink.arguments(escaped(self.word))
        elif self.place == "word":
            self._begin_value(sink)
            sink.arguments(self.word)

    def fail(self, sink: CallSink) -> None:
        return  # what is held was not passed on, so the parser turns it into text

    def _begin_element(self, sink: CallSink) -> None:
        """Begins an element of the innermost container. The very first element also begins the call."""
        if self.comma:
            sink.arguments(", ")
        elif len(self.stack) == 1:
            sink.start()
            sink.arguments("{")
        self.comma = False

    def _begin_value(self, sink: CallSink) -> None:
        """Begins a value, which is an element of its own if its container is a list or a tuple."""
        if self.stack[-1] in "lt":
            self._begin_element(sink)

    def _begin_key(self, char: str, sink: CallSink) -> Step:
        if self.stack[-1] != "d":
            self.place, self.word = "bare", ""
            return self._in_key(char, sink)
        if char not in self._dialect.quotes:
            return Step.FAILED
        self._begin_element(sink)
        sink.arguments('"')
        self.place, self.quote, self.as_key = "string", char, True
        return Step.MORE

    def _in_key(self, char: str, sink: CallSink) -> Step:
        if self.word and (char in _SPACE or char == self._dialect.assign):
            self.place = "assign"
            return Step.MORE if char in _SPACE else self._assign(char, sink)
        self.word += char
        fits = char.isalnum() or char in "_-.$"
        return Step.MORE if fits and len(self.word) <= _MAX_WORD else Step.FAILED

    def _assign(self, char: str, sink: CallSink) -> Step:
        in_dictionary = self.stack[-1] == "d"
        if char != (":" if in_dictionary else self._dialect.assign):
            return Step.FAILED
        if not in_dictionary:
            self._begin_element(sink)
            sink.arguments(json.dumps(self.word, ensure_ascii=False))
            self.word = ""
        sink.arguments(": ")
        self.place = "value"
        return Step.MORE

    def _value(self, char: str, sink: CallSink) -> Step:
        in_list = self.stack[-1] in "lt"
        if in_list and char == _CLOSING[self.stack[-1]]:
            return self._close(sink)
        if char in _OPENING and (char != "(" or self._dialect.escapes):
            if len(self.stack) == _MAX_DEPTH:
                return Step.FAILED
            self._begin_value(sink)
            kind = _OPENING[char] if self._dialect.escapes or char == "[" else "k"
            self.stack += kind
            self.place, self.comma = ("value" if kind in "lt" else "key"), False
            sink.arguments("[" if kind in "lt" else "{")
            return Step.MORE
        if any(quote.startswith(char) for quote in self._dialect.quotes):
            self.place, self.word = "quote", ""
            return self._in_quote(char, sink)
        if char in ",:=]})":
            return Step.FAILED
        self.place, self.word = "word", char
        return Step.MORE

    def _in_quote(self, char: str, sink: CallSink) -> Step:
        self.word += char
        if self.word in self._dialect.quotes:
            self.place, self.quote, self.word, self.as_key = "string", self.word, "", False
            self._begin_value(sink)
            sink.arguments('"')
            return Step.MORE
        return Step.MORE if any(quote.startswith(self.word) for quote in self._dialect.quotes) else Step.FAILED

    def _in_string(self, char: str, sink: CallSink) -> None:
        held = self.word + char
        if self._dialect.escapes:
            self.word = self._unescape(held, sink)
            return
        while held and not self.quote.startswith(held):
            sink.arguments(escaped(held[0]))
            held = held[1:]
        if held == self.quote:
            held = ""
            self._end_string(sink)
        self.word = held
        sink.arguments("")  # marks what is held as part of the call

    def _unescape(self, held: str, sink: CallSink) -> str:
        """Passes on the value of `held`, which is one character or an escape; returns `held` if it is incomplete."""
        sink.arguments("")
        if held == self.quote:
            self._end_string(sink)
        elif held == "\\":
            return held
        elif len(held) == 1:
            sink.arguments(escaped(held))
        elif digits := _HEX_DIGITS.get(held[1]):
            code = held[2:]
            if all(char in _HEX for char in code):
                if len(code) < digits:
                    return held
                sink.arguments(_escape_code(int(code, 16)))
            else:  # not an escape; the last character may be the closing quote or begin an escape
                sink.arguments(escaped(held[:-1]))
                return self._unescape(held[-1], sink)
        else:
            sink.arguments(escaped(_ESCAPES.get(held[1], held)))
        return ""

    def _end_string(self, sink: CallSink) -> None:
        sink.arguments('"')
        self.place = "assign" if self.as_key else "after"

    def _in_word(self, char: str, sink: CallSink) -> Step:
        if char not in ",]})" and char not in _SPACE:
            self.word += char
            return Step.MORE if len(self.word) <= _MAX_WORD else Step.FAILED
        text = _word_as_json(self.word, self._dialect)
        if text is None:
            return Step.FAILED
        self._begin_value(sink)
        sink.arguments(text)
        self.place, self.word = "after", ""
        return Step.MORE if char in _SPACE else self.step(char, sink)

    def _close(self, sink: CallSink) -> Step:
        if len(self.stack) == 1 and self.place == "key" and not self.comma:
            sink.start()
            sink.arguments("{")
        sink.arguments(_CLOSING[self.stack[-1]].replace(")", "}" if len(self.stack) == 1 else "]"))
        self.stack = self.stack[:-1]
        self.place, self.comma = "after", False
        if self.stack:
            return Step.MORE
        self.stack = self._dialect.parameters
        sink.end()
        return Step.DONE


def _escape_code(code: int) -> str:
    """Returns a code point in the form it has in a JSON string; halves of a surrogate pair stay escapes."""
    if 0xD800 <= code < 0xE000:
        return f"\\u{code:04x}"
    return escaped(chr(code) if code < 0x110000 else "\ufffd")


def _word_as_json(word: str, dialect: KeywordDialect) -> str | None:
    """Returns a constant or number as JSON, else None. In Gemma's dialect, other words are strings without quotes."""
    if word in _WORDS:
        return _WORDS[word]
    if _NUMBER.fullmatch(word):
        return word
    if not dialect.escapes:
        return json.dumps(word, ensure_ascii=False)
    if not _PYTHON_NUMBER.fullmatch(word):
        return None
    try:
        value = ast.literal_eval(word)
        return json.dumps(value, allow_nan=False) if isinstance(value, int | float) else None
    except (ValueError, SyntaxError):
        return None
