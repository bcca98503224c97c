"""Defines the public client's results as frozen data, and converts requests and results to and from protobuf.

Shared by the blocking and the asyncio client. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from penstock.client.chat import Chat, ChatMessage, checked_text, set_chat
from penstock.errors import InvalidInput
from penstock.kv.kv_hints import NO_KV_HINTS, HintAnswer, KvHints
from penstock.types import FinishReason, Grammar, Lane, SamplingOptions
from penstock.v1 import common_pb2, inference_pb2
from penstock.wire import (
    finish_reason_from_wire,
    grammar_to_wire,
    hint_answer_from_wire,
    kv_hints_to_wire,
    lane_from_name,
    lane_to_wire,
)

Prompt = str | Sequence[int] | Sequence[ChatMessage] | Chat


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # part of prompt_tokens


@dataclass(frozen=True, slots=True)
class PrefillPrice:
    """A way to compute a prompt, with the decode worker's predicted times in milliseconds."""

    place: str  # local (decode worker), remote (prefill worker) or split (first part remote)
    prefill_worker: str  # empty for local
    remote_tokens: int  # leading tokens that it computes
    first_token_ms: float
    harm_ms: float  # delay of other sequences' tokens, summed


@dataclass(frozen=True, slots=True)
class PrefixPull:
    """A prefix that the worker computing the prompt pulled, or tried to pull, from another worker's cache."""

    source: str  # worker id
    wanted_tokens: int
    pulled_tokens: int  # the wanted tokens that arrived in time
    pull_ms: float
    problem: str  # empty if all arrived


@dataclass(frozen=True, slots=True)
class Timing:
    """The stages of one completion in milliseconds, and the workers that served it."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0  # the part that did not overlap the prefill
    first_token_ms: float = 0.0
    decode_ms: float = 0.0
    prefill_worker: str = ""
    decode_worker: str = ""
    cached_tokens: int = 0
    pages_moved: int = 0
    num_redispatches: int = 0
    num_preemptions: int = 0
    num_migrations: int = 0
    migration_pause_ms: float = 0.0  # summed over all migrations
    prefill_cached_tokens: int = 0  # prompt tokens in the prefill worker's cache
    decode_cached_tokens: int = 0  # prompt tokens in the decode worker's cache
    prices: tuple[PrefillPrice, ...] = ()  # the chosen way to compute the prompt, then the others
    decode_first_token_ms: float = 0.0  # from placement to the first token at the decode worker; `prices` predict it
    pull: PrefixPull | None = None
    hints: tuple[HintAnswer, ...] = ()  # the outcomes of KV hints at each worker that they reached


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithm of a token's probability; for a sampled token also the likeliest alternatives."""

    token_id: int
    token: str
    logprob: float
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one completion."""

    text: str
    token_ids: tuple[int, ...]
    index: int = 0  # which of the n completions the tokens belong to
    finish_reason: FinishReason | None = None  # set on the last chunk of this index
    usage: Usage | None = None  # set on the last chunk of the stream
    timing: Timing | None = None  # set on the last chunk of this index
    logprobs: tuple[Logprob, ...] = ()
    request_id: str = ""
    model: str = ""
    granted_max_tokens: int | None = None  # with finish_reason: the limit to which overload shortened the answer
    prompt_logprobs: tuple[Logprob, ...] = ()  # set on the first chunk of this index, if requested
    weight_version: int = 0  # version of the weights that these tokens come from; 0: the checkpoint's own


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole completion."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    timing: Timing
    logprobs: tuple[Logprob, ...] = ()
    granted_max_tokens: int | None = None  # the limit to which overload shortened the answer
    prompt_logprobs: tuple[Logprob, ...] = ()  # one for each prompt token except the first, if requested
    weight_versions: tuple[int, ...] = ()  # for each token, of the weights that it comes from; 0: the checkpoint's own


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """A whole answer: n completions of one prompt. `text` and the other properties belong to the first."""

    completions: tuple[Completion, ...]
    usage: Usage
    request_id: str
    model: str
    decision: Mapping[str, Any] | None = None  # why its workers were chosen, if `explain` was set

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.completions[0].finish_reason

    @property
    def timing(self) -> Timing:
        return self.completions[0].timing


@dataclass(frozen=True, slots=True)
class Tokens:
    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]  # the text of each token


@dataclass(frozen=True, slots=True)
class ModelInfo:
    id: str
    context_length: int  # in tokens, prompt and output together
    revision: str
    parent: str = ""  # for an adapter, the model that it belongs to


@dataclass(slots=True)
class _Parts:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    last: Chunk | None = None


class ResultBuilder:
    """Collects a stream's chunks into a `GenerateResult`."""

    def __init__(self) -> None:
        self._parts: dict[int, _Parts] = {}
        self._last: Chunk | None = None

    def add(self, chunk: Chunk) -> None:
        parts = self._parts.setdefault(chunk.index, _Parts())
        parts.text.append(chunk.text)
        parts.token_ids.extend(chunk.token_ids)
        parts.logprobs.extend(chunk.logprobs)
        parts.prompt_logprobs.extend(chunk.prompt_logprobs)
        parts.weight_versions.extend([chunk.weight_version] * len(chunk.token_ids))
        if chunk.finish_reason is not None:
            parts.last = chunk
        self._last = chunk

    @property
    def finished(self) -> bool:
        """Returns whether the stream is complete: every completion has ended and the usage has arrived."""
        ended = all(parts.last is not None for parts in self._parts.values())
        return ended and self._last is not None and self._last.usage is not None

    def result(self) -> GenerateResult:
        """Returns the whole answer. Call only when `finished`."""
        assert self._last is not None
        assert self._last.usage is not None
        completions = tuple(_completion(self._parts[index]) for index in sorted(self._parts))
        return GenerateResult(completions, self._last.usage, self._last.request_id, self._last.model)


def _completion(parts: _Parts) -> Completion:
    assert parts.last is not None
    assert parts.last.finish_reason is not None
    return Completion(
        text="".join(parts.text),
        token_ids=tuple(parts.token_ids),
        finish_reason=parts.last.finish_reason,
        timing=parts.last.timing or Timing(),
        logprobs=tuple(parts.logprobs),
        granted_max_tokens=parts.last.granted_max_tokens,
        prompt_logprobs=tuple(parts.prompt_logprobs),
        weight_versions=tuple(parts.weight_versions),
    )


def build_request(
    prompt: Prompt,
    options: Mapping[str, object],
    *,
    model: str = "",
    request_id: str = "",
    lane: Lane | str | None = None,
    kv_hints: KvHints = NO_KV_HINTS,
) -> inference_pb2.GenerateRequest:
    """Builds a request. Raises InvalidInput that names a wrong prompt or option; the router checks the rest."""
    request = inference_pb2.GenerateRequest(model=model, request_id=request_id, sampling=_sampling_to_wire(options))
    if lane is not None:
        request.lane = lane_to_wire(lane_from_name(lane))
    kv_hints.check()
    if (hints := kv_hints_to_wire(kv_hints)) is not None:
        request.kv_hints.CopyFrom(hints)
    _set_prompt(request, prompt)
    return request


def build_tokenize_request(
    prompt: str | Sequence[ChatMessage] | Chat, model: str = ""
) -> inference_pb2.TokenizeRequest:
    request = inference_pb2.TokenizeRequest(model=model)
    _set_prompt(request, prompt)
    return request


def _set_prompt(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = checked_text("prompt", prompt)
        return
    if isinstance(prompt, Chat):
        set_chat(request, prompt)
        return
    items = list(prompt)
    if not items:
        raise InvalidInput("prompt", "is empty; give text, token ids or chat messages")
    if all(isinstance(item, Mapping) for item in items):
        set_chat(request, Chat(items))  # type: ignore[arg-type]
        return
    if not isinstance(request, inference_pb2.GenerateRequest):
        raise InvalidInput("prompt", f"holds {items[0]!r}; give text or chat messages")
    try:
        request.token_ids.extend(items)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            "prompt", f"{error}; give text, token ids below 2^32, or {{'role', 'content'}} messages"
        ) from error


def _sampling_to_wire(options: Mapping[str, object]) -> common_pb2.SamplingParams:
    """Sets only the given options; absent fields take the model's defaults."""
    known = SamplingOptions.__annotations__
    wire = common_pb2.SamplingParams()
    for name, value in options.items():
        if name not in known:
            raise InvalidInput(name, f"is not a sampling option; use one of {', '.join(sorted(known))}")
        if value is None:
            continue
        given = [value] if name == "stop" and isinstance(value, str) else value
        if isinstance(given, Grammar):
            given = grammar_to_wire(given)
        if isinstance(getattr(wire, name), bool) and not isinstance(given, int):
            raise InvalidInput(name, f"is {value!r}; give True or False")
        try:
            wire.MergeFrom(common_pb2.SamplingParams(**{name: given}))  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            raise InvalidInput(name, f"= {value!r}: {error}") from error
    return wire


def chunk_from_wire(message: inference_pb2.GenerateResponse) -> Chunk:
    return Chunk(
        text=message.text,
        token_ids=tuple(message.token_ids),
        index=message.index,
        finish_reason=finish_reason_from_wire(message.finish_reason),
        usage=_fields(Usage, message.usage) if message.HasField("usage") else None,
        timing=_timing(message.timing) if message.HasField("timing") else None,
        logprobs=tuple(_logprob_from_wire(logprob) for logprob in message.logprobs),
        request_id=message.request_id,
        model=message.model,
        granted_max_tokens=message.granted_max_tokens if message.HasField("granted_max_tokens") else None,
        prompt_logprobs=tuple(_logprob_from_wire(logprob) for logprob in message.prompt_logprobs),
        weight_version=message.weight_version,
    )


DataT = TypeVar("DataT", Usage, PrefillPrice, PrefixPull)


_PLAIN_TIMING = [item.name for item in fields(Timing) if item.name not in ("prices", "pull", "hints")]


def _timing(message: common_pb2.Timing) -> Timing:
    plain = {name: getattr(message, name) for name in _PLAIN_TIMING}
    prices = tuple(_fields(PrefillPrice, price) for price in message.prices)
    pull = _fields(PrefixPull, message.pull) if message.HasField("pull") else None
    return Timing(**plain, prices=prices, pull=pull, hints=tuple(map(hint_answer_from_wire, message.hints)))


def _fields(kind: type[DataT], message: common_pb2.Usage | common_pb2.PrefillPrice | common_pb2.Pull) -> DataT:
    return kind(**{item.name: getattr(message, item.name) for item in fields(kind)})


def _logprob_from_wire(wire: common_pb2.TokenLogprob) -> Logprob:
    top = tuple(Logprob(other.token_id, other.token, other.logprob) for other in wire.top)
    return Logprob(wire.token_id, wire.token, wire.logprob, top)


def models_from_wire(models: Iterable[inference_pb2.Model]) -> list[ModelInfo]:
    return [ModelInfo(model.id, model.context_length, model.revision, model.parent) for model in models]
