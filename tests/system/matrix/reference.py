"""Computes the answers of a single process: one engine, one sequence at a time, the whole prompt in one step."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.engine import Engine
from engine.generate import use_adapter
from engine.sampling.grammar.fast_forward import forced_tokens
from engine.sampling.grammar.matcher import GrammarMatcher
from engine.step.finish import finish_reason
from engine.step.sequence import ScheduledSequence, Sequence
from penstock import wire
from penstock.config import EngineConfig
from penstock.kv.adapter_files import AdapterRef
from penstock.text.completion_text import CompletionText
from penstock.text.completions import CompletionDelta, completion_sampling
from penstock.text.stop_strings import StopStrings
from penstock.types import RequestId, SamplingParams
from penstock.v1 import common_pb2
from tests.system.matrix.features import (
    ENGINE,
    MAX_TOKENS,
    MODEL,
    SINKS,
    Feature,
    adapter_ref,
    call_grammar,
    decode_text,
    resolve,
    spelling,
)


@dataclass
class Answered:
    """Holds a completion. A log-probability is a token with its own value and those of its alternatives, by token."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    logprobs: list[tuple[int, float, dict[int, float]]] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, float, dict[int, float]]] = field(default_factory=list)

    def check(self, other: Answered) -> None:
        """Raises AssertionError unless both are the same, and their log-probabilities close."""
        assert self.token_ids == other.token_ids
        assert (self.text, self.finish_reason) == (other.text, other.finish_reason)
        for mine, theirs in ((self.logprobs, other.logprobs), (self.prompt_logprobs, other.prompt_logprobs)):
            assert [(token, list(top)) for token, _, top in mine] == [(token, list(top)) for token, _, top in theirs]
            for (_, value, top), (_, wanted, wanted_top) in zip(mine, theirs, strict=True):
                assert math.isclose(value, wanted, abs_tol=1e-3)
                assert all(math.isclose(top[token], wanted_top[token], abs_tol=1e-3) for token in top)


@functools.cache
def engine(model: Path = MODEL, *, has_sinks: bool = False) -> Engine:
    settings = ENGINE | (SINKS if has_sinks else {})
    return Engine.load(EngineConfig(model=str(model), num_pages=64, num_threads=1, dtype="float32", **settings))


@functools.cache
def options_of(feature: Feature) -> Mapping[str, Any]:
    """Returns the feature's options; a late stop string is taken from its answer without one."""
    if not feature.end_is_late:
        return feature.all_options
    [plain] = _answer(feature.prompt, resolve(feature.all_options, len(feature.prompt)))
    late = plain.token_ids[MAX_TOKENS * 3 // 4 :]
    if feature.name == "stop_token_ids":
        fresh = [token for token in late if token not in plain.token_ids[: MAX_TOKENS * 3 // 4]]
        return {**feature.all_options, "stop_token_ids": fresh[:1]}
    before = len(decode_text(plain.token_ids[: MAX_TOKENS * 3 // 4]))
    spans = (plain.text[start : start + 6] for start in range(before, len(plain.text) - 6))
    return {**feature.all_options, "stop": [next(span for span in spans if plain.text.find(span) >= before)]}


@functools.cache
def single_process(feature: Feature) -> list[Answered]:
    """Returns every completion of the feature's request."""
    options = options_of(feature)
    if feature.is_chat:
        return _answer(feature.prompt, resolve({**options, "grammar": call_grammar()}, len(feature.prompt)))
    ref = adapter_ref() if feature.adapter else None
    made = engine(feature.model, has_sinks=feature.has_sinks)
    answers = _answer(feature.prompt, resolve(options, len(feature.prompt)), ref, made)
    if feature.over_http:
        for answer in answers:
            answer.text = decode_text(feature.prompt) + answer.text
    return answers


def without_window(feature: Feature) -> list[Answered]:
    """Returns the answer of the model with the same weights in which every token sees all before it."""
    return _answer(feature.prompt, resolve(options_of(feature), len(feature.prompt)))


def _answer(
    prompt: list[int], sampling: SamplingParams, adapter: AdapterRef | None = None, made: Engine | None = None
) -> list[Answered]:
    return [_completion(prompt, sampling, index, adapter, made or engine()) for index in range(sampling.n)]


def _completion(
    prompt: list[int], sampling: SamplingParams, index: int, adapter: AdapterRef | None, made: Engine
) -> Answered:
    answer = Answered()
    sequence = Sequence(
        RequestId("reference"), list(prompt), len(prompt), completion_sampling(sampling, index), b"reference"
    )
    if sampling.grammar is not None:
        sequence.matcher = GrammarMatcher(made.grammars.compile(sampling.grammar), made.model.eos_token_ids)
    if adapter is not None:
        use_adapter(made, sequence, adapter)
    sequence.pages = made.pool.allocate(-(-(len(prompt) + sampling.max_tokens) // made.layout.page_size))
    text = CompletionText(spelling(), sampling, StopStrings(sampling.stop))
    try:
        while not text.ended:
            work = ScheduledSequence(sequence, sequence.num_uncomputed_tokens)
            output = made.step([work])
            for scores in output.scores.values():
                for token_ids, values in zip(scores.token_ids_SA.tolist(), scores.logprobs_SA.tolist(), strict=True):
                    top = dict(zip(token_ids[1:], values[1:], strict=True))
                    answer.prompt_logprobs.append((token_ids[0], values[0], top))
            sequence.num_computed_tokens += work.num_tokens
            [token] = output.tokens
            assert token is not None
            sequence.token_ids.append(token.token_id)
            logprobs = [] if token.logprob is None else [wire.logprob_to_wire(token.logprob)]
            _feed(answer, text, sequence, index, logprobs)
            for token_id in [] if text.ended else forced_tokens(sequence):
                if not text.ended:
                    sequence.token_ids.append(token_id)
                    _feed(answer, text, sequence, index, [])
    finally:
        made.pool.release(sequence.pages)
        if adapter is not None:
            assert made.adapters is not None
            made.adapters.slots.release(adapter.revision)
    return answer


def _feed(
    answer: Answered, text: CompletionText, sequence: Sequence, index: int, logprobs: list[common_pb2.TokenLogprob]
) -> None:
    """Adds the sequence's last token to the answer."""
    made = engine()  # the models have the same end tokens
    reason = finish_reason(sequence, made.model.eos_token_ids, made.model.context_length)
    part = text.feed(CompletionDelta(index, [sequence.token_ids[-1]], logprobs, reason))
    answer.text += part.text
    answer.token_ids += part.token_ids
    for each in part.logprobs:
        answer.logprobs.append((each.token_id, each.logprob, {top.token_id: top.logprob for top in each.top}))
    answer.finish_reason = part.finish_reason.value if part.finish_reason else ""
