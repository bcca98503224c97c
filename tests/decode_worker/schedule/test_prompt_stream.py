"""Tests prompts that are computed beside decode steps: tokens, failures, pages, ends in mid-step, and what is refused.

Half of the random histories of hand-offs and migrations have a prompt stream, too.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
import unittest.mock
from collections import deque
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from pydantic import ValidationError

from decode_worker.request import DecodeRequest, Delta, TokenDelta, split_plain
from decode_worker.schedule.step_costs import StepCosts, StepWork
from decode_worker.server import DecodeServer
from decode_worker.worker import DecodeWorker
from engine.step.compute import PreparedStep, SampledTokens
from engine.step.prompt_stream import PromptStream, _make_green_context, num_partition_sms
from engine.step.sequence import Sequence
from penstock.config import DecodeConfig, EngineConfig, WorkerConfig
from penstock.errors import ConfigError, InternalError
from penstock.scheduling.chunk_costs import costs_of_chunks
from penstock.types import Lane, RequestId, Role, SamplingParams, WorkerId
from tests.decode_worker.delivery.test_token_delivery import NoTransfers
from tests.support.decode.split_steps import SplitSteps
from tests.support.engine.fake_engine import CONTEXT, FakeEngine, expected_tokens
from tests.support.serving import SALT, caller, until, wait_until_empty, worker_config, workers
from tests.system.matrix.features import MODEL

PROMPTS = ([1, 2, 3, 4, 5, 6], [11, 12, 13], [21, 22, 23, 24])


class Reader:
    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []

    def send(self, deltas: list[Delta]) -> None:
        self.deltas += split_plain(deltas)

    def tokens(self, stream_id: int) -> list[int]:
        return [delta.token.token_id for delta in self.deltas if delta.stream_id == stream_id and delta.token]


class World:
    """Holds a worker with a prompt stream over an engine that checks the KV it reads."""

    def __init__(self, num_pages: int = 200) -> None:
        engine = cast(Any, FakeEngine(num_pages, 4))
        config = DecodeConfig(max_batch_sequences=8, max_batch_tokens=16, watermark=0.0, prompt_sm_share=0.25)
        self.pool = engine.pool
        self.worker = DecodeWorker(WorkerId("d"), engine, cast(Any, NoTransfers()), config, CONTEXT)
        self.steps = SplitSteps(self.worker, engine, random.Random(0))
        self.reader = Reader()

    def submit(self, stream_id: int, prompt: list[int], lane: Lane = Lane.STANDARD) -> DecodeRequest:
        sampling = SamplingParams(max_tokens=6, temperature=0.0)
        sequence = Sequence(RequestId(str(stream_id)), list(prompt), len(prompt), sampling, SALT, lane=lane)
        request = DecodeRequest(stream_id, sequence, self.reader, deque(), deadline_s=1e9)
        self.worker.submit(request)
        return request

    def finish(self) -> None:
        while self.steps.whole():
            self.pool.check_integrity()
        assert self.pool.num_available == self.pool.num_pages
        self.worker.scheduler.check_integrity()


def test_prompts_are_not_in_decode_steps() -> None:
    world = World()
    for stream_id, prompt in enumerate(PROMPTS):
        world.submit(stream_id, prompt)
    assert not world.worker.begin_step()
    plan = world.worker.begin_prompt_step()
    assert [item.sequence.token_ids for item in plan] == list(PROMPTS)
    assert plan.is_apart


def test_bulk_prompts_stay_in_decode_steps() -> None:
    world = World()
    world.submit(0, PROMPTS[0], Lane.BULK)
    assert not world.worker.begin_prompt_step()
    assert [item.num_tokens for item in world.worker.begin_step().chunks] == [len(PROMPTS[0])]


def test_the_prompts_of_a_failed_step_are_computed_one_by_one_and_the_cause_ends_alone() -> None:
    world = World()
    requests = [world.submit(stream_id, prompt) for stream_id, prompt in enumerate(PROMPTS)]
    broken = InternalError("the logits are not finite")
    assert len(world.steps.begin_prompts()) == len(requests)
    world.steps.end_prompts(broken)
    for request in requests:
        assert [item.sequence for item in world.steps.begin_prompts()] == [request.sequence]
        world.steps.end_prompts(broken if request is requests[1] else None)
    world.finish()
    assert [delta.error for delta in world.reader.deltas if delta.stream_id == 1] == [broken]
    for stream_id in (0, 2):
        assert world.reader.tokens(stream_id) == expected_tokens(PROMPTS[stream_id], 6)[0]


def test_pages_of_a_cancelled_prompt_are_free_only_when_its_step_is_over() -> None:
    world = World()
    request = world.submit(0, PROMPTS[0])
    world.steps.begin_prompts()
    world.worker.cancel(request)
    assert world.pool.num_available == world.pool.num_pages - 2
    world.steps.end_prompts()
    world.finish()
    assert world.reader.tokens(0) == []


def test_a_decoding_sequence_waits_for_pages_of_a_prompt_that_was_preempted_for_it() -> None:
    world = World(num_pages=4)
    world.submit(0, [1, 2, 3, 4, 5, 6, 7, 8])
    assert world.steps.whole()  # its first token
    world.submit(1, [11, 12, 13, 14, 15])
    assert [len(item.sequence.token_ids) for item in world.steps.begin_prompts()] == [5]
    world.steps.begin()
    assert not world.reader.tokens(1), "it needs a page, and the prompt stream may still write those of the other"
    assert not world.worker.begin_step()
    world.steps.end_prompts()
    world.finish()
    for stream_id, prompt in ((0, [1, 2, 3, 4, 5, 6, 7, 8]), (1, [11, 12, 13, 14, 15])):
        assert world.reader.tokens(stream_id) == expected_tokens(prompt, 6)[0]


def test_no_step_runs_ahead_of_a_sequence_that_waits_for_pages_of_a_prompt() -> None:
    """A step that is not scheduled ahead lets prompts begin again."""
    world = World(num_pages=5)
    world.submit(0, [1, 2, 3, 4, 5, 6, 7, 8])
    world.submit(1, [11, 12])
    assert world.steps.whole()
    world.submit(2, [21, 22, 23, 24, 25])
    assert world.steps.begin_prompts()
    assert [item.sequence.token_ids[0] for item in world.worker.begin_step()] == [11]
    world.steps.end_prompts()  # now there are pages for the first sequence
    assert world.worker.begin_step_ahead() is None


def test_a_share_of_the_multiprocessors_leaves_some_for_decode_steps() -> None:
    assert [num_partition_sms(share, 132) for share in (0.01, 0.25, 0.5, 0.9)] == [8, 32, 64, 120]
    assert num_partition_sms(0.9, 16) == 8


def test_combinations_that_are_not_served_are_refused_by_name() -> None:
    with pytest.raises(ValidationError, match=r"decode\.prompt_sm_share = 0\.5 computes prompts where decode\.draft"):
        DecodeConfig(prompt_sm_share=0.5, draft_model="draft", speculation="auto")
    engine = EngineConfig(model="m", tensor_parallel=2)
    with pytest.raises(ValidationError, match=r"prompt_sm_share = 0\.5 partitions one GPU, but engine\.tensor_parall"):
        WorkerConfig(worker_id="d", role=Role.DECODE, engine=engine, decode=DecodeConfig(prompt_sm_share=0.5))
    with pytest.raises(ConfigError, match=r"decode\.prompt_sm_share = 0\.5: this GPU or its driver has no green"):
        _make_green_context(0.5, 64, 0)  # torch without CUDA


def test_a_torch_whose_green_contexts_have_no_streams_is_refused_by_name() -> None:
    with unittest.mock.patch("torch.cuda.green_contexts.GreenContext", object):
        with pytest.raises(ConfigError, match=r"prompt_sm_share = 0\.5 needs a torch whose green contexts have str"):
            _make_green_context(0.5, 64, 0)


def test_a_prompt_beside_decode_steps_delays_streams_by_less_than_its_chunks() -> None:
    costs, in_chunks = StepCosts(prompt_sm_share=0.25), StepCosts()
    for num_tokens in (50, 100, 200) * 20:
        costs.on_step(StepWork(0, 0.0, 4, 400.0), 0.01)
        in_chunks.on_step(StepWork(0, 0.0, 4, 400.0), 0.01)
        costs.on_prompt_step(num_tokens, 0.0, num_tokens / 1e3)
        in_chunks.on_step(StepWork(num_tokens, 0.0, 4, 400.0), 0.01 + num_tokens / 1e3)
    beside = costs_of_chunks(costs.chunk_speed(4, 256), 1000, 0, 0, False)
    chunks = costs_of_chunks(in_chunks.chunk_speed(4, 256), 1000, 0, 0, False)
    assert beside.total_s == pytest.approx(1.0, rel=0.1)
    assert beside.added_s == pytest.approx(0.25, rel=0.1)  # the share of the SMs
    assert chunks.added_s == pytest.approx(1.0, rel=0.1)
    for _ in range(50):
        costs.on_beside(4, 0.011)
    measured = costs_of_chunks(costs.chunk_speed(4, 256), 1000, 0, 0, False)
    assert measured.total_s == pytest.approx(1.0, rel=0.1)
    assert measured.added_s == pytest.approx(1.0 / 11, rel=0.2)


async def _answers(share: float, num_pages: int) -> tuple[list[list[list[int]]], int, int]:
    """Returns the tokens of two rounds of the same requests, how many prompt tokens the second round found cached, and
    the number of preemptions.
    """
    decode = {"prompt_sm_share": share, "max_batch_tokens": 40, "max_batch_sequences": 24, "watermark": 0.0}
    engine = {"num_pages": num_pages, "dtype": "float32"}
    rounds, num_cached, num_preempted = [], 0, 0
    async with workers(worker_config(Role.DECODE, MODEL, "d", engine=engine, decode=decode)) as [server]:
        assert isinstance(server, DecodeServer)
        async with caller(server) as client:
            for _ in range(2):
                streams = [
                    client.submit(
                        [(7 * place + 131 * number) % 900 + 20 for place in range(90)],
                        SamplingParams(max_tokens=40, temperature=0.875 * (number % 2), seed=number, ignore_eos=True),
                    )
                    for number in range(6)
                ]
                answers = [await client.answer(stream) for stream in streams]
                rounds.append([answer.token_ids for answer in answers])
                assert not any(answer.error for answer in answers)
                num_cached = sum(answer.timing.cached_tokens for answer in answers)
                num_preempted += sum(answer.timing.num_preemptions for answer in answers)
            await wait_until_empty(server)
    return rounds, num_cached, num_preempted


@pytest.mark.processes
async def test_tokens_are_those_of_chunks_with_cached_prefixes_and_after_preemptions() -> None:
    chunked, num_cached, _ = await _answers(0.0, 128)
    assert num_cached
    apart, num_cached, _ = await _answers(0.3, 128)
    assert apart == chunked
    assert num_cached
    short_of_pages, _, num_preempted = await _answers(0.3, 26)
    assert short_of_pages == chunked
    assert num_preempted


@contextlib.contextmanager
def held_prompts(num_tokens: int) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Holds each step of a prompt stream with so many tokens. Yields two events: that such a step has begun, and that
    it may end.
    """
    begun, may_end, compute = threading.Event(), threading.Event(), PromptStream.compute

    def held(stream: PromptStream, step: PreparedStep) -> SampledTokens:
        if len(step.host.token_ids_T) == num_tokens:
            begun.set()
            assert may_end.wait(30)
        return compute(stream, step)

    with unittest.mock.patch.object(PromptStream, "compute", held):
        yield begun, may_end


@pytest.mark.processes
async def test_a_stream_goes_on_while_a_prompt_is_computed_and_the_prompt_may_be_cancelled() -> None:
    """Holds a prompt's step until a stream that runs beside it has ended and the prompt's caller has left."""
    config = worker_config(Role.DECODE, MODEL, "d", engine={"num_pages": 64}, decode={"prompt_sm_share": 0.3})
    with held_prompts(60) as (begun, may_end):
        async with workers(config) as [server], caller(server) as client:
            assert isinstance(server, DecodeServer)
            stream = client.submit([3, 4, 5], SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True))
            await client.next_delta(stream)
            prompt = client.submit(list(range(20, 80)))
            await until(begun.is_set)
            assert len((await client.answer(stream)).token_ids) > 8
            client.cancel(prompt)
            await until(lambda: not server.worker.requests)
            assert server.worker.scheduler._pool.num_held == 4, "its step may still write them"
            may_end.set()
            await wait_until_empty(server)


@pytest.mark.processes
async def test_a_preempted_prompt_resumes_if_the_stream_that_preempted_it_ends_with_its_step() -> None:
    """The stream waits for the pages of the prompt that it has preempted in mid-step, and is cancelled as they come."""
    engine = {"num_pages": 40, "prefix_caching": False}
    decode = {"prompt_sm_share": 0.3, "watermark": 0.0}
    with held_prompts(100) as (begun, may_end):
        async with workers(worker_config(Role.DECODE, MODEL, "d", engine=engine, decode=decode)) as [server]:
            assert isinstance(server, DecodeServer)
            async with caller(server) as client:
                loop = server.shell.loop

                def wait_for_call() -> None:
                    while loop._inbox.empty():
                        time.sleep(0.001)

                stream = client.submit([3, 4, 5], SamplingParams(max_tokens=620, temperature=0.0, ignore_eos=True))
                await client.next_delta(stream)
                loop.post(wait_for_call)  # the next call is the prompt's, so the stream needs no page before it
                prompt = client.submit(list(range(20, 120)))  # seven pages, and a step of its own
                await until(begun.is_set)
                await until(lambda: server.worker.scheduler._room.is_owed_pages)
                [request, _] = server.worker.requests

                def cancel() -> None:
                    server.worker.cancel(request)
                    may_end.set()
                    wait_for_call()  # the next call is the end of the prompt's step

                loop.post(cancel)
                answer = await client.answer(prompt)
                assert len(answer.token_ids) == 16
                assert answer.timing is not None
                assert answer.timing.num_preemptions == 1
            await wait_until_empty(server)


def test_the_prompt_stream_has_its_own_state_of_attention() -> None:
    from engine.engine import Engine

    engine = Engine.load(EngineConfig(model=str(MODEL), num_pages=8, dtype="float32"))
    try:
        stream = engine.open_prompt_stream(0.5)
        assert stream is engine.open_prompt_stream(0.5)
        assert stream._runner.attention is not engine.runner.attention
        assert engine.pool.num_available == 8
        assert not torch.cuda.is_available() or stream._partition is not None
    finally:
        engine.close()
