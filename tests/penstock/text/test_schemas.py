"""Tests that closed schemas allow no unlisted properties, and nothing that the given ones forbid."""

from __future__ import annotations

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.text.schemas import closed

_NAMES = st.sampled_from("abc")
_LEAVES = st.sampled_from([{}, {"type": "integer"}, {"type": "string"}, {"enum": [1, "x"]}])
SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(_NAMES, inner, max_size=3)},
            optional={
                "required": st.lists(_NAMES, unique=True),
                "additionalProperties": st.booleans(),
                "allOf": st.lists(inner, min_size=1, max_size=2),
            },
        ),
        st.fixed_dictionaries({"type": st.just("array"), "items": inner}),
    ),
    max_leaves=6,
)
VALUES = st.recursive(
    st.sampled_from([1, "x", None]),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)),
    max_leaves=6,
)


@given(SCHEMAS, VALUES)
def test_the_given_schema_allows_what_the_closed_one_allows(schema: dict[str, object], value: object) -> None:
    if jsonschema.Draft202012Validator(closed(schema)).is_valid(value):
        assert jsonschema.Draft202012Validator(schema).is_valid(value)


def test_objects_inside_objects_and_lists_are_closed() -> None:
    inner = {"type": "object", "properties": {"a": {}}}
    schema = {"properties": {"one": inner, "many": {"type": "array", "items": inner}}}
    shut = {**inner, "additionalProperties": False}
    assert closed(schema) == {
        "properties": {"one": shut, "many": {"type": "array", "items": shut}},
        "additionalProperties": False,
    }
    assert inner == {"type": "object", "properties": {"a": {}}}


@pytest.mark.parametrize(
    "more",
    [
        {"additionalProperties": True},
        {"patternProperties": {"^x": {}}},
        {"allOf": [{"required": ["b"]}]},
        {"$ref": "#/$defs/x"},
        {"required": ["b"]},
    ],
)
def test_a_schema_whose_keywords_allow_more_properties_stays_open(more: dict[str, object]) -> None:
    schema = {"properties": {"a": {}}, **more}
    assert closed(schema) == schema
