"""The header of a message in OpenAI's harmony format, with its channel and the tool that it addresses."""

from __future__ import annotations

import re

from router.parsers.parts.part import CallSink, Part, Step
from router.parsers.parts.plain import NAME

_END = "<|message|>"
_MAX_HEADER = 512  # characters
# Each space is optional and single, so that matching takes linear time. The recipient follows the role or the channel.
_HEADER = re.compile(
    r"(?:<\|start\|>)?(?:assistant)? ?(?:to=(?P<role>[^\s<]+))? ?"
    r"(?:<\|channel\|> ?(?P<channel>analysis|commentary|final))? ?(?:to=(?P<recipient>[^\s<]+))? ?"
    r"(?:(?:<\|constrain\|>)? ?(?:json|text|code))? ?<\|message\|>"
)
_FUNCTIONS = "functions."


class HarmonyHeader(Part):
    """Everything up to `<|message|>`. If the message addresses a tool, the tool's arguments follow."""

    FIELDS = ("text",)

    def __init__(self) -> None:
        self.text = ""

    def step(self, char: str, sink: CallSink) -> Step:
        self.text += char
        if not self.text.endswith(_END):
            return Step.MORE if len(self.text) < _MAX_HEADER else Step.FAILED
        header = _HEADER.fullmatch(self.text)
        if header is None:
            return Step.FAILED
        recipient = header["recipient"] or header["role"]
        if recipient:
            sink.name = recipient.removeprefix(_FUNCTIONS)
            known = sink.tools and recipient.startswith(_FUNCTIONS) and NAME.fullmatch(sink.name)
            return Step.DONE if known else Step.FAILED
        return Step.TO_REASONING if header["channel"] == "analysis" else Step.TO_TEXT
