"""Tests processes that share a store over time: one computes a prompt and ends, and a new one continues with its
pages."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock.config import KvStoreConfig, WorkerConfig
from penstock.metrics.worker_metrics import STORE_BYTES, STORE_READ_PAGES, STORE_WRITES
from penstock.rpc.server import make_channel
from penstock.types import Role, SamplingParams
from penstock.v1 import worker_pb2, worker_pb2_grpc
from tests.support.plain_processes import Deployment
from tests.support.serving import caller, worker_config

pytestmark = pytest.mark.processes

MODEL = Path(__file__).resolve().parents[3] / "models" / "penstock-tiny"
PROMPT = [(7 * i) % 900 + 20 for i in range(1200)]
STORED = len(PROMPT) // 256 * 256
TIMEOUT_S = 60.0
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def sharing(folder: Path) -> WorkerConfig:
    config = worker_config(Role.DECODE, MODEL, engine={"num_pages": 256}, decode={"placement": "local"})
    return config.model_copy(update={"kv_store": KvStoreConfig(url=f"file://{folder}", listing_s=0.1)})


async def metric(address: str, name: str) -> float:
    """Returns a metric that the worker reports with its load."""
    async with make_channel(address) as channel, asyncio.timeout(TIMEOUT_S):
        async for batch in worker_pb2_grpc.WorkerStub(channel).WatchEvents(worker_pb2.WatchEventsRequest()):
            if batch.HasField("load"):
                return batch.load.metrics.get(name, 0.0)
    raise AssertionError("the worker has not reported its load")


async def wait_for(address: str, name: str, value: float) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while await metric(address, name) < value:  # noqa: ASYNC110 - there is not an event to wait for
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("is_killed", [False, True])
async def test_a_new_process_serves_a_prefix_that_an_earlier_one_computed(tmp_path: Path, is_killed: bool) -> None:
    with Deployment() as deployment:
        [first] = deployment.start_workers([sharing(tmp_path)])
        async with caller(first.address) as router:
            whole = await router.answer(router.submit(PROMPT, GREEDY))
            # The second prompt with this beginning makes it worth writing.
            await router.answer(router.submit(PROMPT, GREEDY))
            await wait_for(first.address, STORE_WRITES.name, STORED // 256)
        if is_killed:
            first.kill()
    with Deployment() as deployment:
        [second] = deployment.start_workers([sharing(tmp_path)])
        await wait_for(second.address, STORE_BYTES.name, 1)  # it has listed the store
        async with caller(second.address) as router:
            answer = await router.answer(router.submit(PROMPT, GREEDY))
        assert await metric(second.address, STORE_READ_PAGES.name) > 0
    assert answer.token_ids == whole.token_ids
    assert answer.timing is not None
    assert whole.timing is not None
    # The last runs of pages are read first, while the worker computes the first ones: how many depends on the machine.
    assert whole.timing.cached_tokens == 0
    assert 0 < answer.timing.cached_tokens <= STORED
    assert answer.timing.pull.source == "shared store"
