"""The plain parts: a literal, white space, and a name that ends at a literal."""

from __future__ import annotations

import re
from collections.abc import Callable

from router.parsers.parts.part import CallSink, Part, Step

MAX_NAME = 256  # characters
NAME = re.compile(r"[A-Za-z0-9_.:/\-]+")


class Literal(Part):
    """A fixed text. An optional one may be absent as a whole."""

    FIELDS = ("matched",)

    def __init__(self, text: str, *, optional: bool = False) -> None:
        self._text = text
        self._optional = optional
        self.matched = 0

    def step(self, char: str, sink: CallSink) -> Step:
        if char != self._text[self.matched]:
            return Step.DONE_BEFORE if self._optional and not self.matched else Step.FAILED
        self.matched += 1
        return Step.DONE if self.matched == len(self._text) else Step.MORE


class Space(Part):
    """White space, or nothing."""

    def step(self, char: str, sink: CallSink) -> Step:
        return Step.MORE if char in " \t\r\n" else Step.DONE_BEFORE


class Name(Part):
    """The name of a tool, up to any of the literals `ends`. `clean` takes off what the format adds to the name."""

    FIELDS = ("text",)

    def __init__(self, *ends: str, clean: Callable[[str], str] = str.strip) -> None:
        self._ends = ends
        self._clean = clean
        self.text = ""

    def step(self, char: str, sink: CallSink) -> Step:
        self.text += char
        for end in self._ends:
            if self.text.endswith(end):
                name = self._clean(self.text[: -len(end)])
                if not NAME.fullmatch(name):
                    return Step.FAILED
                sink.name = name
                return Step.DONE
        return Step.MORE if len(self.text) < MAX_NAME else Step.FAILED
