"""Provides grammars for tests over the bundled model, and the text of its tokens."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from benchmarks.attack.attacks.grammars import HOSTILE
from engine.sampling.grammar.matcher import GrammarMatcher
from engine.step.sequence import Sequence as Generation
from penstock.text.grammars import GrammarCompiler
from penstock.types import Grammar, GrammarKind, RequestId, SamplingParams

MODEL = Path(__file__).resolve().parents[3] / "models" / "penstock-tiny"
VOCAB_SIZE = 2048
EOS = frozenset({1, 2})
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "friends": {"type": "array", "items": {"enum": ["Ann", "Ben", "Eve"]}, "minItems": 3, "maxItems": 6},
        "married": {"type": "boolean"},
    },
    "required": ["name", "age", "friends", "married"],
    "additionalProperties": False,
}


def schema(value: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


def regex(source: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, source)


COUNTED = regex(r"([a-z]{1,8} [0-9]{2,4}; ){12,40}")  # long enough to lose a worker in the middle
GRAMMARS = {
    "person": schema(PERSON),
    "counted": COUNTED,
    "choice": Grammar(GrammarKind.CHOICE, '["yes", "no", "it depends"]'),
    "lark": Grammar(
        GrammarKind.LARK, 'start: "<" NAME ">" item+ "</" NAME ">"\nitem: "(" /[0-9]{1,3}/ ")"\nNAME: /[a-z]{2,6}/'
    ),
    "tagged": Grammar(
        GrammarKind.STRUCTURAL_TAG,
        json.dumps(
            {
                "type": "structural_tag",
                "format": {
                    "type": "tags_with_separator",
                    "separator": ", ",
                    "at_least_one": True,
                    "tags": [{"begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]{1,4}"}, "end": "</n>"}],
                },
            }
        ),
    ),
}

_KINDS = {
    "guided_grammar": GrammarKind.LARK,
    "guided_json": GrammarKind.JSON_SCHEMA,
    "guided_regex": GrammarKind.REGEX,
    "guided_choice": GrammarKind.CHOICE,
}


def hostile(name: str) -> Grammar:
    """Returns a hostile grammar of `benchmarks.attack`."""
    field, value = HOSTILE[name]
    return Grammar(_KINDS[field], value if isinstance(value, str) else json.dumps(value))


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(MODEL, VOCAB_SIZE, EOS)


@functools.cache
def _tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def spell(token_ids: Sequence[int]) -> str:
    """Returns the text of an output, without the tokens that end it."""
    return str(_tokenizer().decode(list(token_ids), skip_special_tokens=True))


def encode(text: str) -> list[int]:
    return list(_tokenizer().encode(text, add_special_tokens=False).ids)


def matcher(grammar: Grammar) -> GrammarMatcher:
    return GrammarMatcher(compiler().compile(grammar), EOS)


def generation(grammar: Grammar | None, output: Sequence[int] = (), **sampling: object) -> Generation:
    """Returns a sequence after a prompt of three tokens, with its matcher if it has a grammar."""
    params = SamplingParams(max_tokens=1000, grammar=grammar, **sampling)  # type: ignore[arg-type]
    made = Generation(RequestId("r"), [5, 6, 7, *output], 3, params, b"salt")
    made.matcher = None if grammar is None else matcher(grammar)
    return made
