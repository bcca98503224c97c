"""Tests which outputs structural tags allow, and that unsupported tags are refused with their place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.errors import InvalidInput
from penstock.text.structural_tags import MAX_PARTS, structural_tag_to_lark
from penstock.types import Grammar, GrammarKind
from tests.support.engine.grammars import compiler, encode

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
STRUCTURES = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=weather>", "schema": CITY, "end": "</function>"},
        {"begin": "<function=now>", "schema": {"type": "object", "properties": {}}, "end": "</function>"},
        {"begin": "[list]", "schema": {"type": "array", "items": {"type": "integer"}}, "end": ""},
    ],
    "triggers": ["<function=", "["],
}
NUMBER = {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]+/x"}, "end": "</n>"}
SAID = {"type": "tag", "begin": "<say>", "content": {"type": "any_text"}, "end": ["</say>", "."]}


def any_of(*tags: dict[str, Any], **options: bool) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<n>", "<say>"][: len(tags)], "tags": [*tags], **options}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": [*elements]}


def constant(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def allows(tag: dict[str, Any], text: str) -> bool:
    """Returns whether the whole text is an output that the tag allows, checked token by token as in the worker."""
    matcher = compiler().compile(Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(tag)))
    token_ids = encode(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", True),
        ("only words, < and <func too", True),
        ('so: <function=weather>{"city": "Rome"}</function> and more', True),
        ('<function=now>{}</function><function=weather>{"city": "a"}</function>', True),
        ("[list][1, 2] and words", True),
        ('so: <function=weather>{"town": "Rome"}</function>', False),
        ("<function=other>{}</function>", False),
        ("<function=now>{}</functio", False),
        ("a [word]", False),
    ],
)
def test_structures_follow_their_triggers(text: str, wanted: bool) -> None:
    assert allows(STRUCTURES, text) is wanted


@pytest.mark.parametrize(
    ("form", "allowed", "refused"),
    [
        (constant('yes: "a\\b"\n'), ['yes: "a\\b"\n'], ["yes", ""]),
        ({"type": "json_schema", "json_schema": True}, ["[1, {}]", '"a"'], ["a"]),
        (
            {"type": "json_schema", "json_schema": CITY, "style": "json"},
            ['{"city": "a"}'],
            ["{}", '{"city": "a", "b": 1}'],
        ),
        ({"type": "regex", "pattern": "a/b\\/c|\n"}, ["a/b/c", "\n"], ["a/b"]),
        ({"type": "any_text", "excludes": []}, ["", "what\never"], []),
        ({"type": "or", "elements": [constant("a"), constant("bc")]}, ["a", "bc"], ["abc", "b"]),
        (NUMBER, ["<n>1/x</n>"], ["<n>1</n>", "1/x", "<n>1/x</n> "]),
        (SAID, ["<say>a < b</say>", "<say>so."], ["<say>so", "<say>a</say> b"]),
        (any_of(NUMBER), ["", "a <n>1/x</n> b <n>2/x</n>"], ["<n>a</n>"]),
        (any_of(NUMBER, SAID), ["<say>a</say> b <n>2/x</n> c"], ["<say>a</say> b <n>2</n> c", "<say>a"]),
        (any_of(NUMBER, at_least_one=True), ["<n>1/x</n>", "<n>1/x</n> b"], ["", "a <n>1/x</n>"]),
        (any_of(NUMBER, stop_after_first=True), ["a", "a <n>1/x</n>"], ["<n>1/x</n> b"]),
        (any_of(NUMBER, at_least_one=True, stop_after_first=True), ["<n>1/x</n>"], ["a <n>1/x</n>", "<n>1/x</n>b"]),
        (
            {"type": "tags_with_separator", "tags": [NUMBER, SAID], "separator": ", "},
            ["", "<n>1/x</n>", "<n>1/x</n>, <say>a</say>"],
            ["<n>1/x</n><n>1/x</n>", "<n>1/x</n>, "],
        ),
        (
            {"type": "tags_with_separator", "tags": [NUMBER], "separator": "", "at_least_one": True},
            ["<n>1/x</n><n>1/x</n>"],
            [""],
        ),
        (
            {"type": "tags_with_separator", "tags": [NUMBER], "separator": ",", "stop_after_first": True},
            ["<n>1/x</n>"],
            ["<n>1/x</n>,<n>1/x</n>"],
        ),
        (
            sequence({**SAID, "begin": "<think>"}, any_of(NUMBER)),
            ["<think>a</say>b <n>1/x</n>", "<think>."],
            ["a", "<think>a</say><n>1</n>"],
        ),
        (
            sequence({"type": "any_text"}, constant("EN"), constant("D"), {"type": "json_schema", "json_schema": CITY}),
            ['so ENEND{"city": "a"}'],
            ['so EN{"city": "a"}'],
        ),
        (sequence(constant("a"), constant("b")), ["ab"], ["a"]),
        (
            {"type": "tag", "begin": "(", "content": any_of(NUMBER), "end": ")"},
            ["()", "(a <n>1/x</n> b)"],
            ["(a", "(<n>1</n>)", "(a) b"],
        ),
    ],
)
def test_formats_allow_their_texts(form: dict[str, Any], allowed: list[str], refused: list[str]) -> None:
    tag = {"type": "structural_tag", "format": form}
    assert [text for text in allowed if not allows(tag, text)] == []
    assert [text for text in refused if allows(tag, text)] == []


def test_special_tokens_are_written_as_tokens() -> None:
    form = {"type": "tag", "begin": "<|call|>now", "content": {"type": "any_text"}, "end": "<|done|>"}
    lark = structural_tag_to_lark(json.dumps({"format": form}), {"<|call|>": 7, "<|done|>": 9}, "f", " ?")
    assert '<[7]> "now"' in lark
    assert "<[9]>" in lark
    assert "<|" not in lark


@pytest.mark.parametrize(
    ("tag", "problem"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "is [1]; a structural tag is an object"),
        ({}, "holds nothing; give format, or structures with triggers"),
        ({"type": "tag", "format": constant("a")}, 'type is "tag"; give structural_tag'),
        ({"structures": STRUCTURES["structures"]}, "holds structures; give format"),
        ({"structures": [], "triggers": ["a"]}, "structures is []; give a list with one entry or more"),
        ({"structures": [1], "triggers": ["a"]}, "structures[0] is 1; give an object"),
        (
            {"structures": [{"begin": "b", "schema": {}, "end": ""}], "triggers": ["a"]},
            'structures[0].begin = "b" begins',
        ),
        (STRUCTURES | {"triggers": ["<function=", "[", "x"]}, 'triggers holds "x", with which no tag begins'),
        (STRUCTURES | {"triggers": ["<function=", "<", "["]}, "begins with 2 triggers; it must begin with one"),
        (STRUCTURES | {"triggers": [""]}, 'triggers[0] is ""; give a text'),
        ({"format": 1}, "format is 1; give an object with a type"),
        (
            {"format": {"type": "grammar", "grammar": "x"}},
            'format.type is "grammar", which is not supported; give one of',
        ),
        ({"format": {"type": "json_schema", "json_schema": 1}}, "format.json_schema is 1; give an object or true"),
        (
            {"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}},
            'format.style is "qwen_xml", which is not supported; give json',
        ),
        ({"format": {**constant("a"), "more": 1}}, "format.more is not known there; give type, value"),
        ({"format": {"type": "any_text", "excludes": ["a"]}}, "format.excludes is not supported; leave it out"),
        ({"format": any_of(NUMBER, excludes=["a"])}, "format.excludes is not supported"),  # type: ignore[arg-type]
        ({"format": any_of(NUMBER, at_least_one=1)}, "format.at_least_one is 1; give true or false"),
        ({"format": {**NUMBER, "end": None}}, "format.end is null; give a text or a list of texts"),
        ({"format": {**NUMBER, "content": None}}, "format.content is null; give an object with a type"),
        ({"format": {**NUMBER, "begin": 1}}, "format.begin is 1; give a text"),
        (
            {"format": sequence({"type": "any_text"}, {"type": "regex", "pattern": "a"})},
            "format.elements[0] may end with free text, whose end cannot be found; put a const_string after it",
        ),
        ({"format": {"type": "or", "elements": [constant("a")] * (MAX_PARTS + 1)}}, "give 512 or fewer"),
        ({"format": sequence(*[sequence(*[constant("a")] * 30)] * 30)}, "is one of more than 512 parts"),
    ],
)
def test_unsupported_tags_are_refused_with_their_place(tag: Any, problem: str) -> None:
    source = tag if isinstance(tag, str) else json.dumps(tag)
    with pytest.raises(InvalidInput) as raised:
        structural_tag_to_lark(source, {}, "structural_tag", " ?")
    assert raised.value.field == "structural_tag"
    assert problem in raised.value.problem
    assert len(raised.value.problem) < 300


def test_depth_and_size_are_bounded() -> None:
    form: dict[str, Any] = constant("a")
    for _ in range(20):
        form = {"type": "or", "elements": [form]}
    with pytest.raises(InvalidInput, match="nested more than 16 deep"):
        structural_tag_to_lark(json.dumps({"format": form}), {}, "f", " ?")
    with pytest.raises(InvalidInput, match="is not valid JSON"):
        structural_tag_to_lark('{"format":' * 50_000, {}, "f", " ?")
    big = {"type": "json_schema", "json_schema": {"enum": ["a" * 50_000]}}
    ends = {"type": "tag", "begin": "a", "content": big, "end": [str(number) for number in range(500)]}
    with pytest.raises(InvalidInput, match="makes a grammar of more than"):
        structural_tag_to_lark(json.dumps({"format": ends}), {}, "f", " ?")
