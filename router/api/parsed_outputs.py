"""Turns the outputs of a call into `ChoiceDelta`s: the one place where the text of outputs is parsed. Pure.

Parsing happens here, behind detokenizing, and not at workers: a stream whose worker is lost goes on with the same text,
so that its parser sees no seam.
"""

from __future__ import annotations

from penstock.completions import Output
from router.api.dialect import ChoiceDelta
from router.parsers.events import ParserEvent, TextDelta


class ParsedOutputs:
    """The parsers of one call, one for each choice."""

    def delta(self, choice: int, output: Output) -> ChoiceDelta:
        """Returns what the output adds to the choice. A choice's outputs come in order."""
        events: list[ParserEvent] = [TextDelta(output.text)] if output.text else []
        return ChoiceDelta(choice, events, output)
