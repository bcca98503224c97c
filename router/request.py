"""A request as the router's stages pass it on, and what comes back from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.types import FinishReason, Lane, RequestId, SamplingParams
from penstock.v1 import common_pb2
from router.decision import Record


@dataclass(frozen=True, slots=True)
class Emitted:
    """What an earlier call has streamed of one completion."""

    token_ids: tuple[int, ...]
    finished: bool


@dataclass(frozen=True, slots=True)
class Request:
    """Validated, tokenized, every default resolved."""

    request_id: RequestId
    token_ids: list[int]
    sampling: SamplingParams
    model_revision: str  # that it was validated for, and is served by to its end
    accepted_s: float  # monotonic
    deadline_s: float  # monotonic; bounds every leg
    lane: Lane = Lane.STANDARD
    emitted: Mapping[int, Emitted] = field(default_factory=dict)  # by an earlier call, by completion
    tenant: str = ""  # whose it is; empty where callers are not told apart
    salt: bytes = b""  # of its page hashes, on every leg: requests of different salts share no page
    session: str = ""  # requests of one session go to the same workers where that costs little
    explain: bool = False  # its end shall tell why it went where it did


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
    decision: Record | None = None  # with usage, where it was asked for
