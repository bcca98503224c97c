"""Tests the parsers with recorded outputs of every format: whole, split anywhere, and restored anywhere."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from penstock.text.spelling import Spelling
from router.parsers.events import ParserEvent, TextDelta, ToolCallStart
from router.parsers.formats import TOOL_FORMATS
from router.parsers.output_parser import OutputParser
from router.parsers.parser_choice import ParserChoice, choose_parsers
from tests.router.parsers.recorded import RECORDED, TOOLS, Recorded
from tests.support.router.parsed_outputs import gather, parse_whole
from tests.support.router.router_fakes import MODEL

TOKENIZER = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
each_recorded = pytest.mark.parametrize("recorded", RECORDED, ids=lambda recorded: recorded.id)


def choice_of(recorded: Recorded) -> ParserChoice:
    return choose_parsers(None, recorded.tools, recorded.reasoning)


def parser_of(recorded: Recorded) -> OutputParser:
    return choice_of(recorded).make(TOOLS, starts_in_reasoning=recorded.starts_in_reasoning)


@each_recorded
def test_an_output_is_parsed_as_a_whole(recorded: Recorded) -> None:
    parsed = parse_whole(choice_of(recorded), recorded.text, TOOLS, starts_in_reasoning=recorded.starts_in_reasoning)
    assert parsed == recorded.parsed
    for call in parsed.tool_calls:
        if call.complete:
            assert isinstance(json.loads(call.arguments), dict)


@each_recorded
def test_an_output_can_be_split_at_any_position(recorded: Recorded) -> None:
    whole = parser_of(recorded)
    expected = merged([*whole.feed(recorded.text), *whole.finish()])
    for cut in range(len(recorded.text) + 1):
        parser = parser_of(recorded)
        events = [*parser.feed(recorded.text[:cut]), *parser.feed(recorded.text[cut:]), *parser.finish()]
        assert merged(events) == expected, f"cut at {cut}"


@each_recorded
def test_an_output_can_arrive_by_single_characters(recorded: Recorded) -> None:
    parser = parser_of(recorded)
    events = [event for char in recorded.text for event in parser.feed(char)]
    assert gather([*events, *parser.finish()]) == recorded.parsed


@each_recorded
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7])
def test_an_output_can_arrive_by_tokens(recorded: Recorded, num_tokens: int) -> None:
    """Tokens may also cut characters, which the detokenizer completes."""
    token_ids = TOKENIZER.encode(recorded.text, add_special_tokens=False).ids
    parser, detokenizer = parser_of(recorded), Spelling(TOKENIZER).detokenizer(keep_special_tokens=True)
    events: list[ParserEvent] = []
    for start in range(0, len(token_ids), num_tokens):
        events += parser.feed(detokenizer.add(token_ids[start : start + num_tokens]))
    events += parser.feed(detokenizer.finish())
    assert gather([*events, *parser.finish()]) == recorded.parsed


@given(st.sampled_from(RECORDED), st.data())
def test_an_output_can_be_split_at_random(recorded: Recorded, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(recorded.text)), max_size=12)))
    parser = parser_of(recorded)
    events: list[ParserEvent] = []
    for start, end in zip([0, *cuts], [*cuts, len(recorded.text)], strict=True):
        events += parser.feed(recorded.text[start:end])
    assert gather([*events, *parser.finish()]) == recorded.parsed


@each_recorded
def test_a_restored_parser_continues_with_the_same_events(recorded: Recorded) -> None:
    choice = choice_of(recorded)
    for cut in range(len(recorded.text) + 1):
        parser = parser_of(recorded)
        before = parser.feed(recorded.text[:cut])
        restored = choice.restore(json.loads(json.dumps(parser.state())), TOOLS)
        after = [*parser.feed(recorded.text[cut:]), *parser.finish()]
        assert [*restored.feed(recorded.text[cut:]), *restored.finish()] == after, f"restored at {cut}"
        assert gather([*before, *after]) == recorded.parsed


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_every_format_has_recorded_outputs(name: str) -> None:
    assert sum(len(recorded.parsed.tool_calls) for recorded in RECORDED if recorded.tools == name) >= 2


@each_recorded
def test_without_tools_calls_stay_text(recorded: Recorded) -> None:
    parser = choice_of(recorded).make(starts_in_reasoning=recorded.starts_in_reasoning)
    events = [*parser.feed(recorded.text), *parser.finish()]
    assert not any(isinstance(event, ToolCallStart) for event in events)
    if recorded.reasoning == "none":
        assert merged(events) == [TextDelta(recorded.text)]


def merged(events: list[ParserEvent]) -> list[object]:
    """Joins adjacent deltas of one kind."""
    found: list[ParserEvent] = []
    for event in events:
        last = found[-1] if found else None
        if hasattr(event, "text") and type(last) is type(event):
            fields = {name: getattr(event, name) for name in type(event).__slots__}
            found[-1] = type(event)(**{**fields, "text": last.text + event.text})
        else:
            found.append(event)
    return list(found)
