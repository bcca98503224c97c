"""Resolves a request's optional sampling fields to `SamplingParams`, or says which one is wrong and how to mend it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from penstock.errors import InvalidInput
from penstock.types import SamplingParams
from penstock.v1 import common_pb2

DEFAULT_MAX_TOKENS = 4096  # where the request names none and the context would allow more
MAX_COMPLETIONS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_LOGPROBS = 20
_UINT64 = 1 << 64
_NO_BIAS: Mapping[int, float] = MappingProxyType({})


def resolve(
    wire: common_pb2.SamplingParams,
    *,
    num_prompt_tokens: int,
    context_length: int,
    vocab_size: int,
    seed: int,
    defaults: Mapping[str, float] = MappingProxyType({}),
) -> SamplingParams:
    """Every default resolved: the request's own value, else the model's (`defaults`), else ours.

    `seed` is used where the request has none. Raises InvalidInput that names the field, its value and the fix.
    """
    if num_prompt_tokens == 0:
        raise InvalidInput("prompt", "is empty; give at least one token")
    room = context_length - num_prompt_tokens
    if room < 1:
        raise InvalidInput(
            "prompt",
            f"has {num_prompt_tokens} tokens, but prompt and output together may have {context_length}; "
            f"shorten it to {context_length - 1} or fewer",
        )

    def pick(field: str, fallback: float) -> float:
        if not wire.HasField(field):
            if field not in defaults:
                return fallback
            value = defaults[field]
        else:
            value = getattr(wire, field)
        if not math.isfinite(value):
            raise InvalidInput(f"sampling.{field}", f"is {value}; give a finite number")
        return value

    def within(field: str, value: float, low: float, high: float) -> float:
        if not low <= value <= high:
            raise InvalidInput(f"sampling.{field}", f"is {value:g}; give a value from {low:g} to {high:g}")
        return value

    def above_zero(field: str, value: float, high: float) -> float:
        if not 0 < value <= high:
            raise InvalidInput(f"sampling.{field}", f"is {value:g}; give a value above 0, at most {high:g}")
        return value

    return SamplingParams(
        max_tokens=_max_tokens(wire, room, num_prompt_tokens, context_length),
        min_tokens=_min_tokens(wire, room),
        temperature=within("temperature", pick("temperature", 1.0), 0.0, 100.0),
        top_k=int(pick("top_k", 0)),
        top_p=above_zero("top_p", pick("top_p", 1.0), 1.0),
        min_p=within("min_p", pick("min_p", 0.0), 0.0, 1.0),
        repetition_penalty=above_zero("repetition_penalty", pick("repetition_penalty", 1.0), 100.0),
        presence_penalty=within("presence_penalty", pick("presence_penalty", 0.0), -2.0, 2.0),
        frequency_penalty=within("frequency_penalty", pick("frequency_penalty", 0.0), -2.0, 2.0),
        logit_bias=_logit_bias(wire, vocab_size),
        seed=(wire.seed if wire.HasField("seed") else seed) % _UINT64,
        n=int(within("n", wire.n if wire.HasField("n") else 1, 1, MAX_COMPLETIONS)),
        stop=_stop_strings(wire),
        stop_token_ids=_token_ids("sampling.stop_token_ids", wire.stop_token_ids, vocab_size),
        ignore_eos=wire.ignore_eos,
        logprobs=int(within("logprobs", wire.logprobs, 0, MAX_LOGPROBS)) if wire.HasField("logprobs") else None,
    )


def _max_tokens(wire: common_pb2.SamplingParams, room: int, num_prompt_tokens: int, context_length: int) -> int:
    if not wire.HasField("max_tokens"):
        return min(room, DEFAULT_MAX_TOKENS)
    if wire.max_tokens < 1:
        raise InvalidInput("sampling.max_tokens", "is 0; give at least 1")
    if wire.max_tokens > room:
        raise InvalidInput(
            "sampling.max_tokens",
            f"is {wire.max_tokens}, but the prompt has {num_prompt_tokens} tokens and the context holds "
            f"{context_length}; give at most {room}",
        )
    return wire.max_tokens


def _min_tokens(wire: common_pb2.SamplingParams, room: int) -> int:
    limit = wire.max_tokens if wire.HasField("max_tokens") else room
    if wire.min_tokens > limit:
        raise InvalidInput("sampling.min_tokens", f"is {wire.min_tokens}; give at most max_tokens, {limit}")
    return wire.min_tokens


def _logit_bias(wire: common_pb2.SamplingParams, vocab_size: int) -> Mapping[int, float]:
    if not wire.logit_bias:
        return _NO_BIAS
    _token_ids("sampling.logit_bias", tuple(wire.logit_bias), vocab_size)
    for token_id, bias in wire.logit_bias.items():
        if not -100.0 <= bias <= 100.0:  # a NaN fails too
            raise InvalidInput(f"sampling.logit_bias[{token_id}]", f"is {bias:g}; give a value from -100 to 100")
    return MappingProxyType(dict(wire.logit_bias))


def _stop_strings(wire: common_pb2.SamplingParams) -> tuple[str, ...]:
    if len(wire.stop) > MAX_STOP_STRINGS:
        raise InvalidInput("sampling.stop", f"has {len(wire.stop)} strings; give at most {MAX_STOP_STRINGS}")
    for text in wire.stop:
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise InvalidInput(
                "sampling.stop", f"has a string of {len(text)} characters; give 1 to {MAX_STOP_CHARACTERS}"
            )
    return tuple(wire.stop)


def _token_ids(field: str, token_ids: object, vocab_size: int) -> tuple[int, ...]:
    checked = tuple(token_ids)  # type: ignore[arg-type, var-annotated]
    for token_id in checked:
        if token_id >= vocab_size:
            raise InvalidInput(field, f"has token {token_id}; the vocabulary ends at {vocab_size - 1}")
    return checked
