"""Tests bulk requests beside others at real workers: they are held back, preempted and continued, all tokens exact."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from penstock.types import Lane, Role
from tests.support.engine.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.serving import GREEDY, caller, until, wait_until_empty, worker_config, workers


async def test_bulk_requests_that_yield_and_are_preempted_get_the_tokens_of_an_idle_worker(tmp_path: Path) -> None:
    """Prompts are computed here and at a prefill worker. The pool is too small for all, so bulk is preempted."""
    model = make_checkpoint("llama", tmp_path / "llama")
    engine = {"dtype": "float32", "num_pages": 16}
    prompts = [[(7 * i + j) % (VOCAB_SIZE - 2) + 2 for j in range(20 + 3 * i)] for i in range(6)]
    sampling = replace(GREEDY, max_tokens=30)
    async with workers(
        worker_config(Role.PREFILL, model, engine={"dtype": "float32"}),
        worker_config(Role.DECODE, model, engine=engine, decode={"max_batch_sequences": 4}),
    ) as (prefill, decode):
        scheduler = decode.worker.scheduler
        async with caller(decode) as router:

            def submit(number: int, lane: Lane) -> int:
                return router.submit(prompts[number], sampling, [prefill] if number % 2 else [], lane=lane)

            alone = [(await router.answer(submit(number, Lane.STANDARD))).token_ids for number in range(6)]
            bulk = [submit(number, Lane.BULK) for number in range(6)]
            await until(lambda: scheduler.num_running > 0)
            for lane in (Lane.INTERACTIVE, Lane.STANDARD):
                others = [submit(number, lane) for number in range(6)]
                for number, answer in enumerate(await asyncio.gather(*map(router.answer, others))):
                    assert (answer.error, answer.token_ids) == (None, alone[number])
            for number, answer in enumerate(await asyncio.gather(*map(router.answer, bulk))):
                assert (answer.error, answer.token_ids) == (None, alone[number])
        await wait_until_empty(prefill, decode)
