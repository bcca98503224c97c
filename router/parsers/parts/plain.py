"""The plain parts: a literal, white space, and a name that ends at a literal."""

from __future__ import annotations

import re
from collections.abc import Callable

from router.parsers.parts.part import CallSink, Part, Step

MAX_NAME = 256  # characters
NAME = re.compile(r"[A-Za-z0-9_.:/\-]+")


class Literal(Part):
    """A fixed text. An optional one may be missing entirely."""

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
    """Any amount of white space."""

    def step(self, char: str, sink: CallSink) -> Step:
        return Step.MORE if char in " \t\r\n" else Step.DONE_BEFORE


class Name(Part):
    """The name of a tool, ended by one of the literals `ends` or followed by one of the characters `stops`.

    `clean` removes what the format adds to the name. With `known_only`, a name fails unless the request has such a
    tool.
    """

    FIELDS = ("text",)

    def __init__(
        self, *ends: str, stops: str = "", clean: Callable[[str], str] = str.strip, known_only: bool = False
    ) -> None:
        self._ends = ends
        self._stops = stops
        self._clean = clean
        self._known_only = known_only
        self.text = ""

    def step(self, char: str, sink: CallSink) -> Step:
        if char in self._stops:
            return Step.DONE_BEFORE if self._take(self.text, sink) else Step.FAILED
        self.text += char
        for end in self._ends:
            if self.text.endswith(end):
                return Step.DONE if self._take(self.text[: -len(end)], sink) else Step.FAILED
        return Step.MORE if len(self.text) < MAX_NAME else Step.FAILED

    def _take(self, text: str, sink: CallSink) -> bool:
        sink.name = self._clean(text)
        return bool(NAME.fullmatch(sink.name)) and (not self._known_only or sink.name in sink.tools)
