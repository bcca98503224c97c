"""Tests that grammars compile within their bounds, and that unsupported ones are refused with the reason."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from benchmarks.attack.attacks.grammars import CHEAP, HOSTILE
from penstock.errors import CheckpointError, InvalidInput
from penstock.text import grammars
from penstock.text.grammars import MAX_SOURCE_BYTES, GrammarCompiler, to_llguidance
from penstock.types import Grammar, GrammarKind
from tests.support.engine.grammars import EOS, MODEL, VOCAB_SIZE, encode, hostile, regex, schema


@pytest.fixture(name="compiler")
def _compiler() -> GrammarCompiler:
    return GrammarCompiler(MODEL, VOCAB_SIZE, EOS)


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (regex("(?=a)b"), "look-around"),
        (regex("(a"), "unclosed group"),
        (schema({"type": "strin"}), "Invalid type: strin"),
        (schema({"type": "array", "uniqueItems": True}), 'Unimplemented keys: ["uniqueItems"]'),
        (schema({"$ref": "https://example.com/schema.json"}), "not present in a registry"),
        (schema(False), "which no text satisfies"),
        (Grammar(GrammarKind.JSON_SCHEMA, "{"), "is not valid JSON"),
        (Grammar(GrammarKind.JSON_SCHEMA, "[1]"), "a JSON schema is an object, true or false"),
        (Grammar(GrammarKind.LARK, "begin: /a/"), "start"),
        (Grammar(GrammarKind.LARK, "start: <|no_such_token|>"), "unknown special token"),
        (Grammar(GrammarKind.CHOICE, '["a", 1]'), "a choice is a JSON list of texts"),
        (Grammar(GrammarKind.CHOICE, "[]"), "a choice is a JSON list of texts"),
        (regex("a" * (MAX_SOURCE_BYTES + 1)), f"has {MAX_SOURCE_BYTES + 1} bytes; give {MAX_SOURCE_BYTES} or fewer"),
        (
            schema((lambda nest: nest(nest, 300))(lambda nest, depth: {"not": nest(nest, depth - 1)} if depth else {})),
            "",
        ),
    ],
)
def test_unsupported_grammars_are_refused_with_the_reason(
    compiler: GrammarCompiler, grammar: Grammar, problem: str
) -> None:
    with pytest.raises(InvalidInput) as raised:
        compiler.compile(grammar)
    assert raised.value.field == "sampling.grammar"
    assert problem in raised.value.problem
    assert len(raised.value.message) < 600
    assert "<state>" not in raised.value.message


def test_every_kind_compiles(compiler: GrammarCompiler) -> None:
    for grammar in (
        schema({"type": "object"}),
        schema(True),
        regex(r"\d{3}-[a-z]+"),
        Grammar(GrammarKind.LARK, 'start: "a" <|end|> | /b+/'),
        Grammar(GrammarKind.CHOICE, json.dumps(['say "hi"', "back\\slash", "line\nfeed", "ünï"])),
    ):
        assert not compiler.compile(grammar).is_error()


def test_a_lark_grammar_can_use_a_special_token_by_name(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(Grammar(GrammarKind.LARK, 'start: "a" <|user|> "b"'))
    assert matcher.consume_tokens([*encode("a"), *encode("<|user|>"), *encode("b")])
    assert matcher.is_accepting()


UNBOUNDED = {"multiples", "many multiples", "optional classes"}  # only the router's processes bound it


@pytest.mark.parametrize("name", sorted(HOSTILE.keys() - UNBOUNDED - CHEAP))
def test_a_hostile_grammar_is_refused_and_remembered(compiler: GrammarCompiler, name: str) -> None:
    with pytest.raises(InvalidInput, match=r"sampling\.grammar: cannot be enforced"):
        compiler.compile(hostile(name))
    with pytest.raises(InvalidInput, match=r"sampling\.grammar: cannot be enforced"):
        compiler.cached(hostile(name))  # without compiling


def test_as_many_choices_as_fit_one_row_compile(compiler: GrammarCompiler) -> None:
    texts = [f"number {rank}" for rank in range(1900)]
    matcher = compiler.compile(Grammar(GrammarKind.CHOICE, json.dumps(texts)))
    assert matcher.consume_tokens(encode(texts[-1])), matcher.get_error()
    assert matcher.is_accepting()
    with pytest.raises(InvalidInput, match=r"it has 1901 texts; give 1900 or fewer"):
        compiler.compile(Grammar(GrammarKind.CHOICE, json.dumps([*texts, "another"])))


def test_a_checkpoint_without_a_tokenizer_prepares_nothing(tmp_path: Path) -> None:
    compiler = GrammarCompiler(tmp_path, VOCAB_SIZE, EOS)
    compiler.prepare()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is missing, and grammars need it"):
        compiler.compile(regex("a"))


def test_the_cache_is_bounded_by_bytes(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_CACHE_BYTES", 300_000)
    kept = [regex(f"a{{{number}}}") for number in range(1, 20)]
    for grammar in kept:
        compiler.compile(grammar)
        assert compiler.num_bytes <= 300_000
    assert compiler.cached(kept[-1]) is not None
    assert compiler.cached(kept[0]) is None


def test_matchers_of_one_grammar_share_no_state(compiler: GrammarCompiler) -> None:
    first, second = compiler.compile(regex("a*")), compiler.compile(regex("a*"))
    [token] = [
        token for token in range(VOCAB_SIZE) if first.deep_copy().try_consume_tokens([token]) and token not in EOS
    ][:1]
    first.consume_token(token)
    assert second.is_accepting()
    assert second.rollback(0)


def test_concurrent_compilations_agree(compiler: GrammarCompiler) -> None:
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(compiler.compile(schema({})))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 4
    assert compiler.num_bytes < 2 * grammars._ENTRY_BYTES


def test_white_space_in_json_is_bounded() -> None:
    assert "whitespace_pattern" in to_llguidance(schema({"type": "object"}), {})
    own = to_llguidance(schema({"type": "object", "x-guidance": {"whitespace_flexible": False}}), {})
    assert "whitespace_flexible" in own
