"""Tests how log-probabilities of a prompt are kept until the first token, and how they travel."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from decode_worker.delivery import router_stream
from decode_worker.delivery.router_stream import RouterStream
from decode_worker.request import DecodeRequest, TokenDelta
from engine.step.prompt_scores import PromptScores
from engine.step.sequence import SampledToken, Sequence
from penstock.types import RequestId, SamplingParams
from penstock.v1 import worker_pb2


def scores(first: int, *token_ids: int) -> PromptScores:
    ids = np.array([[token, 7] for token in token_ids])
    return PromptScores(first, ids, np.array([[-token, -0.5] for token in token_ids], np.float32))


@pytest.fixture
async def request_() -> DecodeRequest:
    sequence = Sequence(RequestId("r"), [1] * 9, 9, SamplingParams(max_tokens=4, prompt_logprobs=1), b"")
    return DecodeRequest(3, sequence, RouterStream(), deque(), deadline_s=1e9)


async def test_chunks_are_joined_in_order_and_sent_once(request_: DecodeRequest) -> None:
    request_.add_scores(scores(1, 4, 5))
    request_.add_scores(scores(3, 6))
    delta = TokenDelta(3, SampledToken(9), prompt_logprobs=request_.take_prompt_logprobs())
    assert request_.take_prompt_logprobs() == ()
    stream = RouterStream()
    [message] = worker_pb2.StepFrame.FromString(stream.encode(1, [delta])).deltas
    assert (message.stream_id, list(message.token_ids)) == (3, [9])
    assert [(each.token_id, each.logprob) for each in message.prompt_logprobs] == [(4, -4), (5, -5), (6, -6)]
    assert [(top.token_id, top.logprob) for top in message.prompt_logprobs[0].top] == [(7, -0.5)]


async def test_a_prompt_that_is_recomputed_is_scored_from_the_start(request_: DecodeRequest) -> None:
    """A sequence that is preempted before its first token loses its pages; its prompt is scored again with them."""
    request_.add_scores(scores(1, 4, 5))
    request_.add_scores(scores(1, 4))
    request_.add_scores(scores(2, 5))
    parts = [worker_pb2.StepDelta.FromString(part) for part in request_.take_prompt_logprobs()]
    assert [each.token_id for part in parts for each in part.prompt_logprobs] == [4, 5]


async def test_many_scores_are_sent_in_several_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_stream, "_FRAME_SCORES_BYTES", 100)
    stream = RouterStream()
    sizes = [0, 60, 30, 0, 60, 500, 0, 40]
    stream.send([TokenDelta(number, prompt_logprobs=(b"x" * size,)) for number, size in enumerate(sizes)])
    parts = router_stream._split(
        [TokenDelta(number, prompt_logprobs=(b"x" * size,)) for number, size in enumerate(sizes)]
    )
    assert [[delta.stream_id for delta in part] for part in parts] == [[0, 1, 2, 3], [4], [5, 6], [7]]  # type: ignore[union-attr]


async def test_a_closed_stream_ends_after_its_last_frame() -> None:
    stream = RouterStream()
    stream._append([TokenDelta(1, SampledToken(5))])
    stream.close()
    frames = [frame async for frame in stream.frames()]
    assert [worker_pb2.StepFrame.FromString(frame).deltas[0].stream_id for frame in frames] == [1]
