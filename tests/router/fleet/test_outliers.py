"""Tests, over gRPC, that failing workers and links are avoided and that a request that kills workers is stopped."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from penstock.errors import InternalError, Quarantined
from penstock.v1 import worker_pb2
from router.fleet.circuit_breaker import BreakerRules
from tests.router.api.test_grpc_service import collect, failure, request
from tests.support.router.router_fakes import FakeWorker, RunningRouter, expected_tokens, running_router

POISON = 666


def tokens_of(messages: list) -> list[int]:
    return [token for message in messages for token in message.token_ids]


def rest_for_good(router: RunningRouter) -> None:
    """Makes breakers rest longer than any test lasts, so that no trial depends on the machine's speed."""
    router.server.fleet.health.__init__(BreakerRules(rest_s=1e6, max_rest_s=1e6))  # type: ignore[misc]


async def test_a_worker_that_fails_every_request_does_not_attract_all_of_them() -> None:
    """Without a breaker, a worker that fails fast looks idle and gets every request."""
    hole = await FakeWorker("decode-0", epoch=1, refuse_with=InternalError("no device")).start()
    sound = await FakeWorker("decode-1", epoch=2).start()
    async with running_router(hole, sound, policy="round-robin") as router:
        rest_for_good(router)
        outcomes: Counter[bool] = Counter()
        for _ in range(16):
            call = router.stub.Generate(request("hello", max_tokens=2))
            try:
                await collect(call)
                outcomes[True] += 1
            except Exception:
                outcomes[False] += 1
        assert outcomes[False] == len(hole.submits) == 3
        metrics = router.server._metrics.render().decode()
        assert 'penstock:open_circuits{model_name="penstock-tiny"} 1.0' in metrics


@pytest.mark.parametrize("fault", [worker_pb2.PREFILL_FAULT_WORKER, worker_pb2.PREFILL_FAULT_LINK])
async def test_a_prefill_worker_whose_pages_do_not_arrive_is_avoided(fault: worker_pb2.PrefillFault) -> None:
    decode = await FakeWorker("decode-0", epoch=1).start()
    prefills = [await FakeWorker(f"prefill-{rank}", epoch=10 + rank, role="prefill").start() for rank in range(2)]
    decode.prefill_faults["prefill-0"] = fault
    async with running_router(decode, *prefills, policy="round-robin") as router:
        rest_for_good(router)
        for number in range(12):
            await collect(router.stub.Generate(request(token_ids=[300 + number] * 40, max_tokens=1)))
    firsts = [submit.prefill_candidates[0].worker_id for submit in decode.submits]
    assert firsts.count("prefill-0") == 3
    assert firsts[-5:] == ["prefill-1"] * 5


async def test_a_request_that_kills_workers_is_stopped_and_no_other_is_lost() -> None:
    workers = [await FakeWorker(f"decode-{n}", epoch=1 + n, dies_of=POISON, step_s=0.005).start() for n in range(5)]
    async with running_router(*workers, max_redispatches=10) as router:
        others = [
            asyncio.create_task(collect(router.stub.Generate(request(token_ids=[400 + n] * 20, max_tokens=60))))
            for n in range(6)
        ]
        error = await failure(router.stub.Generate(request(token_ids=[5, POISON, 5], max_tokens=9)))
        assert isinstance(error, Quarantined)
        assert "three workers in a row" in error.message
        victims = [worker for worker in workers if any(POISON in submit.token_ids for submit in worker.submits)]
        assert len(victims) == 3
        for number, messages in enumerate(await asyncio.gather(*others)):
            first = next(
                submit
                for worker in workers
                for submit in worker.submits
                if submit.token_ids[0] == 400 + number and len(submit.token_ids) == submit.num_prompt_tokens
            )
            assert tokens_of(messages) == expected_tokens(first, 60)
        again = await failure(router.stub.Generate(request(token_ids=[5, POISON, 5], max_tokens=9)))
        assert isinstance(again, Quarantined)
        assert sum(POISON in submit.token_ids for worker in workers for submit in worker.submits) == 3
        await collect(router.stub.Generate(request(token_ids=[7] * 20, max_tokens=3)))
