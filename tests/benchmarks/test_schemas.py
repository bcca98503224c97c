"""Tests how the benchmark of public schemas judges an output, on a small sample."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.schemas.__main__ import closing_bias
from benchmarks.schemas.judge import DRAFTS, problem_of
from engine.engine import Engine
from engine.generate import generate
from penstock.config import EngineConfig
from penstock.types import SamplingParams
from tests.support.engine.grammars import EOS, MODEL, encode, schema, spell
from tests.support.engine.random_schemas import make_schema

NEWEST, OLDEST = "draft2020-12", "draft4"
LETTERS = {"additionalProperties": False, "patternProperties": {r"^\p{L}+$": {"type": "integer"}}}
SEEDS = {"greedy": range(5000, 5016), "seeded": range(5016, 5032)}
WAYS = {
    "greedy": SamplingParams(max_tokens=100, temperature=0.0, logit_bias=closing_bias()),
    "seeded": SamplingParams(max_tokens=100, temperature=1.0, seed=3, logit_bias=closing_bias()),
}


@pytest.mark.parametrize(
    ("draft", "given", "text", "problem"),
    [
        (NEWEST, {"multipleOf": 0.0001}, "16.2", None),
        (NEWEST, {"multipleOf": 0.0001}, "135.6", None),
        (NEWEST, {"multipleOf": 0.0001}, "16.20001", "not a multiple"),
        (NEWEST, {"multipleOf": 0.01}, "0.1000000000000000000001", "not a multiple"),
        (NEWEST, {"multipleOf": 3}, "9", None),
        (NEWEST, {"multipleOf": 3}, "10", "not a multiple"),
        (NEWEST, {"multipleOf": 3}, '"x"', None),
        (NEWEST, {"pattern": r"^\p{Lu}$"}, '"É"', None),
        (NEWEST, {"pattern": r"^\p{Lu}$"}, '"é"', "does not match"),
        (NEWEST, LETTERS, '{"é": 1}', None),
        (NEWEST, LETTERS, '{"é": "1"}', "not of type"),
        (NEWEST, LETTERS, '{"1": 1}', "should not be valid"),
        (
            NEWEST,
            {"additionalProperties": {"type": "null"}, "properties": {"a": {}}},
            '{"a": 1, "b": 1}',
            "not of type",
        ),
        (NEWEST, {"type": "integer"}, "1.0", None),
        (OLDEST, {"type": "integer"}, "1.0", "not of type"),
        (NEWEST, {"format": "date"}, '"2026-02-30"', "date"),
        (NEWEST, {}, '{"a": ', "no JSON"),
    ],
)
def test_outputs_are_judged_by_digits_and_unicode(
    draft: str, given: dict[str, object], text: str, problem: str | None
) -> None:
    found = problem_of(draft, {"$schema": DRAFTS[draft], **given}, text)
    assert (found is None) == (problem is None)
    assert (problem or "") in (found or "")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(EngineConfig(model=str(MODEL), num_pages=64, num_threads=1, dtype="float32", device="cpu"))


@pytest.mark.parametrize("way", WAYS)
def test_every_output_is_valid(engine: Engine, way: str) -> None:
    num_whole = 0
    for seed in SEEDS[way]:
        made = make_schema(seed)
        output = generate(engine, encode("Answer in JSON: "), replace(WAYS[way], grammar=schema(made)))
        if output[-1] not in EOS:
            continue  # cut off by max_tokens
        num_whole += 1
        assert problem_of(NEWEST, made, spell(output)) is None
    assert num_whole > 0.7 * len(SEEDS[way])
