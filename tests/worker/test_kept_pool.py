"""Kills a decode worker under a stream: its successor continues with the pages that it had computed."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from penstock.config import KeeperConfig
from penstock.types import Role, SamplingParams
from tests.support.engine.checkpoints import perturb_weights
from tests.support.plain_processes import Deployment
from tests.support.serving import caller, worker_config
from worker.pull.kept.keeper_link import distrust

pytestmark = pytest.mark.processes

MODEL = Path(__file__).resolve().parents[2] / "models" / "penstock-tiny"
PROMPT = [(7 * i) % 900 + 20 for i in range(600)]
LONG = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)


async def test_a_successor_continues_a_killed_workers_stream_with_its_pages() -> None:
    keeper = KeeperConfig(name=f"test-{uuid.uuid4().hex}", lease_s=60.0)
    config = worker_config(Role.DECODE, MODEL, engine={"num_pages": 256}, decode={"placement": "local"})
    config = config.model_copy(update={"keeper": keeper})
    with Deployment() as deployment:
        [first] = deployment.start_workers([config])
        async with caller(first.address) as router:
            whole = (await router.answer(router.submit(PROMPT, LONG))).token_ids
            assert len(whole) == LONG.max_tokens
            stream = router.submit([*PROMPT, 7], LONG)
            tokens: list[int] = []
            while len(tokens) < 60:
                tokens += (await router.next_delta(stream)).token_ids
            first.kill()
        [second] = deployment.start_workers([config])
        async with caller(second.address) as router:
            sent = [*PROMPT, *whole[:100]]
            answer = await router.answer(router.submit(sent, LONG, num_prompt_tokens=len(PROMPT)))
            assert answer.timing is not None
            assert whole[:100] + answer.token_ids[:100] == whole
            assert answer.timing.cached_tokens == len(sent) // 16 * 16


async def test_pages_of_a_distrusted_worker_are_not_inherited() -> None:
    keeper = KeeperConfig(name=f"test-{uuid.uuid4().hex}", lease_s=60.0)
    config = worker_config(Role.DECODE, MODEL, engine={"num_pages": 256}, decode={"placement": "local"})
    config = config.model_copy(update={"keeper": keeper})
    distrust(keeper.name, 1)  # there is no keeper yet
    with Deployment() as deployment:
        workers = []
        for cached_tokens in (0, 592, 0):  # the second worker inherits, and the third would as well
            [worker] = deployment.start_workers([config])
            workers.append(worker)
            async with caller(worker.address) as router:
                timing = (await router.answer(router.submit(PROMPT, LONG))).timing
                assert timing is not None
                assert timing.cached_tokens == cached_tokens
            if len(workers) == 2:
                distrust(keeper.name, worker.popen.pid)
            worker.kill()


async def test_pages_of_other_weights_are_not_inherited(tmp_path: Path) -> None:
    keeper = KeeperConfig(name=f"test-{uuid.uuid4().hex}", lease_s=60.0)
    config = worker_config(Role.DECODE, MODEL, engine={"num_pages": 256}, decode={"placement": "local"})
    config = config.model_copy(update={"keeper": keeper})
    weights = perturb_weights(MODEL, tmp_path / "v1", 1)
    updated = config.model_copy(update={"engine": config.engine.model_copy(update={"weights": weights})})
    answers = []
    with Deployment() as deployment:
        for each, cached_tokens in ((config, 0), (updated, 0), (updated, 592)):
            [worker] = deployment.start_workers([each])
            async with caller(worker.address) as router:
                answers.append(await router.answer(router.submit(PROMPT, LONG)))
            timing = answers[-1].timing
            assert timing is not None
            assert timing.cached_tokens == cached_tokens
            worker.kill()
    assert answers[0].token_ids != answers[1].token_ids
    assert answers[1].token_ids == answers[2].token_ids
