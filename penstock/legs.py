"""The completions of one request, as routers make them and decode workers that stream to clients do. Pure.

Alike in both places, so that an answer does not depend on the way that it took.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.types import SamplingParams
from penstock.v1 import common_pb2

_STAGGER_TOKENS = 64  # longer prompts are computed once, before the other completions start


def sampling_of(sampling: SamplingParams, index: int) -> SamplingParams:
    """Of one completion at its worker, with a seed of its own. Stop strings are matched where its text is made."""
    if sampling.n == 1 and not index and not sampling.stop:
        return sampling
    return replace(sampling, n=1, seed=(sampling.seed + index) % (1 << 64), stop=())


def id_of(request_id: str, index: int, num_completions: int) -> str:
    return request_id if num_completions == 1 else f"{request_id}-{index}"


def num_ahead(num_prompt_tokens: int, num_completions: int) -> int:
    """So many go ahead of the others, which then find the prompt's pages cached."""
    return min(1, num_completions) if num_prompt_tokens >= _STAGGER_TOKENS else num_completions


def whole_timing(
    told: common_pb2.Timing,
    *,
    waited_s: float,
    accepted_s: float,
    first_token_s: float,
    now_s: float,
    decode_worker: str,
    num_prompt_tokens: int,
) -> common_pb2.Timing:
    """The worker's account of a completion, with what only whoever streams it sees. Moments are monotonic seconds."""
    timing = common_pb2.Timing()
    timing.CopyFrom(told)
    timing.queue_ms += waited_s * 1e3
    timing.first_token_ms = ((first_token_s or now_s) - accepted_s) * 1e3
    timing.decode_ms = (now_s - (first_token_s or now_s)) * 1e3
    timing.decode_worker = decode_worker
    timing.cached_tokens = min(timing.cached_tokens, num_prompt_tokens)
    return timing
