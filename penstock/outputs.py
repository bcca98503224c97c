"""What comes of a request on its way to the client: tokens as a worker sends them, then tokens with their text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock import wire
from penstock.types import FinishReason
from penstock.v1 import common_pb2, inference_pb2


@dataclass(frozen=True, slots=True)
class Emitted:
    """What an earlier call has streamed of one completion."""

    token_ids: tuple[int, ...]
    finished: bool


@dataclass(slots=True)
class TokenDelta:
    """New tokens of one completion, its end, or both."""

    index: int
    token_ids: list[int]
    logprobs: Sequence[common_pb2.TokenLogprob] = ()  # one a token, where asked for
    finish_reason: FinishReason | None = None
    timing: common_pb2.Timing | None = None  # with finish_reason


@dataclass(slots=True)
class Output:
    """What a front sends its client: a delta's tokens with their text."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[common_pb2.TokenLogprob] = ()  # with token texts
    finish_reason: FinishReason | None = None
    timing: common_pb2.Timing | None = None  # with finish_reason
    usage: common_pb2.Usage | None = None  # on the last of the stream
    granted_tokens: int | None = None  # max_tokens, where overload allows fewer than were asked for
    decision: dict[str, Any] | None = None  # with usage, where it was asked for


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
    )
