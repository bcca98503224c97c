"""Tests that the tokens of a step reach the streams of their requests while other requests begin and end."""

from __future__ import annotations

import random
from collections import deque
from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from decode_worker.delivery.router_stream import RouterStream
from decode_worker.request import DecodeRequest, Delta, PlainTokens, TokenDelta, split_plain
from decode_worker.worker import DecodeWorker
from engine.step.sequence import SampledToken, Sequence
from penstock.config import DecodeConfig
from penstock.types import FinishReason, RequestId, SamplingParams, WorkerId
from penstock.v1 import worker_pb2
from tests.support.decode.split_steps import SplitSteps
from tests.support.engine.fake_engine import CONTEXT, FakeEngine, expected_tokens
from tests.support.serving import SALT
from tests.support.suite.examples import examples


class NoTransfers:
    """Stands in for `decode_worker.prefill.transfer_table.TransferTable`: every prompt is computed locally."""

    num_mismatches = num_open = 0

    def grant_reservations(self, scheduler: object) -> list[object]:
        return []

    def abandon(self, request: object) -> None: ...


class Router:
    """Stands in for `decode_worker.delivery.router_stream.RouterStream`."""

    def __init__(self) -> None:
        self.deltas: dict[int, list[TokenDelta]] = {}
        self.num_batches: list[int] = []  # the number of plain-token batches in each step

    def send(self, deltas: list[Delta]) -> None:
        self.num_batches.append(sum(isinstance(delta, PlainTokens) for delta in deltas))
        for delta in split_plain(deltas):
            self.deltas.setdefault(delta.stream_id, []).append(delta)


def make_worker(**settings_: int) -> tuple[DecodeWorker, SplitSteps]:
    config = DecodeConfig.model_validate({"max_batch_sequences": 8, "max_batch_tokens": 16, **settings_})
    engine, transfers = cast(Any, FakeEngine(200, 4)), cast(Any, NoTransfers())
    worker = DecodeWorker(WorkerId("d"), engine, transfers, config, CONTEXT)
    return worker, SplitSteps(worker, engine, random.Random(0))


def make_request(stream_id: int, prompt: list[int], max_tokens: int, router: Router) -> DecodeRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    sequence = Sequence(RequestId(str(stream_id)), list(prompt), len(prompt), sampling, SALT)
    return DecodeRequest(stream_id, sequence, router, deque(), deadline_s=1e9)


async def test_a_frame_of_several_steps_keeps_each_stream_in_order() -> None:
    def plain(token_id: int) -> PlainTokens:
        return PlainTokens(np.array([7, 300], np.uint64), np.array([token_id, 70_000], np.int64))

    apart = [TokenDelta(7, SampledToken(3)), TokenDelta(9, SampledToken(4), FinishReason.STOP)]
    deltas: list[Delta] = [plain(1), plain(2), *apart, plain(5)]
    encoded = RouterStream().encode(11, deltas)
    frame = worker_pb2.StepFrame.FromString(encoded)
    assert frame.step == 11
    assert [token for delta in frame.deltas if delta.stream_id == 7 for token in delta.token_ids] == [1, 2, 3, 5]
    assert [(delta.stream_id, list(delta.token_ids)) for delta in frame.deltas if delta.stream_id != 7] == [
        (300, [70_000]), (300, [70_000]), (9, [4]), (300, [70_000]),
    ]  # fmt: skip


@examples(60)
@given(data=st.data())
def test_every_stream_gets_its_own_tokens(data: st.DataObject) -> None:
    (worker, steps), routers = make_worker(), [Router() for _ in range(3)]
    open_: dict[int, DecodeRequest] = {}
    asked: dict[int, tuple[int, list[int], int]] = {}
    cancelled: set[int] = set()
    for number in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["submit", "submit", "step", "step", "cancel"]))
        if action == "submit":
            router, max_tokens = data.draw(st.integers(0, 2)), data.draw(st.integers(1, 12))
            prompt = [number % 5 + 10 + i for i in range(data.draw(st.integers(1, 20)))]
            request = make_request(number, prompt, max_tokens, routers[router])
            worker.submit(request)
            open_[number], asked[number] = request, (router, prompt, max_tokens)
        elif action == "step":
            steps.turn()
        elif open_:
            stream_id = data.draw(st.sampled_from(sorted(open_)))
            worker.cancel(open_.pop(stream_id))
            cancelled.add(stream_id)
    while steps.whole():
        pass
    for stream_id, (router, prompt, max_tokens) in asked.items():
        deltas = routers[router].deltas.get(stream_id, [])
        assert not any(stream_id in other.deltas for other in routers if other is not routers[router])
        tokens, reason = expected_tokens(prompt, max_tokens)
        received = [delta.token.token_id for delta in deltas if delta.token is not None]
        if stream_id in cancelled:
            assert received == tokens[: len(received)]
            continue
        assert (received, deltas[-1].finish_reason) == (tokens, reason)
        assert deltas[-1].timing is not None
        assert deltas[-1].timing.first_token_ms >= 0


def test_the_tokens_of_each_router_travel_together() -> None:
    (worker, steps), routers = make_worker(), [Router(), Router()]
    for router in routers:
        for number in range(3):
            worker.submit(make_request(number, [20 + number, 21, 22], 20, router))
    steps.whole()  # prompts
    for _ in range(3):
        steps.whole()
    assert [router.num_batches for router in routers] == [[0, 1, 1, 1]] * 2


def test_a_first_token_that_is_sampled_in_a_row_sets_its_time() -> None:
    """When a prompt is one token longer than its chunks, its last token is computed in a decode row."""
    (worker, steps), router = make_worker(), Router()
    request = make_request(1, list(range(30, 47)), 4, router)
    worker.submit(request)
    assert steps.whole()  # 16 of 17 tokens
    assert not router.deltas
    assert steps.whole()
    assert len(router.deltas[1]) == 1
    assert request.times.first_token_s > request.times.started_s > 0


def test_a_cancellation_during_a_prompt_step_loses_no_token_of_others() -> None:
    (worker, steps), router = make_worker(), Router()
    first, second = (make_request(number, [20 + number, 21, 22], 2, router) for number in range(2))
    worker.submit(first)
    worker.submit(second)
    steps.begin()
    worker.cancel(first)
    steps.end()
    while steps.whole():
        pass
    assert [delta.token.token_id for delta in router.deltas[1] if delta.token] == expected_tokens([21, 21, 22], 2)[0]
    assert 0 not in router.deltas
