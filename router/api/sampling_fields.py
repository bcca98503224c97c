"""Resolves a request's optional sampling fields to `SamplingParams`, or says which field is invalid and how to fix it.

A new plain field needs one line in each of four places: the proto message `SamplingParams`, the dataclass (and the
client's TypedDict) of that name in `penstock.types`, `_RANGES` below if its values are bounded, and the part of the
engine that implements it. HTTP bodies (`router.api.openai.requests`) and the wire format follow from the proto message.
Performs no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from penstock.errors import InvalidInput
from penstock.text.completions import Emitted
from penstock.types import SamplingParams
from penstock.v1 import common_pb2, inference_pb2
from penstock.wire import grammar_from_wire

MAX_COMPLETIONS = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_LOGPROBS = 20
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARACTERS = 64
_UINT64 = 1 << 64
_NO_BIAS: Mapping[int, float] = MappingProxyType({})
_NO_DEFAULTS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Range:
    low: float
    high: float
    includes_low: bool = True

    def check(self, field: str, value: float) -> None:
        """Raises InvalidInput if the value is out of range."""
        if self.includes_low and not self.low <= value <= self.high:
            raise InvalidInput(f"sampling.{field}", f"is {value:g}; give a value from {self.low:g} to {self.high:g}")
        if not self.includes_low and not self.low < value <= self.high:
            raise InvalidInput(
                f"sampling.{field}", f"is {value:g}; give a value above {self.low:g}, at most {self.high:g}"
            )


# Ranges of plain numbers, whose defaults are those of `SamplingParams`. A field without a range takes any value.
_RANGES: Mapping[str, _Range] = {
    "temperature": _Range(0.0, 100.0),
    "top_p": _Range(0.0, 1.0, includes_low=False),
    "min_p": _Range(0.0, 1.0),
    "repetition_penalty": _Range(0.0, 100.0, includes_low=False),
    "presence_penalty": _Range(-2.0, 2.0),
    "frequency_penalty": _Range(-2.0, 2.0),
    "n": _Range(1, MAX_COMPLETIONS),
    "logprobs": _Range(0, MAX_LOGPROBS),
    "prompt_logprobs": _Range(0, MAX_LOGPROBS),
}


@dataclass(frozen=True, slots=True)
class _Limits:
    """The values that the rules in `_OWN_RULES` depend on."""

    num_prompt_tokens: int
    context_length: int
    vocab_size: int
    seed: int
    prompt_logprobs: float  # most log-probabilities of prompt tokens and alternatives, over all completions

    @property
    def room(self) -> int:
        """Returns how many output tokens the context holds after the prompt."""
        return self.context_length - self.num_prompt_tokens


def resolve(
    wire: common_pb2.SamplingParams,
    *,
    num_prompt_tokens: int,
    context_length: int,
    vocab_size: int,
    seed: int,
    defaults: Mapping[str, float] = _NO_DEFAULTS,
    max_prompt_logprobs: float = math.inf,
) -> SamplingParams:
    """Returns the sampling parameters. A field that the request lacks takes the model's value (`defaults`), or else the
    default of `SamplingParams`.

    `seed` applies if the request has none; `max_prompt_logprobs` bounds the number of prompt log-probabilities. Raises
    InvalidInput that names the field, its value and the fix.
    """
    limits = _Limits(num_prompt_tokens, context_length, vocab_size, seed, max_prompt_logprobs)
    if num_prompt_tokens == 0:
        raise InvalidInput("prompt", "is empty; give at least one token")
    if limits.room < 1:
        raise InvalidInput(
            "prompt",
            f"has {num_prompt_tokens} tokens, but prompt and output together may have {context_length}; "
            f"shorten it to {context_length - 1} or fewer",
        )
    values: dict[str, Any] = {}
    for name, default in _DEFAULTS.items():
        own_rule = _OWN_RULES.get(name)
        values[name] = own_rule(wire, limits) if own_rule else _resolve_plain(wire, name, default, defaults)
    return SamplingParams(**values)


def _resolve_plain(
    wire: common_pb2.SamplingParams, name: str, default: float | None, model_defaults: Mapping[str, float]
) -> float | None:
    if wire.HasField(name):  # type: ignore[arg-type]  # fields have the same names in the message
        value = getattr(wire, name)
    elif name in model_defaults:
        value = model_defaults[name]
    else:
        return default
    if not math.isfinite(value):
        raise InvalidInput(f"sampling.{name}", f"is {value}; give a finite number")
    if name in _RANGES:
        _RANGES[name].check(name, value)
    return value if default is None else type(default)(value)  # a model's `top_k` may be written as a float


def _max_tokens(wire: common_pb2.SamplingParams, limits: _Limits) -> int:
    if not wire.HasField("max_tokens"):
        return limits.room
    if wire.max_tokens < 1:
        raise InvalidInput("sampling.max_tokens", "is 0; give at least 1")
    if wire.max_tokens > limits.room:
        raise InvalidInput(
            "sampling.max_tokens",
            f"is {wire.max_tokens}, but the prompt has {limits.num_prompt_tokens} tokens and the context holds "
            f"{limits.context_length}; give at most {limits.room}",
        )
    return wire.max_tokens


def _min_tokens(wire: common_pb2.SamplingParams, limits: _Limits) -> int:
    limit = wire.max_tokens if wire.HasField("max_tokens") else limits.room
    if wire.min_tokens > limit:
        raise InvalidInput("sampling.min_tokens", f"is {wire.min_tokens}; give at most max_tokens, {limit}")
    return wire.min_tokens


def _logit_bias(wire: common_pb2.SamplingParams, limits: _Limits) -> Mapping[int, float]:
    if not wire.logit_bias:
        return _NO_BIAS
    _check_token_ids("sampling.logit_bias", tuple(wire.logit_bias), limits.vocab_size)
    for token_id, bias in wire.logit_bias.items():
        if not -100.0 <= bias <= 100.0:  # a NaN fails too
            raise InvalidInput(f"sampling.logit_bias[{token_id}]", f"is {bias:g}; give a value from -100 to 100")
    return MappingProxyType(dict(wire.logit_bias))


def _seed(wire: common_pb2.SamplingParams, limits: _Limits) -> int:
    return (wire.seed if wire.HasField("seed") else limits.seed) % _UINT64


def _stop_strings(wire: common_pb2.SamplingParams, limits: _Limits) -> tuple[str, ...]:
    if len(wire.stop) > MAX_STOP_STRINGS:
        raise InvalidInput("sampling.stop", f"has {len(wire.stop)} strings; give at most {MAX_STOP_STRINGS}")
    for text in wire.stop:
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise InvalidInput(
                "sampling.stop", f"has a string of {len(text)} characters; give 1 to {MAX_STOP_CHARACTERS}"
            )
    return tuple(wire.stop)


def _stop_token_ids(wire: common_pb2.SamplingParams, limits: _Limits) -> tuple[int, ...]:
    return _check_token_ids("sampling.stop_token_ids", tuple(wire.stop_token_ids), limits.vocab_size)


def _allowed_token_ids(wire: common_pb2.SamplingParams, limits: _Limits) -> tuple[int, ...]:
    return _check_token_ids("sampling.allowed_token_ids", tuple(wire.allowed_token_ids), limits.vocab_size)


def _bad_words(wire: common_pb2.SamplingParams, limits: _Limits) -> tuple[str, ...]:
    if len(wire.bad_words) > MAX_BAD_WORDS:
        raise InvalidInput("sampling.bad_words", f"has {len(wire.bad_words)} words; give at most {MAX_BAD_WORDS}")
    for word in wire.bad_words:
        if not 1 <= len(word) <= MAX_BAD_WORD_CHARACTERS:
            raise InvalidInput(
                "sampling.bad_words", f"has a word of {len(word)} characters; give 1 to {MAX_BAD_WORD_CHARACTERS}"
            )
        if word.isspace():
            raise InvalidInput("sampling.bad_words", f"has {word!r}; give a word with a character other than a space")
    return tuple(wire.bad_words)


def _bad_sequences(wire: common_pb2.SamplingParams, limits: _Limits) -> tuple[tuple[int, ...], ...]:
    """Returns no sequences: `router.api.prepare` tokenizes `bad_words` once the request is known to be valid."""
    if wire.bad_sequences:
        raise InvalidInput("sampling.bad_sequences", "is set by routers alone; give the texts as bad_words")
    return ()


def _prompt_logprobs(wire: common_pb2.SamplingParams, limits: _Limits) -> int | None:
    if not wire.HasField("prompt_logprobs"):
        return None
    _RANGES["prompt_logprobs"].check("prompt_logprobs", wire.prompt_logprobs)
    count = limits.num_prompt_tokens * (1 + wire.prompt_logprobs) * max(1, wire.n)
    if count > limits.prompt_logprobs:
        raise InvalidInput(
            "sampling.prompt_logprobs",
            f"is {wire.prompt_logprobs}, which makes {count} log-probabilities for {limits.num_prompt_tokens} prompt "
            f"tokens and n = {max(1, wire.n)}; at most {limits.prompt_logprobs} are allowed, so ask for fewer "
            "alternatives or send a shorter prompt",
        )
    return wire.prompt_logprobs


def _check_token_ids(field: str, token_ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise InvalidInput(field, f"has token {token_id}; the vocabulary ends at {vocab_size - 1}")
    return token_ids


_OWN_RULES: Mapping[str, Callable[[common_pb2.SamplingParams, _Limits], Any]] = {
    "max_tokens": _max_tokens,
    "min_tokens": _min_tokens,
    "logit_bias": _logit_bias,
    "seed": _seed,
    "stop": _stop_strings,
    "stop_token_ids": _stop_token_ids,
    "allowed_token_ids": _allowed_token_ids,
    "bad_words": _bad_words,
    "bad_sequences": _bad_sequences,
    "prompt_logprobs": _prompt_logprobs,
    "grammar": lambda wire, limits: grammar_from_wire(wire.grammar) if wire.HasField("grammar") else None,
}
_DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in fields(SamplingParams)}


def check_emitted(
    request: inference_pb2.GenerateRequest, sampling: SamplingParams, vocab_size: int
) -> dict[int, Emitted]:
    """Returns the tokens of each completion, by index, that an earlier call streamed before this request continues it.

    Raises InvalidInput that names the invalid entry.
    """
    if request.emitted and not request.sampling.HasField("seed") and not sampling.greedy:
        raise InvalidInput(
            "sampling.seed",
            "is missing; to continue a request, give the seed that its tokens were sampled with",
        )
    found: dict[int, Emitted] = {}
    for number, entry in enumerate(request.emitted):
        if entry.index in found:
            raise InvalidInput(f"emitted[{number}].index", f"repeats {entry.index}; list each completion once")
        found[entry.index] = _check_entry(entry, f"emitted[{number}]", sampling, vocab_size)
    if len(found) == sampling.n and all(entry.finished for entry in found.values()):
        raise InvalidInput("emitted", "says that every completion has finished; nothing is left to generate")
    return found


def _check_entry(entry: inference_pb2.Emitted, name: str, sampling: SamplingParams, vocab_size: int) -> Emitted:
    token_ids: Sequence[int] = entry.token_ids
    if entry.index >= sampling.n:
        raise InvalidInput(f"{name}.index", f"is {entry.index}; there are {sampling.n} completions, counted from 0")
    allowed = sampling.max_tokens if entry.finished else sampling.max_tokens - 1
    if len(token_ids) > allowed:
        raise InvalidInput(
            f"{name}.token_ids",
            f"hold {len(token_ids)} tokens, but max_tokens is {sampling.max_tokens}; raise it to generate more tokens",
        )
    highest = max(token_ids, default=0)
    if highest >= vocab_size:
        raise InvalidInput(f"{name}.token_ids", f"hold {highest}; the vocabulary ends at {vocab_size - 1}")
    return Emitted(tuple(token_ids), entry.finished)
