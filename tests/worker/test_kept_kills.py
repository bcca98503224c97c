"""Kills a decode worker repeatedly at random moments: its successors continue every stream exactly, with its pages."""

from __future__ import annotations

import asyncio
import os
import random
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from penstock.config import KeeperConfig, WorkerConfig
from penstock.types import Role, SamplingParams
from tests.support.plain_processes import Deployment
from tests.support.serving import Caller, caller, worker_config
from tests.support.suite.examples import DEPTH

pytestmark = [pytest.mark.processes, pytest.mark.timeout(7200)]

MODEL = Path(__file__).resolve().parents[2] / "models" / "penstock-tiny"
NUM_KILLS = 6 * int(os.environ.get(DEPTH, "1"))
NUM_STREAMS = 4
MAX_TOKENS = 150


@dataclass
class Stream:
    """Holds a request that is sent again with its tokens so far until it is complete."""

    prompt: list[int]
    sampling: SamplingParams
    whole: list[int]  # what an undisturbed worker answers
    tokens: list[int] = field(default_factory=list)
    is_over: bool = False
    cached_tokens: int = 0
    progress: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, router: Caller) -> None:
        """Reads until the stream or its worker ends."""
        self.progress.clear()
        sent = [*self.prompt, *self.tokens]
        stream = router.submit(sent, self.sampling, num_prompt_tokens=len(self.prompt))
        try:
            while not self.is_over:
                delta = await router.next_delta(stream)
                assert not delta.HasField("error"), delta.error
                self.tokens += delta.token_ids
                self.progress.set()
                if delta.HasField("timing"):
                    self.cached_tokens = delta.timing.cached_tokens
                self.is_over = bool(delta.finish_reason)
        except ConnectionError:
            pass  # its worker was killed
        assert self.tokens == self.whole[: len(self.tokens)]


async def make_streams(config: WorkerConfig, rng: random.Random) -> list[Stream]:
    """Returns prompts, some with a common beginning, with their undisturbed answers."""
    shared = [rng.randrange(20, 900) for _ in range(200)]
    prompts = [shared[: 16 * number] + [rng.randrange(20, 900) for _ in range(300)] for number in range(NUM_STREAMS)]
    streams = []
    with Deployment() as deployment:
        [worker] = deployment.start_workers([config.model_copy(update={"keeper": None})])
        async with caller(worker.address) as router:
            for number, prompt in enumerate(prompts):
                temperature = 0.8 if number % 2 else 0.0
                sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=number, ignore_eos=True)
                answer = await router.answer(router.submit(prompt, sampling))
                streams.append(Stream(prompt, sampling, answer.token_ids))
    return streams


async def test_streams_are_exact_however_often_and_whenever_their_worker_is_killed() -> None:
    rng = random.Random(7)
    config = worker_config(Role.DECODE, MODEL, engine={"num_pages": 256}, decode={"placement": "local"})
    streams = await make_streams(config, rng)
    keeper = KeeperConfig(name=f"test-{uuid.uuid4().hex}", lease_s=60.0)
    config = config.model_copy(update={"keeper": keeper})
    with Deployment() as deployment:
        for number in range(NUM_KILLS):
            [worker] = deployment.start_workers([config])
            async with caller(worker.address) as router:
                running = [asyncio.create_task(stream.read(router)) for stream in streams]
                await asyncio.sleep(rng.uniform(0.0, 0.3))
                if number == NUM_KILLS - 1:  # even on a slow machine there is something to inherit
                    await asyncio.gather(*(stream.progress.wait() for stream in streams))
                worker.kill()
                await asyncio.gather(*running)
            for stream in streams:
                if stream.is_over:
                    stream.tokens, stream.is_over = [], False
        [worker] = deployment.start_workers([config])
        async with caller(worker.address) as router:
            await asyncio.gather(*(stream.read(router) for stream in streams))
    assert all(stream.tokens == stream.whole for stream in streams)
    assert all(stream.cached_tokens >= 288 for stream in streams), "the last worker computed what the others left"
