"""Tests what parsers make of outputs that fit no format: they stay text, take linear time, and little memory."""

from __future__ import annotations

import json
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InvalidInput
from router.parsers.formats import REASONING_FORMATS, TOOL_FORMATS
from router.parsers.output_parser import OutputParser
from router.parsers.parser_choice import choose_parsers
from tests.router.parsers.recorded import RECORDED, TOOLS, Recorded
from tests.support.router.parsed_outputs import gather
from tests.support.suite.examples import examples

WITH_IDS = {"hermes-id", "mistral-call id", "mistral-list of two"}
WORD = re.compile(r"w[0-9]+w")
PIECES = [
    *(mark for row in TOOL_FORMATS.values() for mark in [*row.calls, *row.before, *row.after, *row.ends]),
    *("<think>", "</think>", "<|message|>", "</tool_call>", "<function=", "<parameter=city>", "</parameter>"),
    *("</function>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[ARGS]", "<tool_call|>", "<escape>"),
    *("<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "```json", "```"),
    *('"name"', '"arguments"', '"now"', "now", "get_weather", "call:", "functions.", "analysis", "final", "commentary"),
    *('{"name": "now", "arguments": {', '"', "'", "\\", "{", "}", "[", "]", "(", ")", ":", ",", ";", "=", "\n", " "),
    *("\\u", "\\ud83d", "\\ude00", "city=", "12", "True", "null", "é"),
]
PAIRS = [(tools, reasoning) for tools in TOOL_FORMATS for reasoning in ("none", *REASONING_FORMATS)]


def make(tools: str, reasoning: str = "none") -> OutputParser:
    return choose_parsers(None, tools, reasoning).make(TOOLS)


soups = st.lists(st.one_of(st.sampled_from(PIECES), st.integers(0, 999).map(lambda number: f"w{number}w")), max_size=40)


@examples(160)
@given(st.sampled_from(PAIRS), soups, st.integers(1, 7))
def test_any_text_is_parsed_equally_however_it_is_split(pair: tuple[str, str], pieces: list[str], size: int) -> None:
    text = "".join(pieces)
    whole, cut = make(*pair), make(*pair)
    expected = gather([*whole.feed(text), *whole.finish()])
    events = []
    for start in range(0, len(text), size):
        events += cut.feed(text[start : start + size])
        cut = choose_parsers(None, *pair).restore(json.loads(json.dumps(cut.state())), TOOLS)
    assert gather([*events, *cut.finish()]) == expected
    json.dumps([expected.text, expected.reasoning]).encode()
    (expected.text + expected.reasoning + "".join(call.arguments for call in expected.tool_calls)).encode()


@examples(160)
@given(st.sampled_from(PAIRS), soups)
def test_no_word_is_lost(pair: tuple[str, str], pieces: list[str]) -> None:
    """All text except the syntax of calls appears somewhere; a final word without marks ends any structure."""
    text = "".join(pieces)
    parser = make(*pair)
    parsed = gather([*parser.feed(text), *parser.finish()])
    shown = parsed.text + parsed.reasoning + "".join(call.name + call.arguments for call in parsed.tool_calls)
    missing = set(WORD.findall(text)) - set(WORD.findall(shown))
    if parsed.tool_calls and not parsed.tool_calls[-1].complete:
        missing -= {word for word in missing if text.rindex(word) > text.rindex(parsed.tool_calls[-1].name)}
    assert not missing


@pytest.mark.parametrize("tools", TOOL_FORMATS)
def test_text_without_marks_is_unchanged(tools: str) -> None:
    text = "\n  if a < b: print('x') \n\n- [ ] todo {\"name\": 1}\n\n"
    parser = make(tools, "qwen3")
    assert gather([*parser.feed(text), *parser.finish()]).text == text


def hostile() -> dict[str, str]:
    size = 8_000
    return {
        "braces": '<tool_call>{"name": "now", "arguments": ' + "{" * size,
        "brackets": '<tool_call>{"name": "now", "arguments": {"a": ' + "[" * size,
        "early": '<tool_call>{"arguments": ' + "{" * 3 * size,
        "marks": "<tool_call>" * (size // 5),
        "halves": "<tool_cal" * (size // 5),
        "lines": "\n" * 3 * size,
        "spaces": "<tool_call>" + " " * 3 * size,
        "quotes": '<tool_call>{"' + "a" * 3 * size,
        "sections": "<｜tool▁calls▁begin｜>" * (size // 10),
        "header": "<|channel|>" * (size // 5),
        "list": "[" * 3 * size,
        "calls": "[get_weather(city=" + "(" * 3 * size,
        "parameters": "<function=get_weather><parameter=days>" + "1" * 10 * size,
        "tags": "<function=get_weather><parameter=city>" + "</paramete" * (size // 5),
        "dictionary": "[get_weather(at=" + "{'a':" * size,
    }


@pytest.mark.parametrize("tools", TOOL_FORMATS)
@pytest.mark.parametrize("kind", hostile())
def test_a_hostile_output_takes_a_bounded_number_of_operations(tools: str, kind: str) -> None:
    """Counts function calls, which do not depend on how busy the machine is."""
    text = hostile()[kind]
    counts = [calls_for(tools, text[: len(text) // 4]), calls_for(tools, text)]
    assert counts[1] <= 6 * counts[0] + 5000


def calls_for(tools: str, text: str) -> int:
    parser, count = make(tools, "qwen3"), 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        for start in range(0, len(text), 50):
            parser.feed(text[start : start + 50])
    finally:
        sys.setprofile(None)
    assert len(json.dumps(parser.state())) < 300_000
    parser.finish()
    return count


@pytest.mark.parametrize(
    "change",
    [
        {"section": "elsewhere"},
        {"held": 1},
        {"first": "yes"},
        {"body": {"part": 99, "state": {}}},
        {"body": {"part": 0, "state": []}},
        {"body": 7},
        {"output": {}},
        {"opened_by": "<other>", "body": {"part": 0, "state": {}}},
        {"more": 1},
    ],
)
def test_a_state_of_another_form_is_refused(change: dict[str, object]) -> None:
    parser = make("hermes")
    parser.feed('<tool_call>{"name"')
    with pytest.raises(InvalidInput, match="parser_state"):
        choose_parsers(None, "hermes", "none").restore({**parser.state(), **change}, TOOLS)


@examples(240)
@given(st.sampled_from(RECORDED), st.data())
def test_a_damaged_recorded_output_is_parsed_equally_however_it_is_split(
    recorded: Recorded, data: st.DataObject
) -> None:
    text = recorded.text
    for _ in range(data.draw(st.integers(1, 3))):
        start, end = sorted(data.draw(st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))))
        end = min(end, start + data.draw(st.integers(0, 4)))
        text = text[:start] + data.draw(st.sampled_from(["", *PIECES])) + text[end:]
    size = data.draw(st.integers(1, 9))
    names = (recorded.tools, recorded.reasoning)
    whole, cut = make(*names), make(*names)
    expected = gather([*whole.feed(text), *whole.finish()])
    events = []
    for start in range(0, len(text), size):
        events += cut.feed(text[start : start + size])
        cut = choose_parsers(None, *names).restore(json.loads(json.dumps(cut.state())), TOOLS)
    assert gather([*events, *cut.finish()]) == expected


@examples(240)
@given(st.sampled_from([recorded for recorded in RECORDED if recorded.id not in WITH_IDS]), st.data())
def test_a_word_inserted_into_a_recorded_output_is_not_lost(recorded: Recorded, data: st.DataObject) -> None:
    """Skips the outputs with call ids, which are dropped."""
    at = data.draw(st.integers(0, len(recorded.text)))
    text = recorded.text[:at] + "w77w" + recorded.text[at:]
    parser = make(recorded.tools, recorded.reasoning)
    parsed = gather([*parser.feed(text), *parser.finish()])
    shown = parsed.text + parsed.reasoning + "".join(call.name + call.arguments for call in parsed.tool_calls)
    assert "w77w" in shown
