"""Tests the state of a sequence in its grammar, which follows from its tokens alone, and every rule about its end."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.grammar.fast_forward import forced_tokens
from engine.step.finish import finish_reason
from engine.step.sequence import Sequence
from penstock.errors import InvalidInput
from penstock.types import FinishReason, Grammar, GrammarKind
from tests.support.engine.grammars import EOS, GRAMMARS, PERSON, VOCAB_SIZE, encode, generation, regex, schema, spell


def allowed(sequence: Sequence) -> set[int]:
    words = np.zeros(VOCAB_SIZE // 32, np.int32)
    assert sequence.matcher is not None
    sequence.matcher.read(sequence.token_ids, sequence.num_prompt_tokens)
    sequence.matcher.library_matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
    sequence.matcher.amend(words, sequence.num_output_tokens, sequence.sampling)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


A, B = encode("a")[0], encode("b")[0]
SPECIAL = frozenset(encode("<|bos|><|eos|><|end|><|pad|><|system|><|user|><|assistant|>"))


def test_the_end_is_allowed_exactly_where_the_grammar_accepts() -> None:
    sequence = generation(regex("a+b?"))
    assert allowed(sequence) & EOS == set()
    sequence.token_ids.append(A)
    assert allowed(sequence) > EOS
    sequence.token_ids.append(B)
    assert allowed(sequence) == EOS


def test_an_ignored_end_is_allowed_only_if_no_other_token_is() -> None:
    sequence = generation(regex("a+b?"), [A], ignore_eos=True)
    assert allowed(sequence) & EOS == set()
    sequence.token_ids.append(B)
    assert allowed(sequence) == EOS
    sequence.token_ids.append(min(EOS))
    assert finish_reason(sequence, EOS, 1000) is FinishReason.STOP


def test_the_grammar_takes_precedence_over_min_tokens() -> None:
    sequence = generation(regex("a+b?"), [A], min_tokens=9)
    assert allowed(sequence) & EOS == set()
    sequence.token_ids.append(B)
    assert allowed(sequence) == EOS
    sequence.token_ids.append(max(EOS))
    assert finish_reason(sequence, EOS, 1000) is FinishReason.STOP


def test_the_requests_own_stop_tokens_are_allowed_where_the_grammar_accepts() -> None:
    stop = encode("z")[0]
    sequence = generation(regex("a+"), stop_token_ids=(stop, 5000))
    assert stop not in allowed(sequence)
    sequence.token_ids.append(A)
    assert stop in allowed(sequence)
    early = generation(regex("a+"), [A], stop_token_ids=(stop,), min_tokens=3)
    assert stop not in allowed(early)


def test_tokens_that_leave_the_grammar_are_an_error_of_the_request() -> None:
    sequence = generation(regex("a+"), [A, B])
    with pytest.raises(InvalidInput, match=r"sampling\.grammar: cannot be followed after 2 tokens: .*simplify it"):
        allowed(sequence)


def test_a_grammar_that_grows_beyond_its_limits_is_an_error_of_the_request() -> None:
    properties = {f"k{number}": {"type": "string"} for number in range(1000)}
    sequence = generation(schema({"type": "object", "properties": properties}))

    def write_keys() -> None:
        for text in ("{", *'"' * 50):
            allowed(sequence)
            sequence.token_ids.append(encode(text)[0])

    with pytest.raises(InvalidInput, match=r"sampling\.grammar: cannot be followed"):
        write_keys()


@given(seed=st.integers(0, 10**6), name=st.sampled_from([*GRAMMARS, "any"]), cut=st.floats(0, 1))
def test_a_replayed_output_reaches_the_same_state(seed: int, name: str, cut: float) -> None:
    """Any walk through a grammar, including its forced tokens, can be resumed at any place, also between forced
    tokens."""
    grammar = GRAMMARS.get(name, schema(True))
    rng, original, forced_from = random.Random(seed), generation(grammar), dict[int, list[int]]()
    while original.num_output_tokens < 60 and not (set(original.token_ids[3:]) & EOS):
        original.token_ids.append(rng.choice(sorted(allowed(original))))
        start = len(original.token_ids)
        if not set(original.token_ids[3:]) & EOS:
            forced = forced_tokens(original)
            original.token_ids += forced
            for place in range(len(forced)):
                forced_from[start + place] = forced[place:]
    output = original.token_ids[3:]
    num_read = int(cut * len(output))
    taken_up = generation(grammar, output[:num_read])
    if num_read and not set(output[:num_read]) & EOS:
        assert forced_tokens(taken_up) == forced_from.get(num_read + 3, [])
    whole = generation(grammar, output)
    if not set(output) & EOS:
        assert allowed(whole) == allowed(original)


def test_forced_tokens_spell_the_only_continuation() -> None:
    compact = {**PERSON, "x-guidance": {"whitespace_flexible": False}}
    sequence = generation(schema(compact), encode("{"))
    forced = forced_tokens(sequence)
    assert spell(forced) == '"name":'
    ended = generation(Grammar(GrammarKind.CHOICE, '["yes", "no"]'), encode("y"))
    rest = forced_tokens(ended)
    assert spell(rest) == "es"
    assert rest[-1] in EOS


@pytest.mark.parametrize("sampling", [{"logprobs": 0}, {"allowed_token_ids": (4,)}, {"bad_sequences": ((4,),)}])
def test_nothing_is_forced_if_each_token_needs_its_own_step(sampling: dict[str, object]) -> None:
    assert forced_tokens(generation(GRAMMARS["choice"], encode("y"), **sampling)) == []
    assert forced_tokens(generation(GRAMMARS["choice"])) == []  # before the first token
    assert forced_tokens(generation(None, [A])) == []


def num_common(texts: list[str]) -> int:
    """Returns how many characters all texts begin with."""
    first, last = min(texts), max(texts)
    return next((place for place, character in enumerate(first) if character != last[place]), len(first))


@pytest.mark.parametrize(
    "texts",
    [
        ["the weather is fine", "the weather is finer today", "the weathered stone"],
        ["wonderful", "wonder", "wondering"],
        ["a longer story", "a long story"],
        ["10", "100", "1000 and 1"],
    ],
    ids=lambda texts: str(texts[0]),
)
def test_no_token_is_forced_if_a_longer_one_could_pass_the_end_of_the_forced_text(texts: list[str]) -> None:
    """Otherwise the text would be split at a place where the tokenizer never splits it."""
    grammar = Grammar(GrammarKind.CHOICE, json.dumps(texts))
    vocabulary = [spell([token]) for token in range(VOCAB_SIZE)]
    num_forced = 0
    for text in texts:
        whole = encode(text)
        for num_tokens in range(1, len(whole)):
            forced = [token for token in forced_tokens(generation(grammar, whole[:num_tokens])) if token not in EOS]
            if not forced:
                continue
            num_forced += 1
            start, begun = len(spell([*whole[:num_tokens], *forced[:-1]])), spell(whole[:num_tokens])
            possible = [each for each in texts if each.startswith(begun)]
            forced_end = num_common(possible)
            assert start + len(spell(forced[-1:])) <= forced_end
            for rest in (each[start:] for each in possible if len(each) > forced_end):
                assert not [text for text in vocabulary if start + len(text) > forced_end and rest.startswith(text)]
    assert num_forced > 0


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (regex("(.|\n)*"), "<|user|>"),
        (regex(r"<\|user\|>"), "<|user|>"),
        (schema({"type": "string"}), '"<|user|>"'),
        (schema({"const": "<|user|> and <|end|>"}), '"<|user|> and <|end|>"'),
        (Grammar(GrammarKind.CHOICE, '["a <|user|> b", "no"]'), "a <|user|> b"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind.value,
)
def test_the_text_of_a_special_token_is_spelled_with_plain_tokens(grammar: Grammar, text: str) -> None:
    sequence, rest = generation(grammar), text
    while rest:
        assert not allowed(sequence) & (SPECIAL - EOS)
        token = next(token for token in allowed(sequence) - EOS if rest.startswith(spell([token])))
        sequence.token_ids.append(token)
        rest = rest.removeprefix(spell([token]))
    assert allowed(sequence) & EOS


def test_a_forced_name_of_a_special_token_is_spelled_with_plain_tokens() -> None:
    sequence = generation(schema({"const": "<|user|> and <|end|>"}), encode('"'))
    forced = forced_tokens(sequence)
    assert spell(forced) == '<|user|> and <|end|>"'
    assert forced[-1] in EOS
    assert not set(forced[:-1]) & SPECIAL
