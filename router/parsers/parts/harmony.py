"""The header of a message of OpenAI's harmony format: its channel, and the tool that it is for."""

from __future__ import annotations

import re

from router.parsers.parts.part import CallSink, Part, Step
from router.parsers.parts.plain import NAME

_END = "<|message|>"
_MAX_HEADER = 512  # characters
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."


class HarmonyHeader(Part):
    """Everything up to `<|message|>`. A message for a tool of the request goes on with its arguments."""

    FIELDS = ("text",)

    def __init__(self) -> None:
        self.text = ""

    def step(self, char: str, sink: CallSink) -> Step:
        self.text += char
        if not self.text.endswith(_END):
            return Step.MORE if len(self.text) < _MAX_HEADER else Step.FAILED
        channel, recipient = _CHANNEL.search(self.text), _RECIPIENT.search(self.text)
        if recipient:
            sink.name = recipient[1].removeprefix(_FUNCTIONS)
            known = sink.tools and recipient[1].startswith(_FUNCTIONS) and NAME.fullmatch(sink.name)
            return Step.DONE if known else Step.FAILED
        return Step.TO_REASONING if channel and channel[1] == "analysis" else Step.TO_TEXT
