"""Tests keywords that llguidance does not know: schemas with them are obeyed, and every output is valid."""

from __future__ import annotations

import json
import random

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from penstock.errors import InvalidInput
from penstock.text.schema_keywords import in_known_keywords
from tests.support.engine.grammars import EOS, VOCAB_SIZE, compiler, encode, schema, spell

FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
NUMBER, TEXT = {"type": "integer"}, {"type": "string", "maxLength": 3}
COLORS = {"$defs": {"color": {"enum": ["red", "blue"], "title": "Color"}}}
AB = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}}
# Each row: a schema, texts that it allows, and texts that it does not.
CASES: dict[str, tuple[dict[str, object], list[str], list[str]]] = {
    "counts": ({"type": "array", "items": NUMBER, "minItems": 1.0, "maxItems": 2.0}, ["[1]"], ["[]", "[1, 2, 3]"]),
    "if": ({**NUMBER, "if": {"minimum": 3}}, ["1", "5"], ['"a"']),
    "else": ({**NUMBER, "else": {"minimum": 3}, "then": False}, ["1", "5"], ['"a"']),
    "minContains": ({"type": "array", "items": NUMBER, "minContains": 2}, ["[]"], ['["a"]']),
    "contains": ({"type": "array", "items": NUMBER, "contains": False, "minContains": 0}, ["[]", "[1]"], ['["a"]']),
    "uniqueItems": ({"type": "array", "items": NUMBER, "uniqueItems": False}, ["[1, 1]"], ["{}"]),
    "uniqueItems of one": (
        {"type": "array", "items": NUMBER, "uniqueItems": True, "maxItems": 1},
        ["[]", "[1]"],
        ["[1, 2]"],
    ),
    "propertyNames enum": (
        {"type": "object", "additionalProperties": NUMBER, "propertyNames": {"$ref": "#/$defs/color"}, **COLORS},
        ["{}", '{"blue": 1}', '{"red": 1, "blue": 2}'],
        ['{"green": 1}', '{"red": "x"}'],
    ),
    "propertyNames pattern": (
        {"type": "object", "additionalProperties": NUMBER, "propertyNames": {"pattern": "^[a-c]{2}$"}},
        ["{}", '{"ab": 1, "ba": 2}'],
        ['{"abc": 1}', '{"ab": "x"}'],
    ),
    "propertyNames length": (
        {"type": "object", "additionalProperties": NUMBER, "propertyNames": {"maxLength": 2}},
        ['{"": 1}', '{"xy": 1}'],
        ['{"xyz": 1}'],
    ),
    "propertyNames type": (
        {"type": "object", "additionalProperties": NUMBER, "propertyNames": {"type": "string"}},
        ['{"xyz": 1}'],
        ['{"xyz": "x"}'],
    ),
    "dependentRequired": (
        AB | {"additionalProperties": False, "dependentRequired": {"a": ["b"]}},
        ["{}", '{"b": 1}', '{"a": 1, "b": 1}'],
        ['{"a": 1}'],
    ),
    "dependentSchemas": (
        AB | {"additionalProperties": False, "dependentSchemas": {"a": {"properties": {"b": {"minimum": 5}}}}},
        ["{}", '{"b": 1}', '{"a": 1}', '{"a": 1, "b": 5}'],
        ['{"a": 1, "b": 1}'],
    ),
    "unevaluatedProperties": (AB | {"unevaluatedProperties": TEXT}, ['{"a": 1, "c": "x"}'], ['{"a": 1, "c": 1}']),
    "unevaluatedItems": (
        {"type": "array", "prefixItems": [NUMBER], "unevaluatedItems": False, "minItems": 1},
        ["[1]"],
        ["[1, 2]"],
    ),
    "format uri-reference": ({"type": "string", "format": "uri-reference"}, ['"a:b"'], ['" "']),
    "format json-pointer": ({"type": "string", "format": "json-pointer"}, ['""', '"/a/~1"'], ['"a"', '"/~2"']),
    "not type": ({"not": {"type": ["object", "array", "string"]}}, ["1", "null", "true"], ["{}", "[]", '""']),
    "not required": (
        AB | {"additionalProperties": False, "not": {"required": ["a", "b"]}},
        ["{}", '{"a": 1}', '{"b": 1}'],
        ['{"a": 1, "b": 1}'],
    ),
    "not false": ({**NUMBER, "not": False}, ["1"], ['""']),
}
UNWRITTEN = {
    "contains": {"type": "array", "contains": NUMBER},
    "if": {"if": NUMBER, "then": {"minimum": 3}},
    "not": {"not": {"enum": [1]}},
    "propertyNames": {"propertyNames": {"pattern": "a", "minLength": 3}},
    "unevaluatedProperties": {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False},
    "unevaluatedItems": {"contains": NUMBER, "unevaluatedItems": False},
    "uniqueItems": {"type": "array", "uniqueItems": True},
}


def allows(matcher: LLMatcher, text: str) -> bool:
    tokens = encode(text)
    return (
        bool(matcher.validate_tokens(tokens) == len(tokens))
        and matcher.consume_tokens(tokens)
        and matcher.is_accepting()
    )


def random_output(matcher: LLMatcher, rng: random.Random) -> str | None:
    """Returns an output of random tokens, which ends half of the times that it may. Returns None if it grows too
    long."""
    words, output = np.zeros(VOCAB_SIZE // 32, np.int32), list[int]()
    for _ in range(300):
        if matcher.is_stopped() or (matcher.is_accepting() and rng.random() < 0.5):
            return spell(output)
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        output.append(rng.choice([token for token in allowed if token not in EOS]))
        assert matcher.consume_tokens(output[-1:])
    return None


@pytest.mark.parametrize("case", CASES)
def test_a_schema_is_obeyed_without_its_keyword(case: str) -> None:
    given, good, bad = CASES[case]
    before = json.dumps(given)
    validator = jsonschema.Draft202012Validator(given, format_checker=FORMATS)
    for text in good:
        assert allows(compiler().compile(schema(given)), text), text
        validator.validate(json.loads(text))
    for text in bad:
        assert not allows(compiler().compile(schema(given)), text), text
    assert json.dumps(given) == before
    rng = random.Random(case)
    outputs = [random_output(compiler().compile(schema(given)), rng) for _ in range(10)]
    assert any(output is not None for output in outputs)
    for output in outputs:
        if output is not None:
            validator.validate(json.loads(output))


@pytest.mark.parametrize("keyword", UNWRITTEN)
def test_a_keyword_that_cannot_be_rewritten_is_refused_by_name(keyword: str) -> None:
    with pytest.raises(InvalidInput, match=keyword):
        compiler().compile(schema(UNWRITTEN[keyword]))


def test_values_that_are_no_schema_stay_unchanged() -> None:
    values = {"enum": [{"maxItems": 1.0, "then": 1}], "const": {"then": 1}, "default": {"not": False}}
    assert in_known_keywords(values) == values


_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.floats(), st.integers(), st.sampled_from(["a", "object", "iri", "#/a"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from([*UNWRITTEN, "a", "$ref", "allOf", "const", "dependentRequired", "dependentSchemas"])
            | st.sampled_from(
                ["enum", "format", "maxItems", "minContains", "pattern", "properties", "required", "type"]
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["a", "allOf", "properties", "propertyNames", *UNWRITTEN]), _JSON, max_size=5))
def test_malformed_schemas_raise_nothing(value: dict[str, object]) -> None:
    json.dumps(in_known_keywords(value))


def test_property_names_are_repeated_a_bounded_number_of_times() -> None:
    names = {"enum": [f"name{number}" for number in range(1000)]}
    objects = {f"o{number}": {"propertyNames": {"$ref": "#/$defs/names"}} for number in range(50)}
    written = json.dumps(in_known_keywords({"$defs": {"names": names}, "properties": objects}))
    assert written.count('"name7"') == 5
