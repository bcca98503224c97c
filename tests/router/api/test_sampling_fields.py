"""Tests sampling fields: an absent field takes the default, zero is a value, mistakes are refused by field."""

from __future__ import annotations

import dataclasses
import math

import pytest

from penstock import wire
from penstock.errors import InvalidInput
from penstock.types import SamplingOptions, SamplingParams
from penstock.v1 import common_pb2
from router.api import sampling_fields
from router.api.openai.requests import _OWN_FORMS, ChatBody, CompletionBody


def resolve(num_prompt_tokens: int = 10, defaults: dict[str, float] | None = None, **fields: object) -> SamplingParams:
    return sampling_fields.resolve(
        common_pb2.SamplingParams(**fields),
        num_prompt_tokens=num_prompt_tokens,
        context_length=100,
        vocab_size=50,
        seed=99,
        defaults=defaults or {},
        max_prompt_logprobs=100,
    )


def test_absent_fields_take_the_defaults() -> None:
    assert resolve() == SamplingParams(max_tokens=90, seed=99)


def test_without_max_tokens_an_answer_can_fill_the_context() -> None:
    unlimited = sampling_fields.resolve(
        common_pb2.SamplingParams(), num_prompt_tokens=72, context_length=131_072, vocab_size=50, seed=1
    )
    assert unlimited.max_tokens == 131_000


def test_a_requests_values_override_the_models_defaults_which_override_ours() -> None:
    model = {"temperature": 0.5, "top_k": 20}
    assert resolve(defaults=model).temperature == 0.5
    assert resolve(defaults=model).top_k == 20
    assert resolve(defaults=model, temperature=0.0).greedy
    assert resolve(defaults=model, top_k=0).top_k == 0


def test_params_survive_the_wire_format() -> None:
    params = resolve(
        temperature=0.5, top_k=3, seed=2**64 - 1, logit_bias={3: -1.5}, stop=["x"], stop_token_ids=[4], logprobs=0
    )
    assert wire.sampling_from_wire(wire.sampling_to_wire(params)) == params
    assert params.logprobs == 0
    assert resolve().logprobs is None


def test_every_form_of_a_request_has_the_same_fields() -> None:
    names = set(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
    assert {field.name for field in dataclasses.fields(SamplingParams)} == names
    assert set(SamplingOptions.__annotations__) == names - {"bad_sequences"}  # the router's own form of bad_words
    assert names - _OWN_FORMS <= set(CompletionBody.model_fields)
    assert names - _OWN_FORMS <= set(ChatBody.model_fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "sampling.max_tokens: is 0; give at least 1"),
        (
            {"max_tokens": 91},
            "sampling.max_tokens: is 91, but the prompt has 10 tokens and the context holds 100; give at most 90",
        ),
        ({"min_tokens": 5, "max_tokens": 4}, "sampling.min_tokens: is 5; give at most max_tokens, 4"),
        ({"temperature": -1.0}, "sampling.temperature: is -1; give a value from 0 to 100"),
        ({"temperature": math.nan}, "sampling.temperature: is nan; give a finite number"),
        ({"top_p": 0.0}, "sampling.top_p: is 0; give a value above 0, at most 1"),
        ({"min_p": 1.5}, "sampling.min_p: is 1.5; give a value from 0 to 1"),
        ({"repetition_penalty": 0.0}, "sampling.repetition_penalty: is 0; give a value above 0, at most 100"),
        ({"presence_penalty": 3.0}, "sampling.presence_penalty: is 3; give a value from -2 to 2"),
        ({"n": 0}, "sampling.n: is 0; give a value from 1 to 128"),
        ({"n": 1000}, "sampling.n: is 1000; give a value from 1 to 128"),
        ({"logprobs": 21}, "sampling.logprobs: is 21; give a value from 0 to 20"),
        ({"logit_bias": {50: 1.0}}, "sampling.logit_bias: has token 50; the vocabulary ends at 49"),
        ({"logit_bias": {1: 101.0}}, "sampling.logit_bias[1]: is 101; give a value from -100 to 100"),
        ({"stop": [""]}, "sampling.stop: has a string of 0 characters; give 1 to 256"),
        ({"stop": ["x"] * 17}, "sampling.stop: has 17 strings; give at most 16"),
        ({"stop_token_ids": [50]}, "sampling.stop_token_ids: has token 50; the vocabulary ends at 49"),
        ({"allowed_token_ids": [50]}, "sampling.allowed_token_ids: has token 50; the vocabulary ends at 49"),
        ({"bad_words": ["x"] * 65}, "sampling.bad_words: has 65 words; give at most 64"),
        ({"bad_words": ["x" * 65]}, "sampling.bad_words: has a word of 65 characters; give 1 to 64"),
        ({"bad_words": ["ok", " "]}, "sampling.bad_words: has ' '; give a word with a character other than a space"),
        (
            {"bad_sequences": [common_pb2.TokenSequence(token_ids=[1])]},
            "sampling.bad_sequences: is set by routers alone; give the texts as bad_words",
        ),
        ({"prompt_logprobs": 21}, "sampling.prompt_logprobs: is 21; give a value from 0 to 20"),
        (
            {"prompt_logprobs": 4, "n": 3},
            "sampling.prompt_logprobs: is 4, which makes 150 log-probabilities for 10 prompt tokens and n = 3; at most "
            "100 are allowed, so ask for fewer alternatives or send a shorter prompt",
        ),
    ],
)
def test_mistakes_are_refused_by_field_value_and_fix(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        resolve(**fields)
    assert str(caught.value) == message


def test_prompts_that_cannot_be_served_are_refused() -> None:
    with pytest.raises(InvalidInput, match="prompt: is empty"):
        resolve(num_prompt_tokens=0)
    with pytest.raises(InvalidInput, match=r"prompt: has 100 tokens, .* may have 100; shorten it to 99 or fewer"):
        resolve(num_prompt_tokens=100)
