"""Turns the outputs of a call into `ChoiceDelta`s. It is the only place where outputs' text is parsed. Pure.

Parsing happens here, after detokenizing, and not at workers. If a worker is lost, the stream continues with the same
text, so the parser notices nothing and workers hold no state for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.errors import InvalidInput
from penstock.text.completions import Output
from penstock.text.spelling import Spelling
from penstock.v1 import common_pb2
from router.api.dialect import ChoiceDelta, OutputFormat
from router.parsers.events import (
    ParserEvent,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from router.parsers.output_parser import OutputParser
from router.parsers.parser_choice import ParserChoice

_END_TOKENS = 64  # last tokens of a prompt, which show whether the output begins with reasoning


class OutputParsing:
    """Says how to parse one call's outputs and sets the sampling parameters that parsing needs."""

    def __init__(
        self, form: OutputFormat, choice: ParserChoice, spelling: Spelling, specials: Mapping[str, int]
    ) -> None:
        """`choice` holds the model's formats, `specials` the ids of special tokens by name.

        Raises InvalidInput if the call has tools and the model has no format for calling them.
        """
        self._form = form
        self._choice = choice
        self._spelling = spelling
        self._specials = specials
        self._tools = form.tools if form.tool_choice != "none" else ()
        if self._tools and form.is_chat and choice.tool_format is None:
            raise InvalidInput(
                "tools",
                "are not possible, since no parser fits the model's chat template; leave them out, or set "
                "tool_parser at the router",
            )

    def complete_sampling(self, sampling: common_pb2.SamplingParams, token_ids: Sequence[int]) -> None:
        """Sets the sampling parameters that parsing needs after a prompt of these tokens. Raises InvalidInput."""
        form, choice = self._form, self._choice
        if not form.is_chat:
            return
        if choice.needs_special_tokens and (self._tools or choice.reasoning_format):
            sampling.keep_special_tokens = True
        if not self._tools or (sampling.HasField("grammar") and form.tool_choice == "auto"):
            return
        source = choice.grammar(
            self._tools,
            form.tool_choice,
            parallel=form.parallel_tool_calls,
            special_tokens=self._specials,
            starts_in_reasoning=self._opens_reasoning(token_ids),
        )
        if source is not None:
            sampling.grammar.kind, sampling.grammar.source = common_pb2.GRAMMAR_KIND_LARK, source

    def parser(self, token_ids: Sequence[int]) -> OutputParser | None:
        """Returns a parser for a completion of this prompt; None if there is nothing to parse."""
        form, choice = self._form, self._choice
        if not form.is_chat or not (self._tools or choice.reasoning_format):
            return None
        return choice.make(self._tools, starts_in_reasoning=self._opens_reasoning(token_ids))

    def pieces(self, output: Output) -> list[tuple[str, int]]:
        """Returns the output's text in pieces, each with its number of tokens.

        If the model can reason, each token is a piece, so that reasoning tokens can be counted.
        """
        token_ids, text = output.token_ids, output.text
        if len(token_ids) <= 1 or self._choice.reasoning_format is None:
            return [(text, len(token_ids))]
        found, start = [], 0
        for token_id in token_ids[:-1]:
            end = start + len(self._spelling.token_text(token_id))
            found.append((text[start:end], 1))
            start = end
        return [*found, (text[start:], 1)]

    def keeps(self, event: ParserEvent) -> bool:
        """Returns whether the client gets the event."""
        if isinstance(event, ReasoningDelta):
            return self._form.include_reasoning
        if isinstance(event, ToolCallStart | ToolArgumentsDelta | ToolCallEnd):
            return event.index == 0 or self._form.parallel_tool_calls
        return True

    def _opens_reasoning(self, token_ids: Sequence[int]) -> bool:
        if self._choice.reasoning_format is None:
            return False
        end = "".join(map(self._spelling.token_text, token_ids[-_END_TOKENS:]))
        return self._choice.prompt_opens_reasoning(end)


class ParsedOutputs:
    """Parses the outputs of one call, with a parser for each choice."""

    def __init__(self, parsing: OutputParsing, prompts: Sequence[Sequence[int]], completions: int) -> None:
        """`prompts` are the token ids of the call's prompts; each prompt has `completions` choices."""
        self._parsing = parsing
        self._parsers = [parsing.parser(token_ids) for token_ids in prompts for _ in range(completions)]
        self._called: set[int] = set()  # choices that have begun a tool call
        self._reasoning: set[int] = set()  # choices whose last text was reasoning

    def delta(self, choice: int, output: Output) -> ChoiceDelta:
        """Returns what the output adds to the choice. Pass a choice's outputs in order."""
        parser, reasoning_tokens = self._parsers[choice], 0
        if parser is None:
            events: list[ParserEvent] = [TextDelta(output.text)] if output.text else []
        else:
            events = []
            for text, num_tokens in self._parsing.pieces(output):
                found = parser.feed(text) if text else []
                if found:
                    (self._reasoning.add if isinstance(found[-1], ReasoningDelta) else self._reasoning.discard)(choice)
                reasoning_tokens += num_tokens if choice in self._reasoning else 0
                events += found
            if output.finish_reason is not None:
                events += parser.finish()
            events = [event for event in events if self._parsing.keeps(event)]
            if any(isinstance(event, ToolCallStart) for event in events):
                self._called.add(choice)
        return ChoiceDelta(choice, events, output, choice in self._called, reasoning_tokens)
