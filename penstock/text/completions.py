"""Derives how each completion of a request is requested from a worker and streamed to the client. Pure.

Routers and decode workers both stream to clients through this module, so that an answer does not depend on its path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock import wire
from penstock.types import FinishReason, SamplingParams
from penstock.v1 import common_pb2, inference_pb2

_STAGGER_TOKENS = 64  # longer prompts are computed once, before the other completions start


@dataclass(frozen=True, slots=True)
class Emitted:
    """The tokens of a completion that an earlier call has streamed."""

    token_ids: tuple[int, ...]
    finished: bool


@dataclass(slots=True)
class CompletionDelta:
    """New tokens of one completion from its worker, its end, or both."""

    index: int
    token_ids: list[int]
    logprobs: Sequence[common_pb2.TokenLogprob] = ()  # one for each token, if requested
    finish_reason: FinishReason | None = None
    timing: common_pb2.Timing | None = None  # with finish_reason
    prompt_logprobs: Sequence[common_pb2.TokenLogprob] = ()  # with the first token, if requested
    weight_version: int = 0  # version of the weights that the tokens come from; 0: the checkpoint's own

    def extend(self, later: CompletionDelta) -> None:
        """Appends a later delta of the same completion, from the same worker."""
        self.token_ids += later.token_ids
        self.logprobs = [*self.logprobs, *later.logprobs]
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.finish_reason, self.timing = later.finish_reason, later.timing


@dataclass(slots=True)
class Output:
    """The part of an answer that goes to the client: the tokens of a `CompletionDelta` with their text."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[common_pb2.TokenLogprob] = ()  # with token texts
    finish_reason: FinishReason | None = None
    timing: common_pb2.Timing | None = None  # with finish_reason
    usage: common_pb2.Usage | None = None  # on the last output of the stream
    granted_tokens: int | None = None  # the limit to which overload shortened the answer
    decision: dict[str, Any] | None = None  # with usage, if requested
    prompt_logprobs: Sequence[common_pb2.TokenLogprob] = ()  # with the first token, if requested; with token texts
    stop_string: str | None = None  # the stop string that ended the completion, with finish_reason
    weight_version: int = 0  # version of the weights that the tokens come from; 0: the checkpoint's own


def to_response(output: Output, request_id: str, model: str) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        request_id=request_id,
        model=model,
        index=output.index,
        text=output.text,
        token_ids=output.token_ids,
        logprobs=output.logprobs,
        finish_reason=wire.finish_reason_to_wire(output.finish_reason),
        usage=output.usage,
        timing=output.timing,
        granted_max_tokens=output.granted_tokens if output.finish_reason is not None else None,
        prompt_logprobs=output.prompt_logprobs,
        weight_version=output.weight_version,
    )


def completion_sampling(sampling: SamplingParams, index: int) -> SamplingParams:
    """Returns the sampling parameters for the worker of completion `index`: its own seed, and no stop strings, which
    are matched where the text is produced.
    """
    if sampling.n == 1 and not index and not sampling.stop:
        return sampling
    return replace(sampling, n=1, seed=(sampling.seed + index) % (1 << 64), stop=())


def completion_id(request_id: str, index: int, num_completions: int) -> str:
    """Returns the request id under which workers know completion `index`."""
    return request_id if num_completions == 1 else f"{request_id}-{index}"


def num_sent_first(num_prompt_tokens: int, num_completions: int) -> int:
    """Returns how many completions start at once; the others start later and find the prompt's pages cached."""
    return min(1, num_completions) if num_prompt_tokens >= _STAGGER_TOKENS else num_completions


def streamed_timing(
    reported: common_pb2.Timing,
    *,
    waited_s: float,
    accepted_s: float,
    first_token_s: float,
    now_s: float,
    decode_worker: str,
    num_prompt_tokens: int,
) -> common_pb2.Timing:
    """Returns a worker's timing of a completion with the times that only the streaming process can measure.

    `waited_s` is a duration; the other times are in monotonic seconds. `first_token_s` is 0 without a token.
    """
    timing = common_pb2.Timing()
    timing.CopyFrom(reported)
    timing.queue_ms += waited_s * 1e3
    timing.first_token_ms = ((first_token_s or now_s) - accepted_s) * 1e3
    timing.decode_ms = (now_s - (first_token_s or now_s)) * 1e3
    timing.decode_worker = decode_worker
    timing.cached_tokens = min(timing.cached_tokens, num_prompt_tokens)
    return timing
