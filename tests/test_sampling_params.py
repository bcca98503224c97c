"""Sampling fields: absent is the default, zero is a value, and every mistake names field, value and fix."""

from __future__ import annotations

import math

import pytest

from penstock import sampling, wire
from penstock.errors import InvalidInput
from penstock.types import SamplingParams
from penstock.v1 import common_pb2


def resolve(num_prompt_tokens: int = 10, defaults: dict[str, float] | None = None, **fields: object) -> SamplingParams:
    return sampling.resolve(
        common_pb2.SamplingParams(**fields),
        num_prompt_tokens=num_prompt_tokens,
        context_length=100,
        vocab_size=50,
        seed=99,
        defaults=defaults or {},
    )


def test_absent_fields_take_the_defaults() -> None:
    assert resolve() == SamplingParams(max_tokens=90, seed=99)


def test_the_models_defaults_come_before_ours_and_after_the_requests() -> None:
    model = {"temperature": 0.5, "top_k": 20}
    assert resolve(defaults=model).temperature == 0.5
    assert resolve(defaults=model).top_k == 20
    assert resolve(defaults=model, temperature=0.0).greedy
    assert resolve(defaults=model, top_k=0).top_k == 0


def test_what_travels_between_workers_arrives_whole() -> None:
    params = resolve(
        temperature=0.5, top_k=3, seed=2**64 - 1, logit_bias={3: -1.5}, stop=["x"], stop_token_ids=[4], logprobs=0
    )
    assert wire.sampling_from_wire(wire.sampling_to_wire(params)) == params
    assert params.logprobs == 0
    assert resolve().logprobs is None


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
    ],
)
def test_mistakes_are_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        resolve(**fields)
    assert str(caught.value) == message


def test_prompts_that_cannot_be_served_are_named() -> None:
    with pytest.raises(InvalidInput, match="prompt: is empty"):
        resolve(num_prompt_tokens=0)
    with pytest.raises(InvalidInput, match=r"prompt: has 100 tokens, .* may have 100; shorten it to 99 or fewer"):
        resolve(num_prompt_tokens=100)
