"""Tests ranks that die or freeze during streams: their worker ends as a whole, and others finish its requests.

A router, a prefill and a decode worker of two ranks each, and a decode worker of one rank run as plain processes.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
from pathlib import Path

import pytest

from engine.engine import Engine
from engine.generate import generate
from penstock import AsyncClient
from penstock.config import EngineConfig, RouterConfig, WorkerConfig
from penstock.types import Role, SamplingParams
from tests.support.plain_processes import Deployment, Process
from tests.support.serving import worker_config

pytestmark = pytest.mark.processes

MODEL = Path(__file__).resolve().parents[2] / "models" / "penstock-tiny"
PROMPT = [(7 * place) % 900 + 20 for place in range(80)]
SEEDED = {"temperature": 0.875, "top_p": 0.9375, "seed": 11, "ignore_eos": True}  # exact in single precision
MAX_TOKENS = 64
TIMEOUT_S = 120.0


def config(role: Role, name: str, num_ranks: int) -> WorkerConfig:
    return worker_config(
        role,
        MODEL,
        name,
        engine={
            "num_pages": 256,
            "dtype": "float32",
            "tensor_parallel": num_ranks,
            "rank_timeout_s": 5.0,
            "run_ahead": num_ranks > 1,  # one more step has been announced to other ranks when a rank dies
        },
        transfer={"timeout_s": 5.0},
    )


def ranks_of(worker: Process) -> list[int]:
    """Returns the process ids of the ranks other than the first."""
    children = Path(f"/proc/{worker.ready['pid']}/task").glob("*/children")
    return [int(pid) for file in children for pid in file.read_text().split()]


async def stream(client: AsyncClient) -> list[int]:
    """Returns the tokens of a request sent through the router."""
    answer = await client.complete(PROMPT, max_tokens=MAX_TOKENS, **SEEDED)
    return list(answer.token_ids)


def has_ended(pidfd: int) -> bool:
    """Waits for the process to end."""
    poll = select.poll()  # `select.select` takes no descriptor beyond 1023
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(TIMEOUT_S * 1e3))


async def test_a_frozen_or_killed_rank_ends_its_worker_but_no_request() -> None:
    alone = Engine.load(EngineConfig(model=str(MODEL), num_pages=256, num_threads=1, dtype="float32"))
    wanted = generate(
        alone, PROMPT, SamplingParams(max_tokens=MAX_TOKENS, temperature=0.875, top_p=0.9375, seed=11, ignore_eos=True)
    )
    with Deployment() as deployment:
        workers = deployment.start_workers(
            [config(Role.PREFILL, "prefill", 2), config(Role.DECODE, "split", 2), config(Role.DECODE, "alone", 1)]
        )
        prefill, split, _ = workers
        addresses = tuple(worker.address for worker in workers)
        router = deployment.start_router(RouterConfig(model=str(MODEL), grpc_port=0, http_port=0, workers=addresses))
        async with AsyncClient(router.address, timeout_s=TIMEOUT_S) as client:
            assert await stream(client) == wanted
            for worker, number in ((split, signal.SIGSTOP), (prefill, signal.SIGKILL)):
                (rank,) = ranks_of(worker)
                held = os.pidfd_open(rank)
                streams = [asyncio.create_task(stream(client)) for _ in range(3)]
                os.kill(rank, number)
                assert await asyncio.gather(*streams) == [wanted] * 3
                assert await asyncio.to_thread(worker.popen.wait, TIMEOUT_S) == 1
                assert await asyncio.to_thread(has_ended, held)
                os.close(held)
