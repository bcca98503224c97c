"""Tests a batch whose worker and router are killed: every line has the answer of an undisturbed run, once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import openai
import pytest

from penstock.config import BatchConfig, RouterConfig
from penstock.types import Role
from tests.support.plain_processes import Deployment, Process, wait_until_followed
from tests.support.serving import worker_config
from tests.system.test_faults import MODEL, TIMEOUT_S

pytestmark = pytest.mark.processes

ENDPOINT = "/v1/completions"
NUM_LINES = 24
MAX_TOKENS = 100


def line(number: int) -> str:
    """Returns a greedy line, or a seeded one for odd numbers."""
    body = {"model": MODEL.name, "prompt": f"Line {number}: tell", "max_tokens": MAX_TOKENS, "ignore_eos": True}
    sampling = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0.0}
    return json.dumps({"custom_id": str(number), "method": "POST", "url": ENDPOINT, "body": body | sampling})


def client_of(router: Process) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://{router.http}/v1", api_key="none", timeout=TIMEOUT_S)


async def begin(client: openai.AsyncOpenAI) -> str:
    lines = "\n".join(map(line, range(NUM_LINES))).encode()
    file = await client.files.create(file=("in.jsonl", lines), purpose="batch")
    batch = await client.batches.create(input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h")
    return batch.id


async def until_completed(client: openai.AsyncOpenAI, batch_id: str, num_lines: int) -> None:
    """Returns once so many lines have an answer."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            batch = await client.batches.retrieve(batch_id)
            assert batch.status in ("validating", "in_progress", "finalizing", "completed"), batch
            if batch.request_counts and batch.request_counts.completed >= num_lines:
                return
            await asyncio.sleep(0.02)


async def texts_of(client: openai.AsyncOpenAI, batch_id: str) -> list[tuple[str, str]]:
    """Returns each line's name and text, sorted, once the batch is complete."""
    await until_completed(client, batch_id, NUM_LINES)
    async with asyncio.timeout(TIMEOUT_S):
        while (batch := await client.batches.retrieve(batch_id)).status != "completed":  # noqa: ASYNC110 - as clients do
            await asyncio.sleep(0.02)
    assert batch.output_file_id
    assert not batch.error_file_id
    answers = map(json.loads, (await client.files.content(batch.output_file_id)).text.splitlines())
    return sorted((each["custom_id"], each["response"]["body"]["choices"][0]["text"]) for each in answers)


async def test_a_batch_whose_worker_and_router_are_killed_has_every_answer_once(tmp_path: Path) -> None:
    engine = {"num_pages": 256, "num_threads": 1, "dtype": "float32"}
    configs = [
        worker_config(Role.DECODE, MODEL, f"d{number}", engine=engine, decode={"placement": "local"})
        for number in range(2)
    ]
    with Deployment() as deployment:
        workers = await asyncio.to_thread(deployment.start_workers, configs)
        config = RouterConfig(
            model=str(MODEL),
            served_model=MODEL.name,
            grpc_port=0,
            http_port=0,
            workers=tuple(worker.address for worker in workers),
            batches=BatchConfig(folder=str(tmp_path / "batches"), max_running=4),
        )
        first = await asyncio.to_thread(deployment.start_router, config)
        await asyncio.to_thread(wait_until_followed, first, 2)
        async with client_of(first) as client:
            expected = await texts_of(client, await begin(client))
            assert [name for name, _ in expected] == sorted(map(str, range(NUM_LINES)))
            batch_id = await begin(client)
            await until_completed(client, batch_id, 4)
            workers[0].kill()
            await until_completed(client, batch_id, 12)
        first.kill()
        second = await asyncio.to_thread(deployment.start_router, config)
        async with client_of(second) as client:
            assert await texts_of(client, batch_id) == expected
